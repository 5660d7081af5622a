"""Every Python example of the documentation runs, and its assertions hold."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.docs import page as pages
from tests.docs.page import BLOCK, REPOSITORY

PAGES = sorted(
    str(page.relative_to(REPOSITORY))
    for page in (REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md"))
    if BLOCK.search(page.read_text()) and "design" not in page.parts
)


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """The process of the pages with Spark: they share a JVM, which takes longer to start than most pages to run."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the pages with Spark."""
    return tmp_path_factory.mktemp("pages")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if pages.uses_spark(page) and not pages.has_own_settings(page)]
)
def test_examples_of_a_page_with_spark_run_in_order(page: str, process: ProcessPoolExecutor, folder: Path) -> None:
    if failure := process.submit(pages.run_with_spark, page, str(folder)).result():
        pytest.fail(failure, pytrace=False)


@pytest.mark.parametrize("page", [page for page in PAGES if pages.has_own_settings(page)])
def test_examples_of_a_page_with_settings_run_in_order(page: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.page", page],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("\tat ")]
    assert done.returncode == 0, "\n".join(lines[-40:])


@pytest.mark.parametrize("page", [page for page in PAGES if not pages.uses_spark(page)])
def test_examples_of_a_page_run_in_order(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pages.run(page)


def test_every_kind_of_state_has_a_page() -> None:
    kinds = {"value", "list", "map", "reducing", "aggregating", "timers", "ttl"}
    assert {Path(page).stem for page in PAGES if "states" in page} == kinds
