"""Pins: what each names, how its checkpoint is read from it alone, and what the coordinator keeps for them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from statelog import ConfigurationError, CorruptionError, StorageError
from statelog.coordinator.standing_pins import StandingPins
from statelog.history.footprint import Footprint, OperatorFootprint
from statelog.history.pins import (
    MARGIN_S,
    Consumer,
    Hold,
    Pin,
    consumer_pins,
    has_expired,
    pin_name,
    pins_of,
    read_pin,
    standing_pins,
    write_pin,
)
from statelog.history.query_history import QueryHistory
from statelog.log.entry import INITIAL_BATCH, EntryPlace
from statelog.log.numbered import base_name
from statelog.log.references import SegmentRef
from statelog.sealed import seal
from statelog.storage import ObjectInfo
from statelog.testing.faults import FaultPlan, FaultStore
from tests.short_log import IDENTITY, UID, ShortLog, base, base_range, changes, identity_of, materialized


def pin_of(log: ShortLog, batch: int, **values: Any) -> Pin:
    given = {"owner": "test", "made_ms": 7, "lasts_s": 100.0, **values}
    narrowed = {name: given.pop(name) for name in ("since", "operators") if name in given}
    return Pin.on(Footprint.of(log.query(), batch, **narrowed), **given)


def consumers(log: ShortLog, since: int, batch: int, max_bytes: int = 1 << 20, **values: Any) -> Pin:
    given = {"owner": "test", "made_ms": 7, "lasts_s": 100.0, **values}
    return Pin.on(Footprint.of_changes(log.history(), batch, since=since), Consumer(max_bytes), **given)


def put(log: ShortLog, pin: Pin, token: bytes = b"pin", *, holds: bool = True) -> str:
    name = pin_name(pin.batch, token)
    write_pin(log.store, name, replace(pin, holds=holds))
    return name


def log_files(log: ShortLog, first: int, last: int) -> list[str]:
    """The files with the entries of some batches."""
    return sorted({f"log/{base_name(one.number)}" for one in log.history().between(first, last)})


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
        query_id="query",
        batch=5,
        token=entries[-1].token,
        batch_time_ms=5000,
        owner="test",
        made_ms=7,
        lasts_s=100.0,
        entries=[EntryPlace(entry.number, entry.offset) for entry in entries],
        operators=[OperatorFootprint(IDENTITY, UID, [base_range(2)], 3 * 15 + 100)],
        objects=sorted([*(changes(batch) for batch in (3, 4, 5)), materialized(2), *log_files(log, 3, 5)]),
        purpose=Hold(),
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
        materialized(2),
        *log_files(log, first, 5),
    }
    assert len(pin.entries) == 6 - first


def test_a_consumers_pin_keeps_changes_and_no_checkpoint(log: ShortLog) -> None:
    entries = list(log.history().between(2, 5))
    pin = consumers(log, 2, 5)
    assert pin == Pin(
        query_id="query",
        batch=5,
        token=entries[-1].token,
        batch_time_ms=5000,
        owner="test",
        made_ms=7,
        lasts_s=100.0,
        entries=[EntryPlace(entry.number, entry.offset) for entry in entries],
        operators=[OperatorFootprint(IDENTITY, UID, [], 4 * 15)],
        objects=sorted([*(changes(batch) for batch in (2, 3, 4, 5)), *log_files(log, 2, 5)]),
        since=2,
        purpose=Consumer(1 << 20),
    )
    assert pin.changes_from == 2


@pytest.fixture
def pair() -> ShortLog:
    """A log of two operators: the first has a base through batch 2 from batch 4 on, the other none."""
    made = ShortLog(4, max_file_bytes=1000, uids=(UID, OTHER))
    made.run(4, base_ranges=[base_range(2)])
    made.run(5)
    return made


OTHER = "other"


def test_a_pin_names_what_each_of_its_operators_needs(pair: ShortLog) -> None:
    """The entries are those of the one that is further behind."""
    own = {*map(changes, (3, 4, 5)), materialized(2)}
    others = {changes(batch, identity_of(OTHER)) for batch in range(6)}
    whole, first, second = (pin_of(pair, 5, operators=some) for some in (None, [IDENTITY], [identity_of(OTHER)]))
    assert set(whole.objects) == own | others | set(log_files(pair, 0, 5))
    assert set(first.objects) == own | set(log_files(pair, 3, 5))
    assert set(second.objects) == others | set(log_files(pair, 0, 5))
    places = [entry.place for entry in pair.query().entries]
    assert (whole.entries, first.entries, second.entries) == (places, places[3:], places)
    assert [(one.identity, one.uid, one.state_bytes) for one in whole.operators] == [
        (IDENTITY, UID, 3 * 15 + 100),
        (identity_of(OTHER), OTHER, 6 * 15),
    ]
    assert whole.state_bytes == first.state_bytes + second.state_bytes
    assert first.operator(identity_of(OTHER)) is None
    assert whole.operator(IDENTITY) == first.operators[0]


def test_each_operator_of_a_pin_is_restored_without_the_rest_of_the_log(pair: ShortLog) -> None:
    before, pin = pair.query(), pin_of(pair, 5)
    for name in list(pair.store.objects):
        if name not in pin.objects:
            del pair.store.objects[name]
    for identity, history in before.histories.items():
        alone = pin.history(pair.store, identity)
        assert alone.has_batch(5)
        assert alone.missing_segments(b"", 0, 1, 5, set()) == history.missing_segments(b"", 0, 1, 5, set())


def test_a_pin_knows_operators_by_the_names_that_they_had(pair: ShortLog) -> None:
    pair.claim(renames={IDENTITY: "renamed"})
    pin = pin_of(pair, 5)
    assert [one.uid for one in pin.operators] == ["renamed", OTHER]
    pair.claim(renames={IDENTITY: "again"})
    latest = pin.history(pair.store, IDENTITY).latest
    assert latest is not None
    assert latest.uid == "renamed"


def test_a_pin_vouches_only_for_its_own_operators(pair: ShortLog) -> None:
    """Older entries that it has of another operator do not keep what one needs of that time."""
    whole, first, second = (pin_of(pair, 5, operators=some) for some in (None, [IDENTITY], [identity_of(OTHER)]))
    assert whole.covers(first)
    assert whole.covers(second)
    assert not first.covers(whole)
    assert not second.covers(first)
    older = pin_of(pair, 5, operators=[IDENTITY], since=1)
    assert whole.entries[0] < older.entries[0]
    assert changes(1) in older.objects
    assert changes(1) not in whole.objects
    assert not whole.covers(older)
    early = consumers(pair, 2, 5)
    other = Pin.on(
        Footprint.of_changes(pair.history(identity_of(OTHER)), 5, since=2),
        Consumer(1 << 20),
        owner="test",
        made_ms=7,
        lasts_s=100.0,
    )
    assert not early.covers(other)
    assert not other.covers(early)


def test_a_consumers_pin_can_name_what_came_later(log: ShortLog) -> None:
    """Also if the log does not begin as early any more."""
    pin, whole = consumers(log, 2, 5), consumers(log, 2, 7)
    assert pin.with_later(log.query()) == whole
    history = log.query()
    history.retain(7, {})
    assert history.histories[IDENTITY].at(2) is None
    assert pin.with_later(history) == whole
    assert whole.with_later(history) is whole
    assert whole.with_later(QueryHistory()) is whole
    assert pin_of(log, 5).with_later(history) == pin_of(log, 5)


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
    assert name == f"pins/{5:020}-{b'pin'.hex()}.json"
    assert log.store.objects[name][0] == seal(pin, "statelog pin", 1)
    assert read_pin(log.store, name) == pin
    log.store.put(name, seal(pin, "statelog pin", 2))
    with pytest.raises(ConfigurationError, match=f"{name}: .* version 2, but this version of statelog reads up to 1"):
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
    history = pin.history(log.store, IDENTITY)
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
    history = pin.history(log.store, IDENTITY)
    assert history.has_batch(3)
    assert history.at(3) == replace(next(log.history().checkpoints), retained_from=3, base_ranges=[])


def test_a_log_file_is_read_once_for_all_its_entries() -> None:
    log = ShortLog(5)
    pin = pin_of(log, 4)
    log.store.requests.clear()
    pin.history(log.store, IDENTITY)
    assert [operation for operation, _ in log.store.requests] == ["read"]


def test_a_log_that_is_not_the_pins_any_more_is_damage(log: ShortLog) -> None:
    pin = pin_of(log, 5)
    [name] = log_files(log, 5, 5)
    content, modified_s = log.store.objects[name]
    with pytest.raises(CorruptionError, match=r"0{19}1.log: the entry at offset 0, .* is not a checkpoint"):
        replace(pin, entries=[EntryPlace(1, 0), *pin.entries]).history(log.store, IDENTITY)
    with pytest.raises(CorruptionError, match="a pin of checkpoint 5 names are not those that it was made for"):
        replace(pin, token=b"another").history(log.store, IDENTITY)
    log.store.objects[name] = (bytes(len(content)), modified_s)
    with pytest.raises(CorruptionError, match="which a pin names, is not a checkpoint"):
        pin.history(log.store, IDENTITY)


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
        return [info.name for info, _ in standing_pins(log.store, at_s, batch)]

    assert found(now_s) == [made["first"], made["second"], made["for ever"]]
    assert found(now_s, 5) == [made["second"]]
    assert [info.name for info, _ in consumer_pins(log.store, IDENTITY, now_s)] == [made["consumer's"]]
    assert found(now_s + 100 - MARGIN_S) == found(now_s), "until they may be over by another clock"
    assert found(now_s + 101 - MARGIN_S) == [made["for ever"]]
    assert list(consumer_pins(log.store, IDENTITY, now_s + 101 - MARGIN_S)) == []


def test_a_pin_that_goes_after_it_was_listed_is_left_out(log: ShortLog) -> None:
    name, left = put(log, pin_of(log, 4)), put(log, pin_of(log, 5))
    store = FaultStore(log.store, FaultPlan.at("read", action=lambda: log.store.delete([name])))
    assert [info.name for info, _ in standing_pins(store, log.clock.now_s())] == [left]


def found_of(log: ShortLog, uid: str = UID, batch: int | None = None) -> list[str]:
    found = pins_of(log.store, log.query(), identity_of(uid), log.clock.now_s(), batch)
    return [info.name for info, _ in found]


def test_of_a_batch_that_was_repeated_only_the_pin_of_the_last_time_is_found(log: ShortLog) -> None:
    """Also once the log begins later."""
    assert found_of(log, batch=6) == []
    older, kept = put(log, pin_of(log, 6), b"z"), put(log, pin_of(log, 5))
    assert found_of(log) == [kept, older]
    log.run(6)
    newer = put(log, pin_of(log, 6), b"a")
    assert found_of(log, batch=6) == [newer]
    assert found_of(log) == [kept, newer]
    log.run(7, base_ranges=[base_range(6)])
    log.run(8, entry={"log_start": log.query().entries[-1].number})
    assert log.query().entries[0].batch == 7
    assert found_of(log) == [kept, newer]


def test_what_a_claim_took_back_is_found_no_more(log: ShortLog) -> None:
    five, six = put(log, pin_of(log, 5)), put(log, pin_of(log, 6))
    target = log.query().at(5)
    assert target is not None
    log.claim(follows=target.id)
    assert found_of(log) == [five]
    assert [info.name for info, _ in standing_pins(log.store, log.clock.now_s())] == [five, six], "it keeps all it did"
    log.claim(follows=b"")
    assert found_of(log) == []


def test_a_pin_expires_a_margin_after_its_time() -> None:
    info, pin = ObjectInfo("pins/x", 1, 1000.0), pin_of(ShortLog(1), 0)
    assert not has_expired(pin, info, 1100.0 + MARGIN_S)
    assert has_expired(pin, info, 1100.1 + MARGIN_S)
    assert has_expired(pin, info, 1100.1, 0.0)
    assert not has_expired(replace(pin, lasts_s=None), info, 1e12)


# ---- What the coordinator keeps ----


def pins_in(log: ShortLog) -> StandingPins:
    return StandingPins(log.store, log.clock)


def test_what_standing_pins_name_is_kept_whether_they_hold_or_not(log: ShortLog) -> None:
    """The maker of one may just have seen that it holds."""
    pins = pins_in(log)
    put(log, pin_of(log, 5), holds=False)
    assert not pins.need(changes(5)), "nobody has looked yet"
    assert pins.look(log.query()) == []
    assert pins.need(changes(5))
    assert pins.need(materialized(2))
    assert not pins.need(changes(6))
    assert pins.need_any(lambda name: name == changes(3))
    assert not pins.need_any(lambda name: name == changes(2))


def test_expired_pins_are_over_and_keep_nothing(log: ShortLog) -> None:
    pins = pins_in(log)
    short, lasting = put(log, pin_of(log, 5)), put(log, pin_of(log, 6, lasts_s=None))
    log.clock.advance(100 + MARGIN_S)
    assert pins.look(log.query()) == []
    log.clock.advance(1)
    assert pins.look(log.query()) == [short]
    assert not pins.need(changes(3))
    assert pins.need(changes(6))
    log.store.delete([lasting])
    pins.look(log.query())
    assert not pins.need(changes(6)), "it was removed"


def test_a_pin_is_read_once_and_what_is_gone_by_then_keeps_nothing(log: ShortLog) -> None:
    gone = put(log, pin_of(log, 5))
    store = FaultStore(log.store, FaultPlan.at("read", action=lambda: log.store.delete([gone])))
    pins = StandingPins(store, log.clock)
    pins.look(log.query())
    assert not pins.need(changes(5))
    left = put(log, pin_of(log, 5), b"left")
    history = log.query()
    log.store.requests.clear()
    for _ in range(3):
        pins.look(history)
        assert pins.need(changes(5))
    assert log.store.requests.count(("read", left)) == 1


def test_one_pin_that_cannot_be_read_keeps_everything(log: ShortLog, caplog: pytest.LogCaptureFixture) -> None:
    pins, name = pins_in(log), put(log, pin_of(log, 7))
    log.store.put(name, b"damaged")
    other = put(log, pin_of(log, 4))
    for _ in range(2):
        assert pins.look(log.query()) == []
        assert pins.need(changes(0))
        assert pins.need_any(lambda name: False)
        assert pins.changes_from(IDENTITY) == INITIAL_BATCH
    assert caplog.text.count(f"{name} cannot be read, so nothing is deleted while it exists") == 1
    log.store.put(name, b"damaged")
    log.store.delete([other])
    pins.look(log.query())
    assert caplog.text.count("cannot be read") == 1
    log.store.delete([name])
    pins.look(log.query())
    assert not pins.need(changes(0))
    assert pins.changes_from(IDENTITY) == 8
    log.store.put(name, b"damaged again")
    pins.look(log.query())
    assert caplog.text.count("cannot be read") == 2


def test_a_pin_of_a_later_version_keeps_everything_and_ends_nothing(log: ShortLog) -> None:
    """It is not damaged: a tool of a later version has pinned something."""
    name, other = put(log, pin_of(log, 7)), put(log, pin_of(log, 4, lasts_s=1.0))
    log.store.put(name, seal(pin_of(log, 7), "statelog pin", 2))
    with pytest.raises(ConfigurationError, match="has version 2"):
        read_pin(log.store, name)
    log.clock.advance(1 + MARGIN_S + 1)
    pins = pins_in(log)
    assert pins.look(log.query()) == [other], "others are seen all the same"
    assert pins.need(changes(0))


def test_what_was_taken_back_may_be_forgotten_once_the_pins_were_listed_after_it(log: ShortLog) -> None:
    """Whoever has pinned it has done so before; and a pin that cannot be read may be of anything."""
    pins = pins_in(log)
    assert pins.oldest_place == EntryPlace(0, 0), "nobody has looked yet"
    pins.look(QueryHistory())
    assert pins.oldest_place == EntryPlace(0, 0), "nothing is there"
    pins.look(log.query())
    places = [entry.place for entry in log.query().entries]
    assert pins.oldest_place == places[-1]
    for batch in (6, 5):
        put(log, pin_of(log, batch, lasts_s=None))
        pins.look(log.query())
        assert pins.oldest_place == places[batch]
    log.store.put(pin_name(7, b"damaged"), b"damaged")
    pins.look(log.query())
    assert pins.oldest_place == EntryPlace(0, 0)


def test_a_store_that_fails_does_not_tell_what_pins_there_are(log: ShortLog) -> None:
    put(log, pin_of(log, 5))
    for operation in ("list", "read"):
        pins = StandingPins(FaultStore(log.store, FaultPlan.at(operation)), log.clock)
        with pytest.raises(StorageError):
            pins.look(log.query())
        assert not pins.has_seen(INITIAL_BATCH)
        pins.look(log.query())
        assert pins.has_seen(7)
        assert pins.need(changes(5))


def test_changes_stay_until_the_pins_were_listed_after_them(log: ShortLog) -> None:
    """Before that, a consumer may rely on a log that still begins with them."""
    pins = pins_in(log)
    assert not pins.has_seen(INITIAL_BATCH)
    assert pins.changes_from(IDENTITY) == INITIAL_BATCH
    pins.look(QueryHistory())
    assert pins.changes_from(IDENTITY) == INITIAL_BATCH
    pins.look(log.query())
    assert (pins.has_seen(7), pins.has_seen(8), pins.changes_from(IDENTITY)) == (True, False, 8)


def test_the_changes_of_the_consumer_that_is_furthest_behind_stay(log: ShortLog) -> None:
    pins = pins_in(log)
    put(log, consumers(log, 5, 6), b"near")
    put(log, pin_of(log, 4, since=1))
    pins.look(log.query())
    assert pins.changes_from(IDENTITY) == 5, "a pin of a checkpoint keeps what it names, and no later changes"
    far = put(log, consumers(log, 3, 6), b"far")
    pins.look(log.query())
    assert pins.changes_from(IDENTITY) == 3
    log.store.delete([far])
    put(log, consumers(log, 7, 7), b"new")
    pins.look(log.query())
    assert pins.changes_from(IDENTITY) == 5


def test_a_consumer_keeps_no_changes_of_another_operator(pair: ShortLog) -> None:
    pins, other = pins_in(pair), identity_of(OTHER)
    put(pair, consumers(pair, 2, 5))
    pins.look(pair.query())
    assert (pins.changes_from(IDENTITY), pins.changes_from(other)) == (2, 6)
    assert pins.need(changes(2))
    assert not pins.need(changes(2, other))
    now_s = pair.clock.now_s()
    assert [len(list(consumer_pins(pair.store, one, now_s))) for one in (IDENTITY, other)] == [1, 0]


def test_unseen_changes_stay_beside_those_of_a_consumer_of_later_ones(log: ShortLog) -> None:
    pins = pins_in(log)
    history = log.query()
    log.run(8)
    put(log, consumers(log, 8, 8))
    pins.look(history)
    assert pins.changes_from(IDENTITY) == 8
    log.run(9)
    put(log, replace(consumers(log, 8, 9), since=12), b"later")
    log.store.delete([pin_name(8, b"pin")])
    pins.look(log.query())
    assert pins.changes_from(IDENTITY) == 10


def test_a_consumer_that_is_too_far_behind_keeps_nothing_and_is_named_once(
    log: ShortLog, caplog: pytest.LogCaptureFixture
) -> None:
    pins = pins_in(log)
    most = log.history().changes_bytes(3)
    behind, allowed = (
        put(log, consumers(log, 2, 7, max_bytes=most), b"2"),
        put(log, consumers(log, 3, 7, max_bytes=most), b"3"),
    )
    put(log, pin_of(log, 4))
    for _ in range(2):
        assert pins.look(log.query()) == [behind]
        assert not pins.need(changes(2))
        assert pins.changes_from(IDENTITY) == 3
    log.run(8)
    assert pins.look(log.query()) == [behind, allowed]
    assert pins.changes_from(IDENTITY) == 9
    for name in (behind, allowed):
        assert caplog.text.count(f"{name}, the pin of test, is over") == 1


@pytest.mark.parametrize("odd", [{"entries": []}, {"operators": []}, {"since": None}])
def test_a_pin_of_an_odd_form_keeps_everything_and_ends_nothing(
    log: ShortLog, caplog: pytest.LogCaptureFixture, odd: dict[str, Any]
) -> None:
    """Its checksum is right, but no version of the library writes one like it."""
    name = put(log, replace(consumers(log, 6, 7, max_bytes=0), **odd))
    pins = pins_in(log)
    for _ in range(2):
        assert pins.look(log.query()) == []
        assert pins.need(changes(0))
    assert caplog.text.count(f"{name} cannot be read, so nothing is deleted while it exists") == 1
    log.store.delete([name])
    pins.look(log.query())
    assert not pins.need(changes(0))
