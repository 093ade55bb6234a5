"""dg.monitor(): the gradient page in a real browser. What it shows is the truth, as text, and nothing of it stays behind."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from browser import browser
from programs import certificates, programs, wait_until, with_modules, without
from selenium.webdriver import Chrome

import daskgrad as dg

pytestmark = pytest.mark.cluster

HOSTILE = "<img src=x onerror=\"document.title='broken in'\">"
ROWS, PARTS = 4000, 8


def fragile(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if y < 0:
        raise ValueError(f"below zero: {HOSTILE}")
    return torch.sqrt(x) * y**2


def table() -> pd.DataFrame:
    """Five rows of note: one fails, one is missing, one is not a number, two have a gradient that is not finite."""
    frame = pd.DataFrame({"x": np.linspace(1.0, 2.0, ROWS), "y": np.linspace(1.0, 3.0, ROWS)})
    frame.index = pd.Index([f"row {k}" for k in range(ROWS)])
    frame["y"] = frame["y"].astype("Float64")
    frame.iloc[6, 1] = pd.NA
    frame.iloc[7, 1] = -1.0
    frame.iloc[8, 0] = np.nan
    frame.iloc[[1000, 2000], 0] = 0.0
    return frame


def wanted(part: Any) -> Any:
    return dg.derivatives(part, fragile, {"value": (), HOSTILE: "x", "dy": "y"}, on_error="null")


@dataclass
class Shown:
    """The page of a cluster whose computation is over."""

    chrome: Chrome
    client: Any
    monitor: Any

    def number(self, name: str) -> str:
        """What a tile of the page says."""
        found = self.inside(f"e => e.querySelector('[data-dg={name}]')?.textContent")
        return next((text for text in found if text), "")

    def text(self) -> str:
        return "\n".join(self.inside("e => e.textContent"))

    def inside(self, function: str) -> list[Any]:
        """`function` of each of the page's own parts; Bokeh keeps them in shadow roots."""
        script = f"""
            const found = [], walk = node => {{
                for (const e of node.querySelectorAll('*')) {{
                    if (e.classList.contains('dg')) found.push(({function})(e));
                    if (e.shadowRoot) walk(e.shadowRoot);
                }}
            }};
            walk(document);
            return found;
        """
        return list(self.chrome.execute_script(script))


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture(scope="module")
def shown(chrome: Chrome) -> Iterator[Shown]:
    with dg.local_client(n_workers=2, dashboard_port=0) as client, dg.monitor(client) as monitor:
        page = Shown(chrome, client, monitor)
        chrome.get(monitor.link)
        wait_until(lambda: "No derivatives yet" in page.text(), "an empty page says what to do")
        wanted(dd.from_pandas(table(), npartitions=PARTS)).compute()
        wait_until(lambda: page.number("condition") == "done", "the page says that it is done")
        yield page


def test_no_client_is_refused() -> None:
    with pytest.raises(dg.PlanError, match="no client"):
        dg.monitor()


def test_the_numbers_are_the_truth(shown: Shown) -> None:
    """Rows, partitions, missing, failed and not finite as counted from the data itself."""
    assert shown.number("rows") == f"{ROWS:,} of {ROWS:,}"
    assert shown.number("parts") == f"{PARTS} of {PARTS}"
    assert shown.number("failed") == "1"
    assert shown.number("missing") == "1"
    assert shown.number("bad") == "3"
    assert "vmap" in shown.number("engine")


def test_rows_in_trouble_are_named(shown: Shown) -> None:
    """Labels and messages of the rows that failed or are not finite."""
    text = shown.text()
    assert "'row 7'" in text
    assert "below zero" in text
    assert "'row 1000'" in text
    assert re.search(r"is inf", text)


def test_text_from_data_is_text(shown: Shown) -> None:
    """A column's name and an exception's message with markup in them are shown letter by letter."""
    assert shown.text().count(HOSTILE) >= 2
    assert not any(shown.inside("e => e.querySelector('img') !== null"))
    assert shown.chrome.title == "Dask: Gradients"


def test_the_navigation_of_each_page_leads_to_it(shown: Shown) -> None:
    shown.chrome.get(shown.client.dashboard_link)
    links = shown.chrome.execute_script("return [...document.querySelectorAll('a')].map(a => a.href)")
    assert shown.monitor.link in links
    shown.chrome.get(shown.monitor.link)
    wait_until(lambda: shown.number("rows") == f"{ROWS:,} of {ROWS:,}", "a browser that comes late sees what was")


def test_it_fits_a_phone(shown: Shown) -> None:
    """Nothing has to be scrolled sideways but a wide table in itself."""
    before = shown.chrome.get_window_size()
    shown.chrome.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    )
    try:
        wait_until(lambda: shown.number("rows"), "the page is there")
        wait_until(
            lambda: (
                shown.inside("e => e.getBoundingClientRect().right <= 391")
                and all(shown.inside("e => e.getBoundingClientRect().right <= 391"))
            ),
            "it fits",
        )
    finally:
        shown.chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        shown.chrome.set_window_size(before["width"], before["height"])


CONTRAST = """
    e => {
        const numbers = color => color.match(/[\\d.]+/g).map(Number);
        const light = color => {
            const [r, g, b] = numbers(color).map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const behind = node => {
            for (; node; node = node.parentElement || node.getRootNode().host) {
                const color = getComputedStyle(node).backgroundColor, parts = numbers(color);
                if (parts.length < 4 || parts[3] > 0) return color;
            }
            return 'rgb(255, 255, 255)';
        };
        const words = [...e.querySelectorAll('*')].filter(n => [...n.childNodes].some(c => c.nodeType === 3 && c.textContent.trim()));
        return words.map(n => {
            const [one, two] = [light(getComputedStyle(n).color), light(behind(n))].sort((a, b) => b - a);
            return [(one + 0.05) / (two + 0.05), n.textContent];
        });
    }
"""


def test_words_stand_out_from_what_is_behind_them(shown: Shown) -> None:
    """By the formula of WCAG 2 from the colours that the browser has resolved: 4.5 at least for each word."""
    found = [pair for part in shown.inside(CONTRAST) for pair in part]
    assert len(found) > 50
    assert min(found)[0] >= 4.5, min(found)


def test_it_is_legible_in_a_browser_forced_to_dark(shown: Shown, tmp_path: Path) -> None:
    """Chromium's own dark mode: words stand out from what is behind them."""
    with browser(tmp_path / "dark", "--force-dark-mode", "--enable-features=WebContentsForceDark") as dark:
        page = Shown(dark, shown.client, shown.monitor)
        dark.get(shown.monitor.link)
        wait_until(lambda: page.number("rows") == f"{ROWS:,} of {ROWS:,}", "the page is there")
        picture = _pixels(dark.get_screenshot_as_png())
    assert np.median(picture) < 100  # it is dark indeed
    assert (picture > 170).mean() > 0.002  # and there are letters on it


def _pixels(png: bytes) -> Any:
    import io

    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(png)).convert("L"), dtype=float)


def test_a_page_from_elsewhere_cannot_listen(shown: Shown) -> None:
    """The page's WebSocket answers its own origin, and no other."""
    from tornado.httpclient import HTTPClientError, HTTPRequest
    from tornado.websocket import websocket_connect

    address = shown.monitor.link.replace("http://", "ws://") + "/ws"

    async def status(origin: str) -> int:
        try:
            (await websocket_connect(HTTPRequest(address, headers={"Origin": origin}))).close()
        except HTTPClientError as error:
            return error.code
        return 101

    own = shown.monitor.link.removesuffix("/gradients")
    assert asyncio.run(status("http://elsewhere.example")) == 403
    assert asyncio.run(status(own)) != 403


def test_the_notebook_view_has_the_same_numbers(shown: Shown) -> None:
    found = shown.monitor._repr_html_()
    assert f"{ROWS:,} of {ROWS:,}" in found
    assert "<img" not in found


NOTEBOOK = """
import dask.dataframe as dd, pandas as pd, daskgrad as dg
client = dg.local_client(n_workers=1, dashboard_port=0)
monitor = dg.monitor(client)
monitor
---
def slow(x):
    import time
    time.sleep(0.01)
    return x**3

found = dg.grad_column(dd.from_pandas(pd.DataFrame({"x": [float(n) for n in range(200)]}), npartitions=2), slow, engine="loop").compute()
monitor.close()
client.close()
print(len(found))
"""


def test_a_live_view_in_a_notebook_ends_with_the_truth(tmp_path: Path) -> None:
    """In a real kernel: the display of an earlier cell is rewritten while a later one computes, and last when the monitor is closed."""
    import nbformat
    from nbclient import NotebookClient

    seen: list[str] = []

    class Watching(NotebookClient):
        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            if msg["msg_type"] == "update_display_data":
                seen.append(msg["content"]["data"]["text/html"])
            return super().process_message(msg, cell, cell_index)

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in NOTEBOOK.split("---")])
    house = str(Path(dg.__file__).parents[1])
    Watching(notebook, timeout=600, kernel_name="python3").execute(env={**os.environ, "PYTHONPATH": house, "IPYTHONDIR": str(tmp_path)})
    assert notebook.cells[1].outputs[0].text == "200\n"
    rows = [int(found) for found in re.findall(r'data-dg="rows">(\d+) of 200<', "".join(seen))]
    assert len(set(rows) - {0, 200}) >= 2
    assert rows == sorted(rows)
    (shown,) = notebook.cells[0].outputs
    assert 'data-dg="rows">200 of 200<' in shown.data["text/html"]
    assert 'data-dg="condition">done<' in shown.data["text/html"]


def test_computations_are_told_apart(shown: Shown) -> None:
    """The latest is shown, and any other by choice."""

    def parabola(x: torch.Tensor) -> torch.Tensor:
        return x**2

    dg.grad_column(dd.from_pandas(pd.DataFrame({"x": np.arange(40.0)}), npartitions=2), parabola).compute()
    wait_until(lambda: shown.number("rows") == "40 of 40", "the latest")
    choose = """
        const walk = node => [...node.querySelectorAll('*')].flatMap(e => [e, ...(e.shadowRoot ? walk(e.shadowRoot) : [])]);
        const choice = walk(document).find(e => e.tagName === 'SELECT');
        choice.value = [...choice.options].find(o => o.text.includes(arguments[0])).value;
        choice.dispatchEvent(new Event('change'));
    """
    shown.chrome.execute_script(choose, "fragile")
    wait_until(lambda: shown.number("rows") == f"{ROWS:,} of {ROWS:,}", "the earlier one")
    assert "parabola" not in shown.text()
    shown.chrome.execute_script(choose, "parabola")
    wait_until(lambda: shown.number("rows") == "40 of 40", "the later one")


def test_behind_a_prefix_and_over_https(tmp_path: Path) -> None:
    """The link is the page's, though the client knows neither; the navigation leads there."""
    import ssl
    from urllib.request import urlopen

    from distributed import Client

    files = certificates(tmp_path / "certificates", "server")
    tls = "distributed.scheduler.dashboard.tls"
    settings = {f"{tls}.cert": files["server"], f"{tls}.key": files["server-key"]}
    trusted = ssl.create_default_context(cafile=files["ca"])

    def read(link: str) -> str:
        with urlopen(link, timeout=60, context=trusted) as answer:
            return str(answer.read().decode())

    with programs(tmp_path, config=settings, dashboard="/user/joe/dask") as made, Client(made.address, timeout="180s") as client:
        with dg.monitor(client) as monitor:
            assert re.fullmatch(r"https://127\.0\.0\.1:\d+/user/joe/dask/gradients", monitor.link)
            assert 'href="gradients"' in read(monitor.link)
            assert 'href="gradients"' in read(monitor.link.replace("gradients", "status"))
        assert 'href="gradients"' not in read(monitor.link.replace("gradients", "status"))


def test_on_a_cluster_of_separate_programs_and_gone_without_a_trace(tmp_path: Path, chrome: Chrome) -> None:
    """During a run, on a scheduler that has no daskgrad; afterwards neither page, link, plugin nor handler is left."""
    from distributed import Client

    def trace(dask_scheduler: Any) -> tuple[bool, list[str], list[str], int, int]:
        from distributed.dashboard.scheduler import template_variables

        return (
            "daskgrad_watch" in dask_scheduler.handlers,
            list(dask_scheduler.plugins),
            list(dask_scheduler.worker_plugins),
            len(dask_scheduler.http_application.applications),
            len(template_variables(dask_scheduler)["pages"]),
        )

    def slow(x: torch.Tensor) -> torch.Tensor:
        import time

        time.sleep(0.02)
        return x**2

    bare = without(tmp_path / "nothing", "daskgrad", "torch")
    with programs(tmp_path, {"one": with_modules()}, scheduler=bare, dashboard=True) as made, Client(made.address, timeout="90s") as client:
        client.wait_for_workers(1, timeout=180)
        before = client.run_on_scheduler(trace)
        with dg.monitor(client) as monitor:
            page = Shown(chrome, client, monitor)
            chrome.get(monitor.link)
            frame = dd.from_pandas(pd.DataFrame({"x": np.arange(300.0)}), npartitions=1)
            future = client.compute(dg.grad_column(frame, slow, engine="loop"))
            seen: set[str] = set()
            wait_until(lambda: seen.add(page.number("rows")) or future.done(), "it is computed")
            assert len(seen - {"", "300 of 300"}) >= 2  # it moved
            wait_until(lambda: page.number("rows") == "300 of 300", "the last number")
        wait_until(lambda: "taken away" in page.text(), "who has it open is told")
        wait_until(lambda: client.run_on_scheduler(trace) == before, "nothing is left, though a browser still shows it")
        chrome.get("about:blank")
    assert not [thread for thread in threading.enumerate() if thread.name == "daskgrad-monitor"]


def test_a_scheduler_without_a_dashboard_is_refused() -> None:
    with dg.local_client(n_workers=1, dashboard_port=None) as client, pytest.raises(dg.PlanError, match="dashboard"):
        dg.monitor(client)
