"""The gradient page on a cluster's own Dask dashboard. Travels to the scheduler by value; Bokeh is imported there."""

from __future__ import annotations

import weakref
from typing import Any

from . import _tables
from ._history import LOWEST, PER_DECADE, History

NAME = "gradients"
PERIOD = 500  # milliseconds between two looks
WORKERS = 8  # with a curve of their own


def dashboard_of(scheduler: Any) -> Any:
    """The Bokeh application of the scheduler's dashboard, None where it has none."""
    applications = getattr(getattr(scheduler, "http_application", None), "applications", ())
    return next((application for application in applications if hasattr(application, "app_paths")), None)


class Page:
    """The page while it is there, with its link in the dashboard's navigation."""

    def __init__(self, scheduler: Any, dashboard: Any, history: History) -> None:
        import dask
        from distributed.dashboard.core import BokehApplication
        from distributed.dashboard.scheduler import template_variables
        from tornado.ioloop import IOLoop

        self._scheduler, self._history = scheduler, history
        self._views: weakref.WeakSet[_View] = weakref.WeakSet()
        variables = template_variables(scheduler)
        # who may open a WebSocket to the dashboard may to this page
        origins = "distributed.scheduler.dashboard.bokeh-application.allow_websocket_origin"
        with dask.config.set({origins: sorted(dashboard.websocket_origins)}):
            self._app: Any = BokehApplication(
                {f"/{NAME}": self._document}, scheduler, prefix=dashboard.prefix, template_variables=variables
            )
        self._app.initialize(IOLoop.current())
        self._app.start()
        scheduler.http_application.add_application(self._app)
        self._pages = variables["pages"]  # the list that every page of the dashboard holds
        self._pages.insert(1, NAME)
        self.path = f"{dashboard.prefix.rstrip('/')}/{NAME}"

    def close(self) -> None:
        """Take it away. Whoever has it open is told."""
        self._pages.remove(NAME)
        for view in list(self._views):
            view.close()
        self._scheduler.loop.call_later(2 * PERIOD / 1000, self._leave)

    def _leave(self) -> None:
        """Serve it no more: first of all nobody new, for a browser whose connection ends tries to have another at once."""
        applications = self._scheduler.http_application.applications
        if self._app in applications:  # the scheduler has not stopped it itself
            applications.remove(self._app)
            for client in list(self._app._clients):
                client._socket.close(1000, "the page has been taken away")
            self._stop()

    def _stop(self) -> None:
        """Once all connections have ended: Bokeh complains of open ones."""
        if self._app._clients:
            self._scheduler.loop.call_later(0.2, self._stop)
        else:
            self._app.stop()

    def _document(self, scheduler: Any, extra: dict[str, Any], doc: Any) -> None:
        from distributed.dashboard.components.scheduler import BOKEH_THEME, env

        doc.title = "Dask: Gradients"
        view = _View(self._history)
        self._views.add(view)
        view.show()
        doc.add_root(view.root)
        doc.add_periodic_callback(view.show, PERIOD)
        doc.template = env.get_template("simple.html")
        doc.template_variables.update(extra)
        doc.theme = BOKEH_THEME


class _View:
    """What one browser shows."""

    def __init__(self, history: History) -> None:
        from bokeh.layouts import column, row
        from bokeh.models.widgets import Select

        self._history: History | None = history
        self._summary, self._columns, self._trouble, self._slowest = _div(), _div(), _div(), _div()
        kind: Any = Select
        self._choice = kind(title="Computation", options=[("", "the latest")], value="", max_width=420, visible=False)
        self._choice.on_change("value", lambda attr, old, new: self.show())
        self._rates, self._rates_data = _rates_figure()
        self._sizes, self._sizes_data = _sizes_figure()
        self._plots = row(self._rates, self._sizes, sizing_mode="stretch_width", styles={"flex-wrap": "wrap", "gap": "12px"}, visible=False)
        parts = [self._choice, self._summary, self._plots, self._columns, self._trouble, self._slowest]
        self.root = column(*parts, sizing_mode="stretch_width", styles={"padding": "8px 4px"})

    def close(self) -> None:
        """There is nothing more to show."""
        self._history = None

    def show(self) -> None:
        """What is known now."""
        if self._history is None:
            _put(self._summary, _tables.GONE)
            for model in (self._choice, self._plots, self._columns, self._trouble, self._slowest):
                model.visible = False
            return
        state = self._history.state(int(self._choice.value) if self._choice.value else None)
        options = [("", "the latest"), *_tables.choices(state)]
        if self._choice.options != options:
            self._choice.options = options
        self._choice.visible = len(state["computations"]) > 1
        _put(self._summary, _tables.summary(state))
        _put(self._columns, _tables.columns(state))
        _put(self._trouble, _tables.trouble(state))
        _put(self._slowest, _tables.slowest(state))
        self._plots.visible = state["shown"] is not None
        if state["shown"] is not None:
            _fill(self._rates_data, _rates(state))
            _fill(self._sizes_data, _sizes(state))
            self._sizes.visible = bool(self._sizes_data.data["x"])


def _div() -> Any:
    from bokeh.models import InlineStyleSheet
    from bokeh.models.widgets import Div

    return Div(text="", sizing_mode="stretch_width", stylesheets=[InlineStyleSheet(css=_tables.STYLE)], disable_math=True)


def _put(div: Any, text: str) -> None:
    if div.text != text:
        div.text = text


def _fill(source: Any, data: dict[str, list[Any]]) -> None:
    if source.data != data:
        source.data = data


def _figure(title: str, **options: Any) -> Any:
    from bokeh.plotting import figure

    made = figure(
        title=title,
        height=280,
        tools="",
        toolbar_location=None,
        sizing_mode="stretch_width",
        styles={"flex": "1 1 340px", "min-width": "min(340px, 100%)"},
        **options,
    )
    made.grid.grid_line_alpha = 0.4
    return made


def _rates_figure() -> tuple[Any, Any]:
    from bokeh.models import ColumnDataSource, NumeralTickFormatter

    made = _figure("Rows per second: all, and each worker", x_axis_label="seconds since it began")
    made.y_range.start = 0
    made.yaxis.formatter = NumeralTickFormatter(format="0.[0]a")
    source = ColumnDataSource({"x": [], "y": [], "color": [], "width": []})
    made.multi_line("x", "y", line_color="color", line_width="width", source=source)
    return made, source


def _sizes_figure() -> tuple[Any, Any]:
    from bokeh.models import ColumnDataSource

    made = _figure("Magnitude of each result column", x_axis_type="log", x_axis_label="|gradient|", y_axis_label="% of the sampled rows")
    made.y_range.start = 0
    source = ColumnDataSource({"x": [], "y": [], "color": []})
    made.patches("x", "y", fill_color="color", fill_alpha=0.15, line_color="color", line_width=2, source=source)
    return made, source


def _rates(state: dict[str, Any]) -> dict[str, list[Any]]:
    """Curves: the sum of all workers, then those that did most."""
    step, workers = state["rates"]["step"], state["rates"]["workers"]
    ranked = sorted(workers.values(), key=lambda rows: -sum(rows))[:WORKERS]
    curves = [[sum(rows) for rows in zip(*workers.values(), strict=True)], *(ranked if len(workers) > 1 else [])]
    seconds = [(k + 0.5) * step for k in range(len(curves[0]))]
    return {
        "x": [seconds] * len(curves),
        "y": curves,
        "color": ["#222222", *(_tables.COLORS[k % _tables.SHOWN] for k in range(len(curves) - 1))],
        "width": [2.5, *([1.3] * (len(curves) - 1))],
    }


def _sizes(state: dict[str, Any]) -> dict[str, list[Any]]:
    """Outlines of the histograms of the first columns."""
    found: dict[str, list[Any]] = {"x": [], "y": [], "color": []}
    for place, (_, _, _, zeros, bins) in enumerate(state["columns"][: _tables.SHOWN]):
        total = zeros + sum(count for _, count in bins)
        if not bins:
            continue
        counts = dict(bins)
        x, y = [_edge(bins[0][0])], [0.0]
        for k in range(bins[0][0], bins[-1][0] + 1):
            share = 100 * counts.get(k, 0) / total
            x += [_edge(k), _edge(k + 1)]
            y += [share, share]
        found["x"].append([*x, x[-1]])
        found["y"].append([*y, 0.0])
        found["color"].append(_tables.COLORS[place])
    return found


def _edge(place: int) -> float:
    return float(10 ** (LOWEST + place / PER_DECADE))
