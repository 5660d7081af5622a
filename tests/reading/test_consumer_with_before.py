"""``ChangeConsumer`` with what was before: right over restarts, other parallelisms and a query that forgets fast."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import statelog
from statelog import PinExpiredError, StateMissingError
from statelog.clock import SystemClock
from statelog.coordinator.standing_pins import StandingPins
from statelog.history.footprint import Footprint
from statelog.history.pins import MARGIN_S, Consumer, HeldPin, PinnedBase
from statelog.history.query_history import QueryHistory
from statelog.reading import before as former
from statelog.storage import LocalStore
from tests.reading.changes_with_before_support import require_before
from tests.reading.consumer_support import FORGETFUL, Feed, files, require_all, stopping
from tests.reading.pins_support import ReadOnly, Stop
from tests.reading.story import KEYS, STATES, Story


@pytest.mark.parametrize("seed", range(5))
def test_a_consumer_knows_what_was_before_every_change(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(former, "GROUP_BYTES", rng.choice([1, 3000, 1 << 20]))
    monkeypatch.setattr(former, "FOUND_BYTES", rng.choice([400, 1 << 20]))
    query = Story(
        tmp_path,
        inline_budget_bytes=rng.choice([None, 0]),
        parallelism=rng.choice([1, 3]),
        keys=KEYS[: rng.choice([4, 12, 60])],
        **FORGETFUL,
    )
    query.run_batches(rng.randrange(1, 5), rng)
    feeds = [Feed(query.location, state, max(0, len(query.models) - 2), with_before=True) for state in STATES]
    before = feeds[0].position.batch
    for _ in range(8):
        query.run_batches(rng.randrange(1, 9), rng)
        if rng.random() < 0.4:
            query.start(rng.choice([1, 2, 4]), keep_local=rng.random() < 0.5)
        for feed in feeds:
            if rng.random() < 0.3:
                feed.restart()
            if rng.random() < 0.5:
                feed.clock.advance(61)  # its pin is made anew
            if rng.random() < 0.7:
                feed.step(max_bytes=rng.choice([None, 1, 20_000]))
    for feed in feeds:
        feed.step_to_the_end()
        require_all(feed, query, before)
        require_before(query, feed.rows, feed.state)


def test_a_consumer_begins_where_what_was_before_is_known(tmp_path: Path) -> None:
    query = Story(tmp_path, **FORGETFUL)
    query.run_batches(1, random.Random(1))
    feed = Feed(query.location, after=None, with_before=True)
    assert feed.position.batch == -1
    query.run_batches(12, random.Random(1))
    assert Feed(query.location, after=None, with_before=True).position.batch == 11
    plain = Feed(query.location, after=None).position.batch
    assert plain < 11
    with pytest.raises(StateMissingError, match=f"the changes of batch {plain + 2} are gone"):
        Feed(query.location, after=plain + 1, with_before=True)
    feed.step_to_the_end()
    require_all(feed, query)
    require_before(query, feed.rows, "value")


def test_the_state_stays_with_the_changes_until_the_pin_expires(tmp_path: Path) -> None:
    query = Story(tmp_path, **FORGETFUL)
    query.run_batches(6, random.Random(1))
    feed = Feed(query.location, "map", after=4, pin_s=100.0, with_before=True)
    for _ in range(3):
        query.run_batches(6, random.Random(2))
        query.start(2, keep_local=False)
        feed.restart()
        assert feed.step(max_bytes=1) == 1
    assert len(statelog.list_pins(query.location)) == 1
    feed.step_to_the_end()
    require_before(query, feed.rows, "map")
    kept = files(query)
    query.engine.clock.advance(2 * MARGIN_S + 100.0)
    query.run_batches(10, random.Random(3))
    assert files(query) < kept
    feed.restart()
    with pytest.raises(StateMissingError, match=f"the changes of batch {feed.position.batch + 1} are gone"):
        feed.step()


def test_a_consumer_of_another_name_goes_on_with_the_state_that_is_pinned(tmp_path: Path) -> None:
    """Spark 4.1 asks for the newest position before it tells the source where it was."""
    query = Story(tmp_path, **FORGETFUL)
    query.run_batches(3, random.Random(1))
    feed = Feed(query.location, "map", after=1, with_before=True)
    query.run_batches(4, random.Random(1))
    feed.step(max_bytes=1)
    feed.position = replace(feed.position, consumer="another")
    query.run_batches(10, random.Random(1))
    feed.restart()
    feed.step_to_the_end()
    require_all(feed, query, 1)
    require_before(query, feed.rows, "map")


def test_a_state_from_before_the_query_was_set_back_is_not_used(tmp_path: Path) -> None:
    query = Story(tmp_path, **{**FORGETFUL, "retained_checkpoints": 8})
    query.run_batches(6, random.Random(1))
    Feed(query.location, "map", after=4, with_before=True)
    [old] = statelog.list_pins(query.location)
    del query.models[3:]
    query.start()
    query.run_batches(6, random.Random(2))
    feed = Feed(query.location, "map", after=7, with_before=True)
    query.run_batches(10, random.Random(3))
    assert old.is_on_line
    old = replace(old, is_on_line=False)
    [own] = [pin for pin in statelog.list_pins(query.location) if pin != old]
    statelog.unpin(query.location, own.name)
    assert statelog.list_pins(query.location) == [old]
    feed.restart()
    with pytest.raises(StateMissingError, match="the changes of batch 8 are gone"):
        feed.step()


def pin_state(query: Story, known: QueryHistory, batch: int) -> None:
    """Pin the state after a batch and the changes since, as a consumer does that read the log before."""
    history = known.histories[query.identity]
    record, latest = history.record(batch), history.latest
    assert record is not None
    assert record.base_map is not None
    assert latest is not None
    base = PinnedBase(batch, record.checkpoint.token, record.needed_from, list(record.base_map.ranges))
    HeldPin(
        LocalStore(query.location),
        Footprint.of_changes(history, latest.batch, since=base.since, base_ranges=base.ranges),
        Consumer(1 << 30, base.batch, base.token),
        owner="test",
        lasts_s=600.0,
    )


def test_a_state_that_is_not_retained_is_not_pinned_though_its_changes_are_there(tmp_path: Path) -> None:
    query = Story(tmp_path, **FORGETFUL)
    query.run_batches(5, random.Random(1))
    query.engine.options = replace(
        query.engine.options,
        materialization_interval_s=1e9,
        tuning=replace(query.engine.options.tuning, max_log_to_base=1e9),
    )
    query.start()
    query.run_batches(3, random.Random(1))
    known = query.query()
    pin_state(query, known, 7)
    query.run_batches(4, random.Random(1))
    identity = query.identity
    assert query.query().histories[identity].changes_from <= known.histories[identity].changes_from
    with pytest.raises(PinExpiredError, match="no longer retained"):
        pin_state(query, known, 7)


def test_a_pin_of_another_state_does_not_vouch_for_one(tmp_path: Path) -> None:
    query = Story(tmp_path, **FORGETFUL)
    query.run_batches(5, random.Random(1))
    Feed(query.location, after=3, with_before=True)  # its pin keeps all changes
    query.run_batches(5, random.Random(1))
    known = query.query()
    query.run_batches(5, random.Random(1))
    with pytest.raises(PinExpiredError, match="no longer retained"):
        pin_state(query, known, 9)


def test_a_state_from_before_the_one_that_is_kept_is_missed(tmp_path: Path) -> None:
    query = Story(tmp_path)
    query.run_batches(6, random.Random(1))
    feed = Feed(query.location, after=1, with_before=True)
    start = feed.position
    feed.step(max_bytes=1)
    feed.clock.advance(61)
    feed.step(max_bytes=1)
    with pytest.raises(StateMissingError, match="the changes of batch 2 are gone"):
        feed.consumer.states(start, 3)


def test_only_unread_changes_count_against_the_limit(tmp_path: Path) -> None:
    query = Story(tmp_path, retained_checkpoints=2, materialization_interval_s=1e9, max_log_to_base=1e9)
    query.run_batches(30, random.Random(1))

    def over() -> list[str]:
        return StandingPins(LocalStore(query.location), SystemClock()).look(query.query())

    Feed(query.location, after=28, max_bytes=100_000, with_before=True)
    query.run_batches(2, random.Random(1))
    [pin] = statelog.list_pins(query.location)
    assert pin.state_bytes > 200_000, "all changes belong to the state"
    assert over() == []
    query.run_batches(20, random.Random(1))
    assert over() == [pin.name]


def test_without_the_right_to_write_a_consumer_reads_while_the_state_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Story(tmp_path, **FORGETFUL)
    query.run_batches(4, random.Random(1))
    monkeypatch.setattr("statelog.reading.open.open_location", lambda location: ReadOnly(LocalStore(location)))
    feed = Feed(query.location, after=2, with_before=True)
    query.run_batches(1, random.Random(1))
    assert feed.step() == 1
    require_before(query, feed.rows, "value")
    query.run_batches(10, random.Random(1))
    with pytest.raises(StateMissingError, match="are gone"):
        feed.step()


def test_a_query_stopped_at_any_request_keeps_what_a_consumer_needs(tmp_path: Path) -> None:
    made = Story(tmp_path / "made", **FORGETFUL)
    made.run_batches(5, random.Random(1))
    delivered = 0
    for number in itertools.count(1, 11):
        feeds: list[Feed] = []
        begin = partial(Feed, str(tmp_path / str(number) / "location"), "map", after=None, with_before=True)
        stop = Stop(number, lambda begin=begin, feeds=feeds: feeds.append(begin()))  # type: ignore[misc]  # a lambda with a default has no inferred type
        query = made.copied(tmp_path / str(number), open_store=partial(stopping, stop))
        query.start(keep_local=False)
        query.run_batches(8, random.Random(2))
        for feed in feeds:
            before = feed.position.batch
            feed.step_to_the_end()
            require_all(feed, query, before)
            require_before(query, feed.rows, "map")
            delivered += feed.position.batch - before
        if stop.requests < number:
            break
    assert delivered > 30


def test_a_consumer_stopped_at_any_request_is_right_or_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Story(tmp_path / "made", **FORGETFUL)
    made.run_batches(5, random.Random(1))
    told = delivered = 0
    for number in itertools.count(1, 7):
        query = made.copied(tmp_path / str(number))
        query.start()
        stop = Stop(number, partial(query.run_batches, 6, random.Random(1)))
        monkeypatch.setattr("statelog.reading.open.open_location", partial(stopping, stop))
        try:
            feed = Feed(query.location, "map", after=len(query.models) - 2, with_before=True)
            feed.step(max_bytes=1)
            feed.clock.advance(61)
            query.run_batches(3, random.Random(1))
            feed.step_to_the_end()
        except StateMissingError:
            told += 1
        else:
            require_before(query, feed.rows, "map")
            delivered += 1
        if stop.requests < number:
            break
    assert delivered > told
