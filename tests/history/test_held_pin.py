"""Who makes a pin: it holds only if everybody who deletes comes to see it, and whoever relies on it is told in time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from statelog import CorruptionError, PinExpiredError, StorageError
from statelog.coordinator.standing_pins import StandingPins
from statelog.history.footprint import Footprint
from statelog.history.pins import MARGIN_S, Branch, Consumer, HeldPin, Pin, is_retained, read_pin
from statelog.history.query_history import QueryHistory
from statelog.storage import Store
from statelog.storage.store import StoreWrapper
from statelog.testing.faults import Call, Fault, FaultPlan, FaultStore
from tests.short_log import IDENTITY, NOW_S, UID, ShortLog, base_range, changes

BATCHES = 8


def make_log() -> ShortLog:
    """The log of batches 0 to 7; all from 4 on build on a base through batch 2."""
    made = ShortLog(4)
    made.run(4, base_ranges=[base_range(2)])
    for batch in range(5, BATCHES):
        made.run(batch)
    return made


@pytest.fixture
def log() -> ShortLog:
    return make_log()


def hold(
    log: ShortLog, batch: int = 5, *, history: QueryHistory | None = None, store: Store | None = None, **values: Any
) -> HeldPin:
    given = {"owner": "test", "lasts_s": 100.0, "clock": log.clock, **values}
    query, since = history or log.query(), given.pop("since", None)
    needed = Footprint.of(query, batch, since=since)
    if isinstance(given.get("purpose"), Consumer):
        needed = Footprint.of_changes(query.histories[IDENTITY], batch, since=since)
    return HeldPin(store or log.store, needed, **given)


def pins(log: ShortLog) -> dict[str, Pin]:
    """All pins that are stored."""
    found = {name: read_pin(log.store, name) for name in log.store.objects if name.startswith("pins/")}
    return {name: pin for name, pin in found.items() if pin is not None}


def list_pins(log: ShortLog, seen: StandingPins) -> None:
    """The query lists the pins."""
    seen.look(log.query())


def one_after(*steps: Callable[[], None]) -> None:
    for step in steps:
        step()


def give_up(log: ShortLog, before: int) -> None:
    """The query writes another entry, which retains only checkpoints from a batch on."""
    log.retained_from = before
    log.run(BATCHES)


# ---- Who is first ----


class Steps(FaultPlan):
    """Calls functions before some requests, by their numbers from 1."""

    def __init__(self, steps: dict[int, Callable[[], None]]) -> None:
        self._steps = steps
        self.requests = 0

    def fault(self, call: Call) -> Fault | None:
        self.requests += 1
        step = self._steps.pop(self.requests, None)
        return None if step is None else Fault(action=step)


@pytest.mark.parametrize("values", [{}, {"is_shared": True}, {"since": 2}], ids=str)
def test_a_query_that_gives_a_checkpoint_up_sees_each_pin_that_holds(values: dict[str, Any]) -> None:
    """Whichever requests of the maker the new entry comes between, and whenever the pins are listed after that."""
    outcomes: list[bool] = []
    for first in itertools.count(1):
        for second in itertools.count(first):
            log = make_log()
            since = values.get("since")
            needed = Pin.on(Footprint.of(log.query(), 5, since=since), owner="", made_ms=0, lasts_s=1).objects
            seen = StandingPins(log.store, log.clock)
            write, look = partial(give_up, log, 8), partial(list_pins, log, seen)
            plan = Steps({first: write, second: look} if first < second else {first: partial(one_after, write, look)})
            try:
                hold(log, store=FaultStore(log.store, plan), **values)
            except PinExpiredError:
                assert pins(log) == {}
                outcomes.append(False)
            else:
                if plan.requests < second:
                    seen.look(log.query())
                assert all(map(seen.need, needed))
                outcomes.append(True)
            if plan.requests < second:
                break
        if plan.requests < first:
            break
    assert False in outcomes
    assert True in outcomes


def test_a_query_that_gives_changes_up_sees_each_pin_of_a_consumer_that_holds() -> None:
    """It gives up, in a later entry, changes of batches that were durable when it listed the pins, if none needs them.

    A checkpoint of batch 8 still needs those from batch 3 on.
    """
    for first in itertools.count(1):
        for second in itertools.count(first):
            log = make_log()
            seen = StandingPins(log.store, log.clock)
            write, look = partial(give_up, log, 8), partial(list_pins, log, seen)
            plan = Steps({first: write, second: look} if first < second else {first: partial(one_after, write, look)})
            hold(log, 7, store=FaultStore(log.store, plan), since=3, purpose=Consumer(1 << 20), is_shared=True)
            [pin] = pins(log).values()
            assert seen.changes_from(IDENTITY) <= pin.batch + 1, "it neither names all that may go, nor was it seen"
            seen.look(log.query())
            assert seen.changes_from(IDENTITY) == 3
            assert all(map(seen.need, pin.objects))
            if plan.requests < second:
                break
        if plan.requests < first:
            break
    assert first > 5


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_consumers_pin_that_holds_keeps_also_changes_of_which_the_query_knew_no_consumer(is_shared: bool) -> None:
    """The query has listed the pins after batch 8 and before the pin of batch 7. So it may give up all of them."""
    outcomes: list[bool] = []
    for number in itertools.count(2):
        log = make_log()
        for batch in range(3, 9):
            log.store.put(changes(batch), b"changes")
        history, seen = log.query(), StandingPins(log.store, log.clock)
        give_up(log, 8)
        seen.look(log.query())
        plan = Steps({number: partial(delete_changes, log, seen)})
        store = FaultStore(log.store, plan)
        try:
            hold(log, 7, history=history, store=store, since=3, purpose=Consumer(1 << 20), is_shared=is_shared)
        except PinExpiredError:
            outcomes.append(False)
        else:
            if plan.requests < number:
                delete_changes(log, seen)
            assert all(changes(batch) in log.store.objects for batch in range(3, 9))
            outcomes.append(True)
        if plan.requests < number:
            break
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}


def delete_changes(log: ShortLog, seen: StandingPins) -> None:
    """The query gives up the changes before batch 9, but for those of batches without a list of the pins."""
    may_go = range(3, min(9, seen.changes_from(IDENTITY)))
    log.retained_from = 9
    log.run(9, base_ranges=[base_range(8)])
    seen.look(log.query())
    log.store.delete([changes(batch) for batch in may_go if not seen.need(changes(batch))])


def test_a_pin_that_others_may_rely_on_says_so_once_it_holds(log: ShortLog) -> None:
    written: list[bool] = []
    look = partial(note, log, written)
    held = hold(log, store=FaultStore(log.store, Steps(dict.fromkeys(range(1, 100), look))), is_shared=True)
    assert written == sorted(written)
    assert not written[0]
    assert {name: pin.holds for name, pin in pins(log).items()} == {held.name: True}


def note(log: ShortLog, written: list[bool]) -> None:
    written += [pin.holds for pin in pins(log).values()]


def test_a_pin_says_who_made_it_what_for_and_when(log: ShortLog) -> None:
    hold(log, new_token=lambda: b"token")
    [(name, pin)] = pins(log).items()
    assert name == f"pins/{5:020}-{b'token'.hex()}.json"
    assert pin == Pin.on(Footprint.of(log.query(), 5), owner="test", made_ms=int(NOW_S * 1000), lasts_s=100.0)
    log.store.delete([name])
    hold(log, since=1, purpose=Branch("/branch"), lasts_s=None)
    [pin] = pins(log).values()
    assert (pin.since, pin.branch, pin.lasts_s, pin.consumer) == (1, "/branch", None, None)


def test_the_machines_clock_tells_when_unless_there_is_another(log: ShortLog) -> None:
    before_ms = int(time.time() * 1000)
    hold(log, clock=None)
    [pin] = pins(log).values()
    assert before_ms <= pin.made_ms <= time.time() * 1000


def test_a_consumers_pin_is_one_of_changes(log: ShortLog) -> None:
    hold(log, 7, since=3, purpose=Consumer(1000))
    [pin] = pins(log).values()
    assert pin == Pin.on(
        Footprint.of_changes(log.history(), 7, since=3),
        Consumer(1000),
        owner="test",
        made_ms=int(NOW_S * 1000),
        lasts_s=100.0,
    )


# ---- What is gone ----


def refused(log: ShortLog, history: QueryHistory, batch: int = 5, **values: Any) -> None:
    """Checks that no pin holds, and none is left."""
    before = pins(log)
    with pytest.raises(PinExpiredError, match=f"Checkpoint {batch} of operator '{UID}' is no longer retained"):
        hold(log, batch, history=history, **values)
    assert pins(log) == before


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_checkpoint_can_be_pinned_while_the_newest_entry_retains_it(log: ShortLog, is_shared: bool) -> None:
    history = log.query()
    give_up(log, 5)
    hold(log, history=history, is_shared=is_shared).release()
    refused(log, history, 4, is_shared=is_shared)


def test_without_a_pin_the_log_alone_tells_what_is_retained(log: ShortLog) -> None:
    needed = Footprint.of(log.query(), 5)
    assert is_retained(log.store, needed)
    hold(log, is_shared=True)
    give_up(log, 6)
    assert not is_retained(log.store, needed)


def test_a_checkpoint_that_was_replaced_or_set_back_cannot_be_pinned(log: ShortLog) -> None:
    history = log.query()
    log.run(6)
    refused(log, history, 6)
    refused(log, history, 7)
    assert hold(log, history=history).name in pins(log)


def test_changes_can_be_pinned_while_a_retained_checkpoint_needs_them(log: ShortLog) -> None:
    """Of older checkpoints too: for changes alone it does not matter whether theirs can be read."""
    history = log.query()
    give_up(log, 7)
    assert log.history().changes_from == 3
    hold(log, 5, history=history, since=3, purpose=Consumer(1000)).release()
    refused(log, history, 5, since=2, purpose=Consumer(1000))
    refused(log, history, 5, since=3)
    hold(log, 7, history=history, since=3).release()
    refused(log, history, 7, since=2)


def test_a_checkpoint_that_is_given_up_can_be_pinned_while_another_pin_of_it_stands(log: ShortLog) -> None:
    history = log.query()
    unshared, other = hold(log), hold(log, 6, is_shared=True)
    give_up(log, 8)
    refused(log, history)
    unshared.release()
    refused(log, history)
    assert hold(log, 6, history=history).name in pins(log)
    refused(log, history, 6, since=1)
    other.release()
    refused(log, history, 6)


def test_a_pin_that_may_expire_soon_vouches_for_none(log: ShortLog) -> None:
    history = log.query()
    hold(log, is_shared=True)
    give_up(log, 8)
    log.clock.advance(100 - MARGIN_S)
    hold(log, history=history).release()
    log.clock.advance(1)
    refused(log, history)


def test_a_pin_that_is_renewed_while_the_pins_are_read_counts() -> None:
    log = make_log()
    held = hold(log)
    [pin] = pins(log).values()
    log.clock.advance(51)
    seen = StandingPins(FaultStore(log.store, FaultPlan.at("read", action=held.keep)), log.clock)
    list_pins(log, seen)
    assert [*pins(log)] == [held.name]
    assert all(map(seen.need, pin.objects))


def test_only_a_pin_that_is_known_to_hold_has_no_end() -> None:
    """An abandoned request to write an earlier version may take effect after that version was removed."""
    log = make_log()
    written: list[Pin | None] = []

    class Recorded(StoreWrapper):
        def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
            is_new = super().put_if_absent(name, data)
            written.append(read_pin(self, name))
            return is_new

    hold(log, store=Recorded(log.store), is_shared=True, lasts_s=None)
    assert [(pin.holds, pin.lasts_s is None) for pin in written if pin is not None] == [(False, False), (True, True)]


# ---- Failures ----


def test_an_error_leaves_no_pin_that_keeps_objects() -> None:
    """Not even one whose writing failed after it took effect."""
    for when in ("before", "after"):
        for number in itertools.count(1):
            log = make_log()
            store = FaultStore(log.store, FaultPlan.at(call=number, when=when))
            try:
                held = hold(log, store=store, is_shared=True, lasts_s=None)
            except StorageError:
                assert pins(log) == {}
                continue
            assert held.name in pins(log)
            if store.calls < number:
                break
        assert number > 5


def test_a_damaged_log_is_named_and_leaves_no_pin(log: ShortLog) -> None:
    history = log.query()
    [name] = [name for name in log.store.objects if name.startswith("log/")]
    log.store.put(name, b"damaged" * 10)
    with pytest.raises(CorruptionError, match=name):
        hold(log, history=history)
    assert pins(log) == {}


def test_a_pin_that_cannot_be_removed_expires(log: ShortLog) -> None:
    hold(log, store=FaultStore(log.store, FaultPlan.at("delete"))).release()
    assert len(pins(log)) == 1


def test_a_pin_is_removed_at_the_end(log: ShortLog) -> None:
    held, other = hold(log), hold(log)
    held.release()
    assert list(pins(log)) == [other.name]


# ---- Time ----


def test_a_pin_is_made_anew_after_half_of_its_time(log: ShortLog) -> None:
    held = hold(log)
    first = held.name
    log.clock.advance(50)
    held.keep()
    assert held.name == first
    log.clock.advance(1)
    before = log.store.objects[first]
    held.keep()
    assert held.name != first
    assert list(pins(log)) == [held.name]
    assert log.store.objects[held.name] == (before[0], NOW_S + 51)
    log.clock.advance(50)
    second = held.name
    held.keep()
    assert held.name == second, "its time counts from when it was made anew"


def test_a_pin_that_is_made_anew_stands_before_the_former_one_goes(log: ShortLog) -> None:
    plan = FaultPlan.at("put_if_absent", call=2)
    held = hold(log, store=FaultStore(log.store, plan))
    log.clock.advance(51)
    with pytest.raises(StorageError):
        held.keep()
    assert list(pins(log)) == [held.name]
    held.keep()
    assert list(pins(log)) == [held.name]


def test_a_pin_that_does_not_expire_is_not_made_anew(log: ShortLog) -> None:
    held = hold(log, lasts_s=None)
    log.clock.advance(10**9)
    log.store.requests.clear()
    held.keep()
    assert log.store.requests == []


def test_a_maker_is_told_when_all_of_the_time_is_over(log: ShortLog) -> None:
    held = hold(log)
    log.clock.advance(100)
    held.keep()
    log.clock.advance(101)
    log.store.requests.clear()
    with pytest.raises(PinExpiredError, match=r"The pin of checkpoint 5 of operator 'op' lasted 100 s, .* for 101 s"):
        held.keep()
    assert log.store.requests == [], "another pin would keep objects for nothing"


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_pin_that_expires_while_it_is_made_anew_holds_nothing_for_sure(log: ShortLog, is_shared: bool) -> None:
    """Between the two pins nobody may have seen any."""
    slow = FaultPlan.at("put_if_absent", call=2, action=lambda: log.clock.advance(101))
    store = FaultStore(log.store, slow)
    if is_shared:
        with pytest.raises(PinExpiredError, match="lasted 100 s"):
            hold(log, store=store, is_shared=True)
        assert pins(log) == {}
        return
    held = hold(log, store=store)
    log.clock.advance(51)
    with pytest.raises(PinExpiredError, match="lasted 100 s"):
        held.keep()
    held.release()
    assert pins(log) == {}


def test_a_pin_lasts_from_before_it_was_written(log: ShortLog) -> None:
    """The store's time of it may be as early as that."""
    slow = FaultPlan.at("put_if_absent", action=lambda: log.clock.advance(60))
    held = hold(log, store=FaultStore(log.store, slow))
    log.clock.advance(41)
    with pytest.raises(PinExpiredError, match="for 101 s"):
        held.keep()
