"""`ci/bench/run [--quick] [--out FILE] [workload ...]`: measure, print tables, write JSON."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import click
import harness

HERE = Path(__file__).parent
WORKLOADS = sorted(file.stem for file in HERE.glob("*.py") if file.stem not in {"__main__", "harness"})


@click.command()
@click.argument("workloads", nargs=-1, type=click.Choice(WORKLOADS))
@click.option("--quick", is_flag=True, help="Tiny sizes: shows that it runs, measures nothing.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=HERE / "results" / "latest.json",
    show_default="ci/bench/results/latest.json",
    help="JSON file for the numbers.",
)
def main(workloads: tuple[str, ...], quick: bool, out: Path) -> None:
    """Measure the named WORKLOADS, or all."""
    results = {}
    for name in workloads or WORKLOADS:
        for label, workload in made(name, quick):
            results[label] = harness.measure(workload)
            click.echo(harness.table(f"{label}: {workload.title}", results[label]) + "\n")
    harness.write(out, harness.as_json(results))
    click.echo(f"Written: {out}")


def made(name: str, quick: bool) -> Iterator[tuple[str, harness.Workload]]:
    """The workloads of a file: one, or several with a name each."""
    module = importlib.import_module(name)
    if hasattr(module, "workload"):
        yield name, module.workload(quick)
    else:
        for label, workload in module.workloads(quick):
            yield f"{name}: {label}", workload


if __name__ == "__main__":
    main()
