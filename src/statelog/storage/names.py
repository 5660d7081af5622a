"""Names of objects from names that users give."""

from __future__ import annotations

import re

__all__ = ["name_part"]


def name_part(text: str) -> str:
    """A text as one part of an object's name, with what no file name can hold replaced by its code."""
    return re.sub(r"[^A-Za-z0-9._-]", lambda found: f"%{ord(found[0]):02X}", text).replace("..", "%2E%2E")
