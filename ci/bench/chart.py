"""The picture of a run: how many times as many rows per second daskgrad does, beside each other way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import Measured, Outcome

HEADINGS = {
    "square": "x·x, a gradient per row, pandas in and out",
    "black_scholes": "Black-Scholes: value and 5 Greeks",
    "paths_10": "if and while, 10 paths",
    "norms": "norm of a gradient by an MLP's parameters",
    "engines": "5 Greeks from Parquet, 2 processes",
}
FASTER, SLOWER, TEXT, FAINT = "#2f6fb0", "#c2703d", "#222222", "#8a8a8a"


def draw(outcomes: Mapping[str, Outcome], about: Mapping[str, Any], path: Path) -> None:
    """One bar for each way other than daskgrad's own first one; nothing where there is none to draw."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib.figure import Figure

    chosen = {name: outcomes[name] for name in HEADINGS if name in outcomes} or dict(outcomes)
    lines = [line for name, outcome in chosen.items() for line in _lines(HEADINGS.get(name, outcome.title), outcome)]
    with mpl.rc_context({"font.family": "sans-serif", "font.size": 9.5, "svg.fonttype": "none", "svg.hashsalt": "daskgrad"}):
        figure = Figure(figsize=(9, 1.5 + 0.27 * len(lines)), layout="constrained")
        axes = figure.add_subplot()
        for place, (label, arm) in enumerate(lines):
            _line(axes, place, label, arm)
        axes.set_ylim(len(lines) - 0.3, -0.7)
        _frame(axes, about)
        figure.suptitle("Rows per second of daskgrad, as a multiple of each way's", x=0.01, ha="left", fontsize=12, fontweight="bold")
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def _lines(heading: str, outcome: Outcome) -> list[tuple[str, Measured | None]]:
    others = [arm for arm in outcome.arms[1:] if arm.ratio > 0]
    return [(heading, None), *((arm.name, arm) for arm in others)] if others else []


def _line(axes: Any, place: int, label: str, arm: Measured | None) -> None:
    across = axes.get_yaxis_transform()
    if arm is None:
        axes.text(-0.52, place, label, transform=across, fontweight="bold", va="center", color=TEXT)
        return
    axes.text(-0.02, place, label, transform=across, ha="right", va="center", color=TEXT)
    times = 1 / arm.ratio
    color = FASTER if times >= 1 else SLOWER
    axes.plot([1, times], [place, place], color=color, linewidth=7, solid_capstyle="butt", alpha=0.85)
    axes.plot([1 / arm.high, 1 / arm.low], [place, place], color=TEXT, linewidth=1.2)  # the middle half of the rounds
    text = f"{times:,.0f} ×" if times >= 10 else f"{times:.2g} ×"
    axes.annotate(text, (max(times, 1 / arm.low, 1), place), (5, 0), textcoords="offset points", va="center", color=TEXT)


def _frame(axes: Any, about: Mapping[str, Any]) -> None:
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.5), max(high * 3, 3))  # room for the numbers
    axes.axvline(1, color=TEXT, linewidth=1)
    axes.grid(axis="x", color="#e3e3e3", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f} ×" if value >= 1 else f"{value:g} ×")
    axes.tick_params(axis="x", colors=FAINT, length=0)
    axes.set_yticks([])
    for side in ("top", "left", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel(_caption(about), color=FAINT, fontsize=8, loc="left")


def _caption(about: Mapping[str, Any]) -> str:
    machine, versions = about["machine"], about["versions"]
    named = [f"{name} {versions[name]}" for name in ("daskgrad", "torch", "jax", "pandas", "dask") if versions[name] != "not installed"]
    tiny = "tiny sizes, not a measurement · " if about["quick"] else ""
    cores = f"{machine['cores_used']} of {machine['cores']} cores"
    return (
        f"{tiny}Log scale; median of paired rounds, the thin line is the middle half. Right of 1: daskgrad is faster.\n"
        f"{machine['processor']}, {cores} · {about['date']}\nPython {versions['python']}, {', '.join(named)}"
    )
