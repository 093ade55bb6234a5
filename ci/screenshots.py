"""The README's pictures of the gradient page, taken in a real browser while an option book is differentiated.

.venv/bin/python ci/screenshots.py [ROWS]    writes ci/docs/gradients.png and ci/docs/gradients-phone.png
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import torch

import daskgrad as dg

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
PARTS = 40


def price(spot: Any, strike: Any, vol: Any, rate: Any, expiry: Any) -> Any:
    """Black and Scholes' call; a book has typing errors, and these should be seen."""
    if spot <= 0:
        raise ValueError(f"spot {spot:.2f}: a price is above zero")
    spread = vol * torch.sqrt(expiry)
    d1 = (torch.log(spot / strike) + (rate + vol**2 / 2) * expiry) / spread
    return spot * torch.special.ndtr(d1) - strike * torch.exp(-rate * expiry) * torch.special.ndtr(d1 - spread)


def book(path: Path, rows: int) -> Any:
    """Parquet files of positions, of which a few are wrong."""
    rng = np.random.default_rng(0)
    for part in range(PARTS):
        n = rows // PARTS
        frame = pd.DataFrame(
            {
                "spot": rng.uniform(50, 150, n),
                "strike": rng.choice([80.0, 90.0, 100.0, 110.0, 120.0], n),
                "vol": rng.uniform(0.1, 0.4, n),
                "rate": 0.03,
                "expiry": rng.uniform(0.1, 2.0, n),
            }
        )
        if part in (0, 3):
            frame.loc[[17, 40], "spot"] = [-100.0, -1.0]
            frame.loc[99, "expiry"] = 0.0
            frame["strike"] = frame["strike"].astype("Float64")
            frame.loc[123, "strike"] = pd.NA
        frame.to_parquet(path / f"{part:02}.parquet", index=False)
    return dd.read_parquet(str(path))


def main(rows: int) -> None:
    from browser import browser

    wanted = {"value": (), "delta": "spot", "vega": "vol", "gamma": ("spot", "spot"), "vanna": ("spot", "vol")}
    with tempfile.TemporaryDirectory() as folder, dg.local_client(dashboard_port=0) as client, dg.monitor(client) as page:
        positions = book(Path(folder), rows)
        with browser(Path(folder) / "profile") as chrome:
            chrome.set_window_size(1200, 1240)
            chrome.get(page.link)
            future = client.compute(dg.derivatives(positions, price, wanted, on_error="null").mean())
            time.sleep(1)
            state: dict[str, Any] = {}
            while not (state.get("fraction") or 0) > 0.6 and not future.done():
                time.sleep(0.2)
                state = page._hold.ask("state", number=None) if page._hold else {}
            time.sleep(1)
            chrome.save_screenshot(str(HERE / "docs" / "gradients.png"))
            future.result()
            size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
            chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            time.sleep(2)
            chrome.save_screenshot(str(HERE / "docs" / "gradients-phone.png"))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12_000_000)
