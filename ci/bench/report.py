"""What a run of the benchmarks tells: tables, a summary of marks, JSON."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from harness import Outcome, Reached

import daskgrad

NAMED = (
    "torch", "numpy", "pandas", "dask", "distributed", "pyarrow", "joblib", "jax", "backpack-for-pytorch", "opacus", "ray", "pyspark",
)  # fmt: skip


def table(name: str, outcome: Outcome) -> str:
    """The arms of one workload as lines of text."""
    results = outcome.arms
    names = [result.name for result in results] + list(outcome.missing)
    width, unit = max(len(name) for name in names), outcome.unit
    lines = [f"{name}: {outcome.title}", f"  {'':<{width}}  {unit:>10}  {unit + '/s':>12}  {'±':>4}  {'best':>12}  × {results[0].name}"]
    for result in results:
        ratio = "1" if result is results[0] else f"{result.ratio:.3g}  [{result.low:.3g}, {result.high:.3g}]"
        numbers = f"{result.rows:>10,}  {result.rows_per_second:>12,.0f}  {result.spread:>4.0%}  {result.best:>12,.0f}"
        lines.append(f"  {result.name:<{width}}  {numbers}  {ratio}")
    lines += [f"  {absent:<{width}}  not measured: {why}" for absent, why in outcome.missing.items()]
    return "\n".join([*lines, *(f"  {note}" for note in outcome.notes)])


def summary(outcomes: Mapping[str, Outcome]) -> str:
    """Every mark with what was reached, and under it, where it was missed, where the time goes."""
    marks = [mark for outcome in outcomes.values() for mark in outcome.marks]
    if not marks:
        return ""
    width = max(len(mark.work) for mark in marks)
    lines = [f"  {'':<{width}}  {'mark':>10}  reached"]
    lines += [f"  {mark.work:<{width}}  {bound(mark):>10}  {value(mark)}" for mark in marks]
    for mark in marks:
        if mark.profile:
            lines += ["", f"Where the time goes: {mark.work}", *(f"    {line}" for line in mark.profile.splitlines())]
    return "\n".join(["Marks", *lines])


def bound(mark: Reached) -> str:
    return {"speed": f"≥ {mark.bound:,g} ×", "time": f"≤ {mark.bound:,g} ×", "extra": f"≤ {mark.bound:g} ms"}[mark.kind]


def value(mark: Reached) -> str:
    if mark.value is None or mark.low is None or mark.high is None:
        return f"not measured ({mark.why})"
    unit = "ms" if mark.kind == "extra" else "×"
    digits = ",.0f" if mark.value >= 100 else ".3g"
    return f"{mark.value:{digits}} {unit}  [{mark.low:{digits}}, {mark.high:{digits}}]" + ("" if mark.met else "  missed")


def where(quick: bool) -> dict[str, Any]:
    """What one needs to know to compare these numbers with those of another day."""
    return {
        "date": datetime.date.today().isoformat(),
        "quick": quick,
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "cores_used": len(os.sched_getaffinity(0)),
            "torch_threads": torch.get_num_threads(),
            "system": platform.system(),
            "load_before": os.getloadavg()[0],
        },
        "versions": {"python": platform.python_version(), "daskgrad": daskgrad.__version__} | versions(),
    }


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Of what is installed."""
    found = {}
    for name in NAMED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def as_json(outcomes: Mapping[str, Outcome], failed: Mapping[str, str], about: Mapping[str, Any]) -> str:
    workloads = {name: asdict(outcome) for name, outcome in outcomes.items()}
    return json.dumps({**about, "workloads": workloads, "failed": dict(failed)}, indent=2)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
