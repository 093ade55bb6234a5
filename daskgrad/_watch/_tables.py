"""The gradient page's numbers as HTML: on the dashboard and in a notebook the same.

Everything that comes from data (labels, messages, names) passes `text`, so that it is shown as text. Travels by value, as `_history`.
"""

from __future__ import annotations

import html
import math
import time
from typing import Any

from ._history import LOWEST, PER_DECADE
from ._tally import Line

COLORS = ("#1f77b4", "#e6842a", "#2ca02c", "#b23b3b", "#8b5fb5", "#8c564b", "#d05fa8", "#5f5f5f")
SHOWN = len(COLORS)  # columns with a curve of their own

STYLE = """
.bk-clearfix {display: block; width: 100%}
.dg {font: 14px/1.45 Helvetica, Arial, sans-serif; color: #222; max-width: 100%}
.dg h3 {font-size: 15px; font-weight: bold; margin: 14px 0 4px}
.dg .tiles {display: flex; flex-wrap: wrap; gap: 8px; margin: 8px 0}
.dg .tile {background: #fff; border: 1px solid #ddd; border-radius: 4px; padding: 6px 12px; min-width: 84px}
.dg .tile b {display: block; font-size: 18px; font-weight: bold; font-variant-numeric: tabular-nums; white-space: nowrap}
.dg .tile span {color: #555; font-size: 12px}
.dg .tile.bad b {color: #b30000}
.dg .bar {height: 8px; background: #ddd; border-radius: 4px; overflow: hidden}
.dg .bar i {display: block; height: 100%; background: #eaaa6d}
.dg .scroll {overflow-x: auto; max-width: 100%}
.dg table {border-collapse: collapse; font-size: 13px; background: #fff; min-width: 50%}
.dg td, .dg th {text-align: left; padding: 3px 12px 3px 6px; border-bottom: 1px solid #e4e4e4; vertical-align: top}
.dg th {color: #555; font-weight: normal; white-space: nowrap}
.dg td.n, .dg th.n {text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap}
.dg td {white-space: nowrap}
.dg td.message {font-family: monospace; font-size: 12px; white-space: normal; overflow-wrap: anywhere; min-width: 12em}
.dg .swatch {display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px}
.dg pre {background: #fff; border: 1px solid #ddd; border-radius: 4px; padding: 8px; display: inline-block; margin: 4px 0}
.dg .none {color: #555}
"""
NOTHING = (
    '<div class="dg"><h3>No derivatives yet</h3><p>This page fills as soon as this cluster computes some, '
    'for example by</p><pre>import daskgrad as dg\n\nddf["slope"] = dg.grad_column(ddf, f)\nddf.compute()</pre>'
    "<p>with a Dask DataFrame <code>ddf</code> and a function <code>f</code> of one row.</p></div>"
)
GONE = '<div class="dg"><h3>This page has been taken away</h3><p><code>dg.monitor(client)</code> brings it back.</p></div>'


def text(value: Any) -> str:
    """`value` as HTML that shows it literally, whatever direction its letters have."""
    return f"<bdi>{html.escape(str(value))}</bdi>"


def summary(state: dict[str, Any]) -> str:
    """What is computed, how far it is, and what went wrong, in numbers."""
    if state["shown"] is None:
        return NOTHING
    line = Line.of_state("", state["line"])
    fraction = state["fraction"]
    rows = f"{line.rows:,}" + ("" if line.of is None else f" of {line.of:,}")
    parts = f"{line.parts:,}" + ("" if line.all is None else f" of {line.all:,}")
    tiles = [
        _tile("rows", rows, "rows done"),
        _tile("parts", parts, "partitions done"),
        _tile("rate", f"{number(speed(state))}", "rows/s" if state["rate"] is not None else "rows/s on average"),
        _tile("time", duration(state["seconds"]), _left(state)),
        _tile("engine", text(engine(state["engines"])), _paths(state["paths"])),
        _tile("missing", f"{state['missing']:,}", "rows with a missing value"),
        _tile("bad", f"{state['bad']:,}", "rows not finite" + _looked(state, line.rows), alarming=state["bad"]),
        _tile("failed", f"{state['failed']:,}", _failed(line), alarming=state["failed"] or line.failed),
    ]
    bar = "" if fraction is None else f'<div class="bar"><i style="width:{100 * fraction:.1f}%"></i></div>'
    head = f'<h3>{text(state["title"])} · computation {state["shown"]} · <span data-dg="condition">{state["condition"]}</span></h3>'
    return f'<div class="dg">{head}{bar}<div class="tiles">{"".join(tiles)}</div></div>'


def columns(state: dict[str, Any]) -> str:
    """A line for each result column."""
    if not state.get("columns"):
        return ""
    rows = []
    for place, (label, looked, bad, zeros, bins) in enumerate(state["columns"]):
        color = COLORS[place] if place < SHOWN and bins else "transparent"
        swatch = f'<span class="swatch" style="background:{color}"></span>'
        low, middle, high = (quantile(bins, share) for share in (0.05, 0.5, 0.95))
        sampled = zeros + sum(count for _, count in bins)
        zero = "" if not sampled else f"{100 * zeros / sampled:.3g}%"
        rows.append([f"{swatch}{text(label)}", low, middle, high, zero, f"{bad:,}", f"{looked:,}"])
    heads = ["column", "5% below", "median |·|", "95% below", "zero", "not finite", "rows looked at"]
    return _table("Result columns", heads, rows, {0})


def trouble(state: dict[str, Any]) -> str:
    """The latest rows that failed or are not finite."""
    if not state.get("trouble"):
        return ""
    rows = [
        [time.strftime("%H:%M:%S", time.localtime(when)), kind, "" if partition is None else str(partition), text(label), text(message)]
        for when, kind, partition, label, message in state["trouble"]
    ]
    return _table("Latest trouble", ["time", "what", "partition", "label", "message"], rows, {0, 1, 3, 4}, message=4)


def slowest(state: dict[str, Any]) -> str:
    """The partitions that took or take longest."""
    if not state.get("slowest"):
        return ""
    rows = [
        ["" if partition is None else str(partition), text(worker), f"{seconds:.3g} s", f"{done:,} of {size:,}", text(condition)]
        for partition, worker, seconds, done, size, condition in state["slowest"]
    ]
    return _table("Slowest partitions", ["partition", "worker", "time", "rows", ""], rows, {1, 4})


def choices(state: dict[str, Any]) -> list[tuple[str, str]]:
    """The computations, the latest first: number and description."""
    return [
        (str(number), f"{number} · {time.strftime('%H:%M:%S', time.localtime(began))} · {title} · {condition}")
        for number, title, began, condition, _, _ in state["computations"]
    ]


def speed(state: dict[str, Any]) -> float:
    """Rows per second: now, or on average where it is over."""
    rows = state["line"][0]
    return float(state["rate"] if state["rate"] is not None else rows / max(state["seconds"], 1e-9))


def engine(engines: dict[str, int]) -> str:
    """The engines that rows went through, the most used first; with their shares where there are several."""
    total = sum(engines.values())
    used = sorted(engines.items(), key=lambda item: -item[1])
    if len(used) == 1:
        return used[0][0]
    return " · ".join(f"{name} {100 * rows / total:.3g}%" for name, rows in used) or "–"


def number(value: float) -> str:
    """Three digits; more are noise."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def quantile(bins: list[tuple[int, int]], share: float) -> str:
    """The magnitude below which `share` of the sample that is not zero lies, as if each bin were evenly filled on its log scale."""
    total, so_far = sum(count for _, count in bins), 0
    for place, count in bins:
        if so_far + count >= share * total:
            inside = (share * total - so_far) / count
            return f"{math.pow(10, LOWEST + (place + inside) / PER_DECADE):.1e}"
        so_far += count
    return ""


def middle(place: int) -> float:
    """The magnitude in the middle of a bin."""
    return math.pow(10, LOWEST + (place + 0.5) / PER_DECADE)


def _left(state: dict[str, Any]) -> str:
    fraction = state["fraction"]
    if state["condition"] != "running" or not fraction or fraction >= 1:
        return "time"
    return f"gone, {duration(state['seconds'] * (1 - fraction) / fraction)} left"


def _paths(paths: int) -> str:
    return "engine" if not paths else f"engine · {paths:,} path group{'s' * (paths != 1)}"


def _looked(state: dict[str, Any], rows: int) -> str:
    looked = max((column[1] for column in state["columns"]), default=0)
    return "" if looked >= rows - state["missing"] - state["failed"] else f" of {looked:,} looked at"


def _failed(line: Line) -> str:
    return "rows failed" if not line.failed else f"rows failed · {line.failed} partition{'s' * (line.failed != 1)} failed"


def _tile(name: str, value: str, caption: str, alarming: Any = False) -> str:
    return f'<div class="tile{" bad" * bool(alarming)}"><b data-dg="{name}">{value}</b><span>{caption}</span></div>'


def _table(title: str, heads: list[str], rows: list[list[str]], left: set[int], message: int | None = None) -> str:
    """`rows` of HTML; the columns not in `left` are numbers."""

    def kind(place: int) -> str:
        return ' class="message"' if place == message else "" if place in left else ' class="n"'

    head = "".join(f"<th{kind(k) if k != message else ''}>{name}</th>" for k, name in enumerate(heads))
    body = "".join("<tr>" + "".join(f"<td{kind(k)}>{cell}</td>" for k, cell in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="dg"><h3>{title}</h3><div class="scroll"><table><tr>{head}</tr>{body}</table></div></div>'
