"""Photographs the demo's checkpoint page for docs/checkpoint-page.md.

Run ``./dev demo``, which makes the page, then ``./dev python docs/page_pictures.py``. Each picture notes what the page
was made with, so that a test tells when it is to be made anew.
"""

from __future__ import annotations

import base64
import hashlib
import io
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from PIL import Image, PngImagePlugin
from selenium import webdriver

FOLDER: Final = Path(__file__).with_name("pictures")
DEMO: Final = Path(__file__).parents[1] / "build" / "demo" / "checkpoints.html"
NOTE: Final = "statelog page"
"""The name of the note in a picture."""

_PAGES: Final = Path(__file__).parents[1] / "src" / "statelog" / "tools" / "pages"
_WIDTH: Final = 1180


class Photograph(NamedTuple):
    """A part of the page, from the top of one element to the top of another."""

    name: str
    scheme: str
    first: str
    """CSS selector."""
    until: str


PHOTOGRAPHS: Final = (
    Photograph("checkpoint_page", "light", "header", "h3:nth-of-type(3)"),
    Photograph("checkpoint_page_dark", "dark", "h3:nth-of-type(3)", ".scroll:has(th:nth-child(11)) tr:nth-child(8)"),
)


def look() -> str:
    """A digest of the files that decide how the page looks."""
    files = sorted([*(_PAGES / "templates").iterdir(), _PAGES / "charts.py", _PAGES / "operator_charts.py"])
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def _taken(browser: Any, photograph: Photograph) -> bytes:
    features = [{"name": "prefers-color-scheme", "value": photograph.scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    top = "return document.querySelector(arguments[0]).getBoundingClientRect().top + window.scrollY"
    first, until = (browser.execute_script(top, selector) for selector in (photograph.first, photograph.until))
    first = max(first - 16, 0)
    clip = {"x": 0, "y": first, "width": _WIDTH, "height": until - 12 - first, "scale": 1}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    return base64.b64decode(shot["data"])


def main(page: Path) -> None:
    """Take all pictures of a page."""
    note = PngImagePlugin.PngInfo()
    note.add_text(NOTE, look())
    with _browser() as browser:
        size = {"width": _WIDTH, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(page.resolve().as_uri())
        for photograph in PHOTOGRAPHS:
            image = Image.open(io.BytesIO(_taken(browser, photograph))).convert("RGB")
            image = image.quantize(method=Image.Quantize.MAXCOVERAGE)  # also of colours that few pixels have
            image.save(FOLDER / f"{photograph.name}.png", optimize=True, pnginfo=note)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DEMO)
