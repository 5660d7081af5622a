"""Pins: what each names, how its checkpoint is read from it alone, and what the coordinator keeps for them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from statelog import ConfigurationError, CorruptionError, StorageError
from statelog.checkpoint.history import History
from statelog.checkpoint.pins import (
    MARGIN_S,
    EntryPlace,
    Pin,
    StandingPins,
    consumer_pins,
    has_expired,
    pin_name,
    pinned_history,
    read_pin,
    standing_pins,
    write_pin,
)
from statelog.log.entry import INITIAL_BATCH
from statelog.log.numbered import base_name
from statelog.log.references import SegmentRef
from statelog.sealed import seal
from statelog.storage import ObjectInfo
from statelog.testing.faults import FaultPlan, FaultStore
from tests.short_log import ROOT, ShortLog, base, base_range, changes


def pin_of(log: ShortLog, batch: int, **values: Any) -> Pin:
    given = {"owner": "test", "made_ms": 7, "lasts_s": 100.0, **values}
    return Pin.of(ROOT, log.history(), batch, **given)


def consumers(log: ShortLog, since: int, batch: int, **values: Any) -> Pin:
    given = {"owner": "test", "made_ms": 7, "lasts_s": 100.0, "max_bytes": 1 << 20, **values}
    return Pin.of_changes(ROOT, log.history(), batch, since=since, **given)


def put(log: ShortLog, pin: Pin, token: bytes = b"pin", *, holds: bool = True) -> str:
    name = pin_name(ROOT, pin.batch, token)
    write_pin(log.store, name, replace(pin, holds=holds))
    return name


def log_files(log: ShortLog, first: int, last: int) -> list[str]:
    """The files with the entries of some batches."""
    return sorted({f"{ROOT}/log/{base_name(one.number)}" for one in log.history().between(first, last)})


@pytest.fixture
def log() -> ShortLog:
    """A log of several files, with a base through batch 2 from batch 4 on, and one through batch 5 from batch 6 on."""
    made = ShortLog(4, max_file_bytes=1000)
    made.run(4, base_ranges=[base_range(2)])
    made.run(5)
    made.run(6, bases=[base(5)])
    made.run(7)
    return made


# ---- What a pin names ----


def test_a_pin_names_all_that_its_checkpoint_needs_and_nothing_else(log: ShortLog) -> None:
    entries = list(log.history().between(3, 5))
    assert len({entry.number for entry in log.history().checkpoints}) > 2
    pin = pin_of(log, 5)
    assert pin == Pin(
        uid="uid",
        query_id="query",
        batch=5,
        token=entries[-1].token,
        batch_time_ms=5000,
        owner="test",
        made_ms=7,
        lasts_s=100.0,
        entries=[EntryPlace(entry.number, entry.offset) for entry in entries],
        base_ranges=[base_range(2)],
        objects=sorted([*(changes(batch) for batch in (3, 4, 5)), f"{ROOT}/runs/1/0/2", *log_files(log, 3, 5)]),
        state_bytes=3 * 15 + 100,
    )
    assert pin.changes_from is None


def test_the_log_is_kept_also_where_it_has_no_changes_inside() -> None:
    log = ShortLog(max_file_bytes=1)
    for batch in range(4):
        log.run(batch, segments=[SegmentRef(0, 1, b"", 0, 10, 1, 1, changes(batch))])
    expected = sorted([*map(changes, range(1, 4)), *log_files(log, 1, 3)])
    assert len(expected) == 6
    assert consumers(log, 1, 3).objects == expected
    assert pin_of(log, 3).objects == sorted([changes(0), *expected, *log_files(log, 0, 0)])


@pytest.mark.parametrize(("since", "first"), [(1, 1), (3, 3), (5, 3)])
def test_a_pin_can_keep_older_changes_too(log: ShortLog, since: int, first: int) -> None:
    pin = pin_of(log, 5, since=since)
    assert pin.since == since
    assert set(pin.objects) == {
        *(changes(batch) for batch in range(first, 6)),
        f"{ROOT}/runs/1/0/2",
        *log_files(log, first, 5),
    }
    assert len(pin.entries) == 6 - first


def test_a_consumers_pin_keeps_changes_and_no_checkpoint(log: ShortLog) -> None:
    entries = list(log.history().between(2, 5))
    pin = consumers(log, 2, 5)
    assert pin == Pin(
        uid="uid",
        query_id="query",
        batch=5,
        token=entries[-1].token,
        batch_time_ms=5000,
        owner="test",
        made_ms=7,
        lasts_s=100.0,
        entries=[EntryPlace(entry.number, entry.offset) for entry in entries],
        base_ranges=[],
        objects=sorted([*(changes(batch) for batch in (2, 3, 4, 5)), *log_files(log, 2, 5)]),
        state_bytes=4 * 15,
        since=2,
        max_bytes=1 << 20,
    )
    assert pin.changes_from == 2


def test_a_consumers_pin_can_name_what_came_later(log: ShortLog) -> None:
    """Also if the log does not begin as early any more."""
    pin, whole = consumers(log, 2, 5), consumers(log, 2, 7)
    assert pin.with_later(ROOT, log.history()) == whole
    history = log.history()
    history.retain(7)
    assert history.at(2) is None
    assert pin.with_later(ROOT, history) == whole
    assert whole.with_later(ROOT, history) is whole
    assert whole.with_later(ROOT, History()) is whole
    assert pin_of(log, 5).with_later(ROOT, history) == pin_of(log, 5)


def test_a_pin_vouches_for_what_it_keeps_itself(log: ShortLog) -> None:
    own, repeated = pin_of(log, 5), replace(pin_of(log, 5), token=b"of a repetition")
    older, newer = pin_of(log, 5, since=2), pin_of(log, 7)
    early, late = consumers(log, 2, 5), consumers(log, 3, 7)
    assert own.covers(own)
    assert older.covers(own)
    assert not own.covers(older), "it lacks changes"
    assert not own.covers(repeated)
    assert not newer.covers(own)
    assert early.covers(early)
    assert early.covers(late)
    assert not late.covers(early)
    assert not own.covers(late), "later changes are not kept"
    assert not older.covers(late)
    assert not replace(early, token=own.token).covers(own), "no base is kept"


def test_a_pin_is_a_sealed_document_of_version_1(log: ShortLog) -> None:
    pin = replace(pin_of(log, 5), holds=True)
    name = put(log, pin)
    assert name == f"{ROOT}/pins/{5:020}-{b'pin'.hex()}.json"
    assert log.store.objects[name][0] == seal(pin, "statelog pin", 1)
    assert read_pin(log.store, name) == pin
    log.store.put(name, seal(pin, "statelog pin", 2))
    with pytest.raises(ConfigurationError, match=f"{name}: .* version 2, and this statelog reads up to 1"):
        read_pin(log.store, name)
    log.store.put(name, seal(pin, "statelog parent", 1))
    with pytest.raises(CorruptionError, match=f"{name}: it is a statelog parent"):
        read_pin(log.store, name)
    assert read_pin(log.store, "another") is None


# ---- Reading from a pin alone ----


@pytest.mark.parametrize("batch", [5, 6])
def test_a_pinned_checkpoint_is_restored_without_the_rest_of_the_log(log: ShortLog, batch: int) -> None:
    """Also if it is the one from which a base counts."""
    before = log.history()
    pin = pin_of(log, batch)
    for name in list(log.store.objects):
        if name not in pin.objects:
            del log.store.objects[name]
    history = pin.history(log.store, ROOT)
    assert history.latest is not None
    assert history.oldest == history.latest, "no other checkpoint can be restored from it"
    assert history.has_batch(batch)
    assert history.latest.token == pin.token
    assert history.missing_segments(b"", 0, 1, batch, set()) == before.missing_segments(b"", 0, 1, batch, set())


def test_whole_state_is_restored_without_the_rest_of_the_log() -> None:
    log = ShortLog(key_schema=b"")
    for batch in (3, 4):
        log.run(batch)
    pin = pin_of(log, 3)
    assert pin.entries == [EntryPlace(one.number, one.offset) for one in log.history().between(3, 3)]
    assert changes(4) not in pin.objects
    history = pin.history(log.store, ROOT)
    assert history.has_batch(3)
    assert history.at(3) == replace(next(log.history().checkpoints), retained_from=3, base_ranges=[])


def test_a_log_file_is_read_once_for_all_its_entries() -> None:
    log = ShortLog(5)
    pin = pin_of(log, 4)
    log.store.requests.clear()
    pin.history(log.store, ROOT)
    assert [operation for operation, _ in log.store.requests] == ["read"]


def test_a_log_that_is_not_the_pins_any_more_is_damage(log: ShortLog) -> None:
    pin = pin_of(log, 5)
    [name] = log_files(log, 5, 5)
    content, modified_s = log.store.objects[name]
    with pytest.raises(CorruptionError, match=r"0{19}1.log: the entry at offset 0, .* is no checkpoint"):
        replace(pin, entries=[EntryPlace(1, 0), *pin.entries]).history(log.store, ROOT)
    with pytest.raises(CorruptionError, match="a pin of checkpoint 5 names are not those of its time"):
        replace(pin, token=b"another").history(log.store, ROOT)
    log.store.objects[name] = (bytes(len(content)), modified_s)
    with pytest.raises(CorruptionError, match="which a pin names, is no checkpoint"):
        pin.history(log.store, ROOT)


# ---- Finding pins ----


def test_pins_are_found_while_they_hold_and_stand(log: ShortLog) -> None:
    made = {
        "first": put(log, pin_of(log, 4)),
        "second": put(log, pin_of(log, 5)),
        "consumer's": put(log, consumers(log, 2, 5), b"consumer"),
        "for ever": put(log, pin_of(log, 6, lasts_s=None)),
    }
    put(log, pin_of(log, 5), b"late", holds=False)
    put(log, consumers(log, 2, 5), b"late consumer", holds=False)
    now_s = log.clock.now_s()

    def found(at_s: float, batch: int | None = None) -> list[str]:
        return [info.name for info, _ in standing_pins(log.store, ROOT, at_s, batch)]

    assert found(now_s) == [made["first"], made["second"], made["for ever"]]
    assert found(now_s, 5) == [made["second"]]
    assert [info.name for info, _ in consumer_pins(log.store, ROOT, now_s)] == [made["consumer's"]]
    assert found(now_s + 100 - MARGIN_S) == found(now_s), "until they may be over by another clock"
    assert found(now_s + 101 - MARGIN_S) == [made["for ever"]]
    assert list(consumer_pins(log.store, ROOT, now_s + 101 - MARGIN_S)) == []


def test_a_pin_that_goes_after_it_was_listed_is_left_out(log: ShortLog) -> None:
    name, left = put(log, pin_of(log, 4)), put(log, pin_of(log, 5))
    store = FaultStore(log.store, FaultPlan.at("read", action=lambda: log.store.delete([name])))
    assert [info.name for info, _ in standing_pins(store, ROOT, log.clock.now_s())] == [left]


def test_of_a_batch_that_was_repeated_the_last_state_is_read(log: ShortLog) -> None:
    now_s = log.clock.now_s()
    assert pinned_history(log.store, ROOT, 6, now_s) is None
    put(log, pin_of(log, 6, made_ms=5), b"z")
    log.run(6)
    put(log, pin_of(log, 6, made_ms=6), b"a")
    put(log, pin_of(log, 5, made_ms=9))
    found = pinned_history(log.store, ROOT, 6, now_s)
    assert found is not None
    assert found.at(6) is not None
    assert found.at(6) == pin_of(log, 6).history(log.store, ROOT).at(6)


def test_a_pin_expires_a_margin_after_its_time() -> None:
    info, pin = ObjectInfo("op/pins/x", 1, 1000.0), pin_of(ShortLog(1), 0)
    assert not has_expired(pin, info, 1100.0 + MARGIN_S)
    assert has_expired(pin, info, 1100.1 + MARGIN_S)
    assert has_expired(pin, info, 1100.1, 0.0)
    assert not has_expired(replace(pin, lasts_s=None), info, 1e12)


# ---- What the coordinator keeps ----


def pins_of(log: ShortLog) -> StandingPins:
    return StandingPins(log.store, ROOT, log.clock)


def test_what_standing_pins_name_is_kept_whether_they_hold_or_not(log: ShortLog) -> None:
    """The maker of one may just have seen that it holds."""
    pins = pins_of(log)
    put(log, pin_of(log, 5), holds=False)
    assert not pins.need(changes(5)), "nobody has looked yet"
    assert pins.look(log.history()) == []
    assert pins.need(changes(5))
    assert pins.need(f"{ROOT}/runs/1/0/2")
    assert not pins.need(changes(6))
    assert pins.need_any(lambda name: name == changes(3))
    assert not pins.need_any(lambda name: name == changes(2))


def test_expired_pins_are_over_and_keep_nothing(log: ShortLog) -> None:
    pins = pins_of(log)
    short, lasting = put(log, pin_of(log, 5)), put(log, pin_of(log, 6, lasts_s=None))
    log.clock.advance(100 + MARGIN_S)
    assert pins.look(log.history()) == []
    log.clock.advance(1)
    assert pins.look(log.history()) == [short]
    assert not pins.need(changes(3))
    assert pins.need(changes(6))
    log.store.delete([lasting])
    pins.look(log.history())
    assert not pins.need(changes(6)), "it was removed"


def test_a_pin_is_read_once_and_what_is_gone_by_then_keeps_nothing(log: ShortLog) -> None:
    gone = put(log, pin_of(log, 5))
    store = FaultStore(log.store, FaultPlan.at("read", action=lambda: log.store.delete([gone])))
    pins = StandingPins(store, ROOT, log.clock)
    pins.look(log.history())
    assert not pins.need(changes(5))
    left = put(log, pin_of(log, 5), b"left")
    history = log.history()
    log.store.requests.clear()
    for _ in range(3):
        pins.look(history)
        assert pins.need(changes(5))
    assert log.store.requests.count(("read", left)) == 1


def test_one_pin_that_cannot_be_read_keeps_everything(log: ShortLog, caplog: pytest.LogCaptureFixture) -> None:
    pins, name = pins_of(log), put(log, pin_of(log, 7))
    log.store.put(name, b"damaged")
    other = put(log, pin_of(log, 4))
    for _ in range(2):
        assert pins.look(log.history()) == []
        assert pins.need(changes(0))
        assert pins.need_any(lambda name: False)
        assert pins.changes_from == INITIAL_BATCH
    assert caplog.text.count(f"{name} cannot be read, so nothing is deleted while it stands") == 1
    log.store.put(name, b"damaged")
    log.store.delete([other])
    pins.look(log.history())
    assert caplog.text.count("cannot be read") == 1
    log.store.delete([name])
    pins.look(log.history())
    assert not pins.need(changes(0))
    assert pins.changes_from == 8
    log.store.put(name, b"damaged again")
    pins.look(log.history())
    assert caplog.text.count("cannot be read") == 2


def test_a_store_that_fails_does_not_tell_what_pins_there_are(log: ShortLog) -> None:
    put(log, pin_of(log, 5))
    for operation in ("list", "read"):
        pins = StandingPins(FaultStore(log.store, FaultPlan.at(operation)), ROOT, log.clock)
        with pytest.raises(StorageError):
            pins.look(log.history())
        assert not pins.has_seen(INITIAL_BATCH)
        pins.look(log.history())
        assert pins.has_seen(7)
        assert pins.need(changes(5))


def test_changes_stay_until_the_pins_were_listed_after_them(log: ShortLog) -> None:
    """Before that, a consumer may rely on a log that still begins with them."""
    pins = pins_of(log)
    assert not pins.has_seen(INITIAL_BATCH)
    assert pins.changes_from == INITIAL_BATCH
    pins.look(History())
    assert pins.changes_from == INITIAL_BATCH
    pins.look(log.history())
    assert (pins.has_seen(7), pins.has_seen(8), pins.changes_from) == (True, False, 8)


def test_the_changes_of_the_consumer_that_is_furthest_behind_stay(log: ShortLog) -> None:
    pins = pins_of(log)
    put(log, consumers(log, 5, 6), b"near")
    put(log, pin_of(log, 4, since=1))
    pins.look(log.history())
    assert pins.changes_from == 5, "a pin of a checkpoint keeps what it names, and no later changes"
    far = put(log, consumers(log, 3, 6), b"far")
    pins.look(log.history())
    assert pins.changes_from == 3
    log.store.delete([far])
    put(log, consumers(log, 7, 7), b"new")
    pins.look(log.history())
    assert pins.changes_from == 5


def test_unseen_changes_stay_beside_those_of_a_consumer_of_later_ones(log: ShortLog) -> None:
    pins = pins_of(log)
    history = log.history()
    log.run(8)
    put(log, consumers(log, 8, 8))
    pins.look(history)
    assert pins.changes_from == 8
    log.run(9)
    put(log, replace(consumers(log, 8, 9), since=12), b"later")
    log.store.delete([pin_name(ROOT, 8, b"pin")])
    pins.look(log.history())
    assert pins.changes_from == 10


def test_a_consumer_that_is_too_far_behind_keeps_nothing_and_is_named_once(
    log: ShortLog, caplog: pytest.LogCaptureFixture
) -> None:
    pins = pins_of(log)
    most = log.history().changes_bytes(3)
    behind, allowed = (
        put(log, consumers(log, 2, 7, max_bytes=most), b"2"),
        put(log, consumers(log, 3, 7, max_bytes=most), b"3"),
    )
    put(log, pin_of(log, 4))
    for _ in range(2):
        assert pins.look(log.history()) == [behind]
        assert not pins.need(changes(2))
        assert pins.changes_from == 3
    log.run(8)
    assert pins.look(log.history()) == [behind, allowed]
    assert pins.changes_from == 9
    for name in (behind, allowed):
        assert caplog.text.count(f"{name}, the pin of test, is over") == 1
