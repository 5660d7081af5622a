"""Every Python example of the documentation runs, and its assertions hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import page as pages
from tests.docs.page import BLOCK, REPOSITORY

PAGES = sorted(
    str(page.relative_to(REPOSITORY))
    for page in (REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md"))
    if BLOCK.search(page.read_text()) and "design" not in page.parts
)


@pytest.mark.parametrize("page", PAGES)
def test_examples_of_a_page_run_in_order(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if not pages.uses_spark(page):
        pages.run(page)
        return
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.page", page], capture_output=True, text=True, timeout=300, check=False
    )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("\tat ")]
    assert done.returncode == 0, "\n".join(lines[-40:])


def test_every_kind_of_state_has_a_page() -> None:
    kinds = {"value", "list", "map", "reducing", "aggregating", "timers", "ttl"}
    assert {Path(page).stem for page in PAGES if "states" in page} == kinds
