"""`ci/bench/run [--quick] [--threads N] [--rows N] [--out FILE] [--chart FILE] [workload ...]`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import harness

HERE = Path(__file__).parent
TOOLS = {"__main__", "harness", "report", "chart", "peers", "clusters"}
WORKLOADS = sorted(file.stem for file in HERE.glob("*.py") if file.stem not in TOOLS)


@click.command()
@click.argument("workloads", nargs=-1, type=click.Choice(WORKLOADS))
@click.option("--quick", is_flag=True, help="Tiny sizes: shows that it runs, measures nothing.")
@click.option("--threads", type=click.IntRange(1), help="Cores that every arm may use, workers included. Default: all.")
@click.option("--rows", type=click.IntRange(1), help="Rows, for workloads that take a size: pipeline (100_000_000 for the full one).")
@click.option("--profile/--no-profile", default=True, help="Where a mark is missed, say where the time goes.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=HERE / "results" / "latest.json",
    show_default="ci/bench/results/latest.json",
    help="JSON file for the numbers.",
)
@click.option("--chart", type=click.Path(dir_okay=False, path_type=Path), help="SVG or PNG. Default: beside the JSON, as SVG.")
def main(
    workloads: tuple[str, ...], quick: bool, threads: int | None, rows: int | None, profile: bool, out: Path, chart: Path | None
) -> None:
    """Measure the named WORKLOADS, or all; print tables, write JSON and a chart."""
    if threads is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])  # before torch or JAX count the cores
    import report  # imports torch

    about = report.where(quick)
    outcomes, failed = {}, {}
    for name in workloads or WORKLOADS:
        try:
            for label, workload in made(name, quick, rows):
                outcomes[label] = harness.run(workload, profiled=profile and not quick)
                click.echo(report.table(label, outcomes[label]) + "\n")
        except Exception:  # the other workloads still have something to tell; this one ends the run as a failure
            failed[name] = traceback.format_exc()
            click.echo(f"{name} failed:\n{failed[name]}", err=True)
    click.echo(report.summary(outcomes))
    report.write(out, report.as_json(outcomes, failed, about))
    picture = chart or out.with_suffix(".svg")
    _draw(outcomes, about, picture)
    click.echo(f"Written: {out}, {picture}")
    sys.exit(1 if failed else 0)


def made(name: str, quick: bool, rows: int | None) -> Iterator[tuple[str, harness.Workload]]:
    """The workloads of a file: one by its `workload`, or several, with a label each, by its `workloads`."""
    module = importlib.import_module(name)
    if hasattr(module, "workload"):
        yield name, module.workload(quick, **_sized(module.workload, rows))
    else:
        for label, workload in module.workloads(quick, **_sized(module.workloads, rows)):
            yield f"{name}: {label}", workload


def _sized(make: Callable[..., Any], rows: int | None) -> dict[str, int]:
    return {"rows": rows} if rows is not None and "rows" in inspect.signature(make).parameters else {}


def _draw(outcomes: Any, about: Any, path: Path) -> None:
    import chart

    path.parent.mkdir(parents=True, exist_ok=True)
    chart.draw(outcomes, about, path)


if __name__ == "__main__":
    main()
