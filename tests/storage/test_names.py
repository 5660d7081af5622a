"""Names of folders: no two uids share one."""

from __future__ import annotations

from urllib.parse import unquote

import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from statelog.storage.names import distinct_parts, name_part

NARROW = "a\N{NON-BREAKING HYPHEN}b"
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200)


@given(texts, texts)
@example(NARROW, "a 11b")
@example("..", "%2E%2E")
@example(".", "%2E")
@example("~", "%~")
@example("x" * 200, "x" * 199 + "y")
@example("\N{SNOWMAN}" * 199 + "a", "\N{SNOWMAN}" * 199 + "b")
def test_two_names_have_two_folders(one: str, other: str) -> None:
    assert (name_part(one) == name_part(other)) == (one == other)


@given(texts)
@example(".")
@example("..")
@example("...")
@example("/")
@example("\0")
@example("\N{SNOWMAN}" * 200)
def test_a_name_is_one_part_that_a_file_system_takes(text: str) -> None:
    part = name_part(text)
    assert 0 < len(part) <= 200
    assert part.isascii()
    assert "/" not in part
    assert ".." not in part
    assert part != "."
    if "%~" not in part:
        assert unquote(part) == text


@given(st.from_regex(r"[A-Za-z0-9_-]{1,200}", fullmatch=True))
def test_plain_names_stay(text: str) -> None:
    assert name_part(text) == text


@given(st.sets(texts, max_size=8))
@example({"A", "a", NARROW, "a 11b", "A 11B"})
def test_folders_side_by_side_differ_in_more_than_case(names: set[str]) -> None:
    parts = distinct_parts(names)
    assert parts.keys() == names
    assert len({part.lower() for part in parts.values()}) == len(names)


def test_names_stay_what_they_were() -> None:
    """They are in locations and savepoints that exist."""
    long = "x" * 200
    assert name_part(long) == long
    assert name_part(f"{long}x") == f"{'x' * 166}%~{xxhash.xxh3_128_hexdigest(f'{long}x'.encode())}"
    assert [name_part(text) for text in (".", "..", "a..b", "a/b", "~", "a.b")] == [
        "%2E",
        "%2E%2E",
        "a%2E%2Eb",
        "a%2Fb",
        "%7E",
        "a.b",
    ]
    assert distinct_parts(["a", "A", "b", "\N{LATIN SMALL LETTER A WITH DIAERESIS}", "aa", "AA", "Aa"]) == {
        "A": "A",
        "AA": "AA",
        "Aa": "Aa%~1",
        "a": "a%~1",
        "aa": "aa%~2",
        "b": "b",
        "\N{LATIN SMALL LETTER A WITH DIAERESIS}": "%C3%A4",
    }
