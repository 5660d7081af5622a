"""Object names made from names that users give."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote

import xxhash

PLAIN_PART: Final = r"(?!\.{1,2}(?:/|\Z))[^/\\\x00-\x1f\x7f-\x9f]+"
"""A part of such a name, as a regular expression."""
_PLAIN: Final = re.compile(rf"{PLAIN_PART}(?:/{PLAIN_PART})*")

_MOST_CHARACTERS: Final = 200
"""File systems allow 255, but some writers of files append to a name."""


def name_part(text: str) -> str:
    """Encode a text as one part of an object's name; different texts give different parts.

    ASCII letters and digits, ``.``, ``_`` and ``-`` stay, and every other byte of UTF-8 becomes ``%`` and two
    hexadecimal digits, as in a URL. So do dots that a file system would read as a folder. A part that would be too long
    ends with ``%~`` and the text's xxh3-128 instead.
    """
    quoted = quote(text, safe="").replace("~", "%7E").replace("..", "%2E%2E")
    if quoted == ".":
        return "%2E"
    if len(quoted) <= _MOST_CHARACTERS:
        return quoted
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    return f"{quoted[: _MOST_CHARACTERS - len(digest) - 2]}%~{digest}"


def is_plain(name: str) -> bool:
    """Whether a name stays below its root: ``/`` between parts that are not empty, ``.`` or ``..``, and no control
    characters.
    """
    return bool(_PLAIN.fullmatch(name))


def distinct_parts(texts: Iterable[str]) -> dict[str, str]:
    """Encode texts with :func:`name_part`; parts that a file system may confuse, such as `A` and `a`, are numbered."""
    parts: dict[str, str] = {}
    taken: Counter[str] = Counter()
    for text in sorted(texts):
        part = name_part(text)
        before = taken[part.lower()]
        parts[text] = f"{part}%~{before}" if before else part
        taken[part.lower()] += 1
    return parts
