"""Servers for tests: a fake service behind a real port, and a browser to look at it."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from ddtree.server.app import create_app
from ddtree.server.backend import Backend
from ddtree.server.limits import Limits
from ddtree.server.run import listen

WAIT_S = 30.0


@contextmanager
def live(backend: Backend, **settings: Any) -> Iterator[str]:
    """A server on a free port of this machine, ready; yields its address."""
    settings.setdefault("limits", Limits())
    app = create_app(lambda: backend, **settings)
    bound = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    try:
        eventually(lambda: answers(url))
        yield url
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        bound.close()
    assert not thread.is_alive(), "the server did not end"


def answers(url: str) -> bool:
    """Whether a server is ready."""
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def eventually(holds: Any, seconds: float = WAIT_S) -> None:
    """Wait until something holds; an assertion error when it does not come true."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.02)


@contextmanager
def browser(width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Any]:
    """Headless Chromium with its console kept. Skips where there is none."""
    binary = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no Chromium here: `apt install chromium chromium-driver` brings it")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--hide-scrollbars",
    ):
        options.add_argument(flag)
    options.add_argument(f"--window-size={width},{height}")
    if dark:
        options.add_argument("--force-dark-mode")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options, Service(driver))
    try:
        # A window has a least width; a phone's has to be asked for in another way.
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        yield chrome
    finally:
        chrome.quit()


def console(chrome: Any) -> list[str]:
    """What the page's console holds beyond idle talk."""
    return [entry["message"] for entry in chrome.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
