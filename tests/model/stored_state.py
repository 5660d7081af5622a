"""The state of ``keyed_commands`` read from the files alone."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import statelog
from tests.model.keyed_commands import LISTS, MAPS, SUMS, VALUES
from tests.model.keyed_model import Key


def stored_state(location: str, at: int | None = None) -> dict[Key, dict[str, Any]]:
    """The state of each key in a checkpoint, by default the newest; raises what :func:`statelog.open_state` does."""
    found: dict[Key, dict[str, Any]] = defaultdict(nothing_stored)
    with statelog.open_state(location, at=at) as reader:
        for name in (*VALUES, *SUMS, *LISTS, *MAPS, "timers"):
            for row in reader.read(name).read_all().to_pylist():
                held = found[row["key_a"], row["key_b"]]
                value = [row[field] for field in row if field.startswith("value_")]
                if name in MAPS:
                    [held[name][row["mapkey_text"]]] = value
                elif name in LISTS:
                    assert row["position"] == len(held[name])
                    held[name] += value
                elif name == "timers":
                    held[name].append(row["time_ms"])
                else:
                    held[name] = value
    for held in found.values():
        held["timers"].sort()
    return dict(found)


def nothing_stored() -> dict[str, Any]:
    """The state of a key of which nothing is stored."""
    return {
        **dict.fromkeys((*VALUES, *SUMS)),
        **{name: [] for name in LISTS},
        **{name: {} for name in MAPS},
        "timers": [],
    }
