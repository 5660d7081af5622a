"""The distance of a bucket: delays of requests, and the figures of restarts and look-ups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.distance import FAR, NEAR, ROUND_TRIP_MS, FarStore, Settings, result_of


def test_each_request_takes_a_round_trip_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROUND_TRIP_MS, "20")
    waited_s: list[float] = []
    store = FarStore(f"far:{tmp_path}", waited_s.append)
    store.put("a", b"abc")
    assert store.read("a", offset=1, length=1) == b"b"
    assert not store.can_append
    assert store.requests == {"put": 1, "read": 1}
    assert waited_s == [0.02, 0.02]


def restart(log_s: float, restore_s: float) -> dict[str, Any]:
    return {"log_s": log_s, "restore_s": restore_s, "total_s": 9.0, "log_entries": 600}


def reader(lookup_s: float) -> dict[str, Any]:
    lookups_s = [lookup_s, lookup_s]
    return {
        "open_s": 0.1,
        "first_lookup_s": 0.2,
        "lookups_s": lookups_s,
        "requests": [1, 4],
        "requests_until_first": 7,
    }


def test_targets_are_the_parts_of_the_state_and_the_round_trips() -> None:
    restarts = {NEAR: [restart(0.1, 0.1)], FAR: [restart(0.5, 0.3), restart(0.9, 0.7)]}
    result = result_of(Settings(), restarts, {NEAR: [reader(0.010)], FAR: [reader(0.045)]})
    state, trips = result.targets
    assert state.value == pytest.approx(1.2)
    assert trips.value == pytest.approx(35 / 20)
    assert result.figures[FAR]["requests_per_lookup"] == {"median": 2.5, "max": 4}
