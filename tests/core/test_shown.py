"""Keys and values in messages, shown and hidden."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextvars import copy_context

import pytest

from statelog.errors import CorruptionError
from statelog.shown import plain_json, plain_text, redact_messages, shown_key, shown_value

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


# ---- Texts without control characters ----

CONTROLS = {
    "\x1b[2J": r"\x1b[2J", "\x9b2J": r"\x9b2J", "\x7f": r"\x7f", "\x00": r"\x00", "\x85": r"\x85",
    "\x1b]0;x\x07": r"\x1b]0;x\x07",
    "\u202egnp": r"\u202egnp", "\u2066": r"\u2066", "\u200f": r"\u200f", "\u061c": r"\u061c", "\u2028": r"\u2028",
    "\ufeff": r"\ufeff", "\ud800": r"\ud800", "\n": r"\n", "\r": r"\r", "\t": r"\t",
}  # fmt: skip


@pytest.mark.parametrize(("text", "shown"), CONTROLS.items())
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert plain_text(text) == shown
    assert plain_text(f"ä {text}x", "\n\t") == (f"ä {text}x" if text in "\n\t" else f"ä {shown}x")


@pytest.mark.parametrize("text", ["", "a b", "äöü €", "日本語", "x\u00a0y", "👍🏽", "é́", "a\\nb"])
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert plain_text(text) == text


@pytest.mark.parametrize("text", [*(text for text in CONTROLS if text != "\ud800"), "a\nb", "äöü"])
def test_json_without_control_characters_is_the_same_json(text: str) -> None:
    shown = plain_json(json.dumps({"a": [text], text: 1}, ensure_ascii=False, indent=1))
    assert json.loads(shown) == {"a": [text], text: 1}
    assert all(plain_text(line) == line for line in shown.split("\n"))


def test_keys_values_and_errors_have_none() -> None:
    class Lines:
        def __repr__(self) -> str:
            return "a\x1b[2J"

    assert shown_key(Lines()) == r"a\x1b[2J"
    assert shown_value(Lines()) == r"Lines a\x1b[2J"
    error = CorruptionError("operator '\x1b[2J\u202e'\nand more", hint="Look at \x9b.")
    assert str(error) == "operator '\\x1b[2J\\u202e'\nand more Hint: Look at \\x9b. [checksum]"
    assert (error.message, error.hint) == ("operator '\\x1b[2J\\u202e'\nand more", "Look at \\x9b.")
