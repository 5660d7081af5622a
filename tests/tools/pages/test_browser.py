"""The page in a browser: nothing is blocked or runs, nothing is wider than the window, in both colour schemes."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import statelog
from statelog.clock import SystemClock
from statelog.coordinator.active_operator import Restore, SubtaskRestore
from statelog.tools.pages.live import LiveOperator, Watched
from statelog.tools.pages.savepoint_list import SavepointFolders
from statelog.tools.pages.server import App, PageServer
from tests.tools.pages.queries import materialized

pytest.importorskip("jinja2", reason="jinja2 is not installed")
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
ui = pytest.importorskip("selenium.webdriver.support.ui", reason="selenium is not installed")

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


def resize(browser: Any, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def shown_rows(browser: Any, count: int) -> None:
    """Wait until the table has so many rows."""
    wait = ui.WebDriverWait(browser, 60)
    wait.until(lambda _: len(browser.find_elements("css selector", "tbody tr")) == count, f"{count} rows")


def test_the_report_is_whole_in_both_schemes_and_widths(browser: Any, report: str) -> None:
    colours = set()
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        for width in (1280, 360):
            resize(browser, width)
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


def test_a_restore_and_the_history_are_whole_in_both_widths(browser: Any, tmp_path: Path) -> None:
    pytest.importorskip("waitress", reason="waitress is not installed")
    made = materialized(tmp_path / "query", retained_checkpoints=200)
    made.run_batches(48, random.Random(3))
    restore = Restore(60, tuple(SubtaskRestore(number, 10 + number, 40) for number in range(3)), 12.0, 9.0)
    live = LiveOperator("op", 3, has_begun=True, restore=restore)
    app = App(
        lambda: Watched([made.location], [live]),
        SavepointFolders([]),
        token=None,
        redacts=False,
        clock=SystemClock(),
    )
    with PageServer(app, "127.0.0.1", 0, None) as page:
        for width in (1280, 360):
            resize(browser, width)
            browser.get(page.url)
            bar = (
                "const bar = document.querySelector('progress'); return [bar.value, bar.getBoundingClientRect().width]"
            )
            value, shown = browser.execute_script(bar)  # in one call: the page loads itself again
            assert value == 33
            assert shown > 200
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
            browser.get(f"{page.url}checkpoints?operator=op")
            shown_rows(browser, 60)
            field = browser.find_element("name", "from")
            field.clear()
            field.send_keys("20")
            browser.find_element("css selector", "button").click()
            shown_rows(browser, 21)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
            browser.find_element("link text", "Newest").click()
            shown_rows(browser, 60)


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
        shown_rows(browser, 1)
        assert [one.text for one in browser.find_elements("css selector", "td")] == ["5", EVIL, "4711"]
        assert browser.title != "harmed"
