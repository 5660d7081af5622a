"""Every Python example of the documentation runs, and its assertions hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = sorted(
    str(page.relative_to(REPOSITORY))
    for page in (REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md"))
    if BLOCK.search(page.read_text()) and "design" not in page.parts
)


@pytest.mark.parametrize("page", PAGES)
def test_examples_of_a_page_run_in_order(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The blocks of a page are one program, in an empty directory, with a session called spark if they use one."""
    text = (REPOSITORY / page).read_text()
    monkeypatch.chdir(tmp_path)
    if page == "README.md":  # which reads what the reader has
        Path("events").mkdir()
        Path("events/first.json").write_text('{"user": "ann", "page": "home"}\n')
    # As in a program of the user's own, so that its classes are sent to the workers by value.
    names: dict[str, Any] = {"__name__": "__main__"}
    if re.search(r"\bspark\b\.", "".join(BLOCK.findall(text))):
        names["spark"] = request.getfixturevalue("spark")
    for found in BLOCK.finditer(text):
        # Blank lines in front, so that a traceback has the page's line numbers.
        lines = text.count("\n", 0, found.start(1))
        exec(compile("\n" * lines + found[1], page, "exec"), names)


def test_every_kind_of_state_has_a_page() -> None:
    kinds = {"value", "list", "map", "reducing", "aggregating", "timers", "ttl"}
    assert {Path(page).stem for page in PAGES if "states" in page} == kinds
