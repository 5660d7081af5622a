"""Checkpoints at intervals of batch time: which are due, and when their pins are written."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from msgspec.structs import replace

from statelog.coordinator.standing_pins import OWNER, RetainedPoints
from statelog.history.footprint import Footprint
from statelog.history.pins import MARGIN_S, Pin, pin_name, read_pin, write_pin
from statelog.storage import Store
from statelog.testing.faults import FaultPlan, FaultStore
from tests.short_log import NOW_S, ShortLog, base_range


def make_points(log: ShortLog, retained_s: dict[float, float], store: Store | None = None) -> RetainedPoints:
    return RetainedPoints(store or log.store, "/location", retained_s, log.clock)


def due(log: ShortLog, points: RetainedPoints) -> list[int]:
    """The batches that are due, if all of the log's become certain one after the other."""
    return [one.batch for one in log.query().entries if points.add(log.query(), one)]


def pins(log: ShortLog) -> list[Pin]:
    found = [read_pin(log.store, name) for name in sorted(log.store.objects) if name.startswith("pins/")]
    return [pin for pin in found if pin is not None]


def put(log: ShortLog, batch: int, **values: Any) -> str:
    """Write a pin as an earlier start may have left it."""
    made = Pin.on(Footprint.of(log.query(), batch), owner=OWNER, made_ms=0, lasts_s=100.0)
    name = pin_name(batch, b"earlier")
    write_pin(log.store, name, replace(made, **{"holds": True, **values}))
    return name


def test_the_first_checkpoint_of_each_interval_is_due() -> None:
    """A batch a second; intervals begin at multiples of their length."""
    log = ShortLog(10)
    points = make_points(log, {4: 100, 6: 50})
    assert due(log, points) == [0, 4, 6, 8]
    assert points.pending == [0, 4, 6, 8]
    points.pin()
    assert points.pending == []
    assert [(pin.batch, pin.lasts_s) for pin in pins(log)] == [(0, 100), (4, 100), (6, 50), (8, 100)], (
        "the longest time"
    )
    assert {(pin.owner, pin.holds, pin.made_ms) for pin in pins(log)} == {(OWNER, True, int(NOW_S * 1000))}


def test_a_batch_that_is_repeated_with_an_older_time_begins_no_interval() -> None:
    log = ShortLog()
    points = make_points(log, {10: 100})
    for batch, time_ms in enumerate((25_000, 12_000, 29_999, 30_000)):
        log.run(batch, entry={"batch_time_ms": time_ms})
    assert due(log, points) == [0, 3]


def test_without_intervals_nothing_is_due_and_nothing_asked() -> None:
    log = ShortLog(3)
    history, points = log.query(), make_points(log, {})
    log.store.requests.clear()
    points.open(history, 3)
    points.pin()
    assert due(log, points) == []
    assert not [name for operation, name in log.store.requests if operation == "list" and name == "pins/"]


# ---- A start goes on ----


def test_a_start_looks_at_the_certain_checkpoints_that_are_retained() -> None:
    """A crash may have come before their pins. The first batch may be repeated, those given up may lack objects."""
    log = ShortLog(5)
    log.retained_from = 3
    for batch in range(5, 9):
        log.run(batch)
    points = make_points(log, {1: 100})
    points.open(log.query(), 7)
    assert points.pending == [3, 4, 5, 6]
    points.pin()
    assert [pin.batch for pin in pins(log)] == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("values", "pending"),
    [
        ({}, [4]),
        ({"lasts_s": 101.0}, [4]),
        ({"lasts_s": None}, [4]),
        ({"lasts_s": 99.0}, [0, 4]),
        ({"owner": "audit"}, [0, 4]),
        ({"holds": False}, [0, 4]),
    ],
    ids=str,
)
def test_a_pin_of_an_earlier_start_counts_if_it_lasts_long_enough(values: dict[str, Any], pending: list[int]) -> None:
    log = ShortLog(6)
    put(log, 1, **values)
    points = make_points(log, {4: 100})
    points.open(log.query(), 6)
    assert points.pending == pending


def test_pins_of_earlier_starts_count_for_the_intervals_that_ask_for_no_more() -> None:
    log = ShortLog(6)
    put(log, 3)
    points = make_points(log, {2: 200, 3: 100})
    points.open(log.query(), 6)
    assert points.pending == [0, 2, 4]


def test_a_pin_that_has_expired_or_gone_does_not_count() -> None:
    log = ShortLog(2)
    name = put(log, 0)
    log.clock.advance(100 + MARGIN_S)
    points = make_points(log, {4: 100})
    points.open(log.query(), 2)
    assert points.pending == []
    log.clock.advance(1)
    points = make_points(log, {4: 100})
    points.open(log.query(), 2)
    assert points.pending == [0]
    log = ShortLog(2)
    put(log, 0)
    going = FaultPlan.at("read", action=lambda: log.store.delete([name]))
    history = log.query()
    points = make_points(log, {4: 100}, FaultStore(log.store, going))
    points.open(history, 2)
    assert points.pending == [0]


def test_a_pin_of_a_checkpoint_that_was_taken_back_does_not_count() -> None:
    log = ShortLog(6)
    put(log, 4)
    points = make_points(log, {4: 100})
    points.open(log.query(), 6)
    assert points.pending == [], "later intervals have a pin"
    log.run(4)
    log.run(5)
    points = make_points(log, {4: 100})
    points.open(log.query(), 6)
    assert points.pending == [0, 4]


def test_a_pin_that_cannot_be_read_does_not_hide_the_others() -> None:
    log = ShortLog(9)
    log.store.put(put(log, 0), b"damaged")
    put(log, 5)
    points = make_points(log, {4: 100})
    points.open(log.query(), 9)
    assert points.pending == [8]


# ---- Pins are written ----


def test_a_pin_that_cannot_be_written_is_tried_again_and_does_not_stop_the_others() -> None:
    log = ShortLog(9)
    points = make_points(log, {4: 100}, FaultStore(log.store, FaultPlan.at("put_if_absent")))
    due(log, points)
    points.pin()
    assert points.pending == [0]
    assert [pin.batch for pin in pins(log)] == [4, 8]
    points.pin()
    assert points.pending == []
    assert [pin.batch for pin in pins(log)] == [0, 4, 8]
    points.pin()
    assert len(pins(log)) == 3


def test_no_error_of_a_store_keeps_the_other_points_from_being_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of the user's may raise anything."""
    log = ShortLog(9)
    points = make_points(log, {4: 100})
    due(log, points)
    put_if_absent = log.store.put_if_absent

    def put_others(name: str, data: bytes | memoryview) -> bool:
        if name.startswith(f"pins/{0:020}-"):
            raise KeyError(name)
        return put_if_absent(name, data)

    with monkeypatch.context() as patched:
        patched.setattr(log.store, "put_if_absent", put_others)
        points.pin()
    assert points.pending == [0]
    assert [pin.batch for pin in pins(log)] == [4, 8]
    points.pin()
    assert points.pending == []


def test_a_pin_that_cannot_be_written_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("statelog.coordinator.standing_pins"), "propagate", True)
    log = ShortLog(9)
    points = make_points(log, {4: 100}, FaultStore(log.store, FaultPlan.seeded(0, rate=1.0)))
    due(log, points)
    for _ in range(3):
        points.pin()
    warned = [
        record.getMessage().partition(" cannot")[0][-1] for record in caplog.records if record.levelname == "WARNING"
    ]
    assert points.pending == [0, 4, 8]
    assert warned == ["0", "4", "8"]


def test_a_point_that_a_newer_start_has_given_up_is_forgotten() -> None:
    log = ShortLog(9)
    points = make_points(log, {4: 100})
    due(log, points)
    log.retained_from = 5
    log.run(9)
    points.pin()
    assert points.pending == []
    assert [pin.batch for pin in pins(log)] == [8]


def test_a_point_is_pinned_as_it_was_when_it_was_due() -> None:
    log = ShortLog(5)
    log.run(5, base_ranges=[base_range(4)])
    history, points = log.query(), make_points(log, {4: 100})
    needed = Pin.on(Footprint.of(history, 4), owner=OWNER, made_ms=0, lasts_s=1.0).objects
    for one in list(history.entries):
        points.add(history, one)
    history.retain(5, {})
    assert history.at(4) is None
    points.pin()
    assert pins(log)[-1].objects == needed
