"""What users import, call and subclass changes only on purpose."""

from __future__ import annotations

from tests.layout import public_names


def test_public_names_and_signatures_are_those_written_down() -> None:
    hint = "if the change is meant: ./dev python -m tests.layout.public_names, and a line in CHANGELOG.md"
    assert public_names.text() == public_names.FILE.read_text(), hint
