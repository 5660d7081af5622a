"""The page in a browser: nothing is blocked or runs, nothing is wider than the window, in both colour schemes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import statelog
from tests.pages.queries import materialized

pytest.importorskip("jinja2", reason="jinja2 is not installed")
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

EVIL = "<script>document.title = 'harmed'</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            pytest.skip(f"no browser ({program} is missing); ./dev browser installs one")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("browser")
    made = materialized(directory / "query")
    statelog.pin(made.location, at=11, lasts_s=None, owner=EVIL)
    statelog.report(made.location, directory / "page.html")
    return (directory / "page.html").as_uri()


def background(browser: Any) -> str:
    return str(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))


def test_the_report_is_whole_in_both_schemes_and_widths(browser: Any, report: str) -> None:
    colours = set()
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        for width in (1280, 360):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.get(report)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
            shown = (
                "return [...document.querySelectorAll('svg')].filter(one => one.getBoundingClientRect().width).length"
            )
            assert browser.execute_script(shown) == 1 + 6 + 3, "one timeline, and the charts"
            colours.add(background(browser))
    assert len(colours) == 2
    assert browser.title.startswith("Checkpoints")
    assert EVIL in browser.find_element("css selector", "body").text
    assert [one for one in browser.get_log("browser") if "favicon" not in one["message"]] == []


def test_the_state_browser_answers(browser: Any, tmp_path: Path) -> None:
    pytest.importorskip("waitress", reason="waitress is not installed")
    made = materialized(tmp_path / "query")
    made.run(12, [((5, EVIL), ("set", 4711))])
    with statelog.ui(made.location) as page:
        browser.get(page.url)
        browser.find_element("link text", "Look up state").click()
        browser.find_element("name", "key").send_keys(f'[5, "{EVIL}"]')
        state = browser.find_element("name", "state")
        state.find_element("xpath", ".//option[.='value']").click()
        browser.find_element("css selector", "button").click()
        assert [one.text for one in browser.find_elements("css selector", "td")] == ["5", EVIL, "4711"]
        assert browser.title != "harmed"
