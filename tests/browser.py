"""Debian's Chromium without a screen, driven by Selenium: pages as a person would see them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

ALONE = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def browser(profile: Path, *further: str) -> Iterator[Chrome]:
    """A browser with an empty profile that asks nobody but the pages it is sent to."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert chromium and driver, "no browser: install Debian's packages chromium and chromium-driver (as root, ci/debian does)"
    options = ChromeOptions()
    options.binary_location = chromium
    for argument in (*ALONE, f"--user-data-dir={profile}", "--window-size=1200,1150", *further):
        options.add_argument(argument)
    made = Chrome(options=options, service=Service(driver))
    try:
        yield made
    finally:
        made.quit()
