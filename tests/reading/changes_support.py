"""What the tests of :mod:`tests.reading.test_changes` and others share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Rows = list[dict[str, Any]]


def replayed(before: Iterable[tuple[Any, ...]], found: Rows, state: str) -> list[tuple[Any, ...]]:
    """The rows of a state, as the model has them, after some changes."""
    keys: dict[Any, dict[Any, Any]] = {}
    for a, b, *entry in before:
        value = entry.pop()
        keys.setdefault((a, b), {})[entry[0] if entry else None] = value
    for row in found:
        entries = keys.setdefault((row["key_a"], row["key_b"]), {})
        place = {"value": None, "map": row.get("mapkey_field"), "list": len(entries)}[state]
        match row["operation"]:
            case "put":
                entries[place] = row["value_field"]
            case "delete":
                entries.pop(place, None)
            case "clear":
                entries.clear()
    made = [
        (*key, *([] if state == "value" else [place]), value)
        for key, own in keys.items()
        for place, value in own.items()
    ]
    return sorted(made, key=repr)
