"""Headless Chromium for tests of pages; a module that imports ``chromium_fixture`` has ``chromium``."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

BROWSER = Path("/usr/bin/chromium")
DRIVER = Path("/usr/bin/chromedriver")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


@pytest.fixture(name="chromium", scope="module")
def chromium_fixture() -> Iterator[webdriver.Chrome]:
    """A browser that logs its console and network; skipped where it is not installed, except under CI."""
    missing = [str(path) for path in (BROWSER, DRIVER) if not path.exists()]
    if missing:
        message = f"{' and '.join(missing)} not found: apt-get install chromium chromium-driver"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    with tempfile.TemporaryDirectory(prefix="keyshift-chromium-", ignore_cleanup_errors=True) as profile:
        driver = webdriver.Chrome(options=_options(profile), service=Service(str(DRIVER)))
        try:
            yield driver
        finally:
            driver.quit()


def _options(profile: str) -> Options:
    options = Options()
    options.binary_location = str(BROWSER)
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return options


def resize(driver: webdriver.Chrome, width: int, height: int = 900) -> None:
    """Give the page's viewport an exact size; a window cannot be made narrower than about 500 pixels."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def prefer(driver: webdriver.Chrome, scheme: str, media: str = "") -> None:
    """Emulate a reader who prefers the scheme ``light`` or ``dark``, on screen or on paper (``print``)."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})


def console_errors(driver: webdriver.Chrome) -> list[str]:
    """The console's messages of level SEVERE since the last call."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def requested_urls(driver: webdriver.Chrome) -> list[str]:
    """Every address that pages asked for since the last call."""
    messages = (json.loads(entry["message"])["message"] for entry in driver.get_log("performance"))
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
