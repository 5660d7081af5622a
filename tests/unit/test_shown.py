"""Keys and values in messages, shown and hidden."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import copy_context

import pytest

from statelog.shown import redact_messages, shown_key, shown_value

DOTS = "\N{BULLET}" * 3


@pytest.fixture(autouse=True)
def show_again() -> Iterator[None]:
    yield
    redact_messages(redacts=False)


def test_keys_and_values_are_shown_unless_they_are_hidden() -> None:
    assert (shown_key(("ann", 1)), shown_value("ann")) == ("('ann', 1)", "str 'ann'")
    redact_messages(redacts=True)
    assert (shown_key(("ann", 1)), shown_value("ann")) == (DOTS, f"str {DOTS}")
    redact_messages(redacts=False)
    assert shown_key(1) == "1"


def test_a_value_is_one_line_of_80_characters() -> None:
    class Lines:
        def __repr__(self) -> str:
            return "a\n  b"

    assert shown_value(Lines()) == "Lines a b"
    assert shown_value("x" * 78) == f"str '{'x' * 78}'"
    assert shown_value("x" * 79) == f"str '{'x' * 76}..."


def test_other_contexts_keep_showing_them() -> None:
    copy_context().run(redact_messages, redacts=True)
    assert shown_key(1) == "1"
