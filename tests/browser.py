"""Chromium, as the fixture `chromium` starts it: what a screen shows, and what a page asks for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SWITCHES = (
    "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
    "disable-component-update disable-sync disable-dev-shm-usage"
)


def started(profile: Path) -> Iterator[Any]:
    """A browser that keeps its state in `profile`."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install selenium")
    browser, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if not browser or not driver:
        pytest.skip("needs Chromium and its driver: apt-get install chromium chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = browser
    for switch in [*SWITCHES.split(), f"user-data-dir={profile}"]:
        options.add_argument(f"--{switch}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    running = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    yield running
    running.quit()


def screen(chromium: Any, width: int, scheme: str) -> None:
    """Show pages as a screen of this width, light or dark, does."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def opened(chromium: Any, url: str) -> list[str]:
    """Open a page -> the addresses that it asked for."""
    chromium.get_log("performance")
    chromium.get(url)
    events = [json.loads(entry["message"])["message"] for entry in chromium.get_log("performance")]
    return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
