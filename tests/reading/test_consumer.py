"""``ChangeConsumer``: the changes of every batch once, however fast the query forgets and whenever somebody stops."""

from __future__ import annotations

import itertools
import logging
import random
from functools import partial
from pathlib import Path

import pytest

import statelog
from statelog import ConfigurationError, StateMissingError
from statelog.history.pins import MARGIN_S
from statelog.reading.consumer import OWNER, Position
from statelog.reading.open import open_logged
from statelog.storage import LocalStore
from tests.reading.consumer_support import FORGETFUL, Feed, files, require_all, stopping
from tests.reading.pins_support import ReadOnly, Stop
from tests.reading.story import STATES, Story, random_commands


@pytest.mark.parametrize("seed", range(6))
def test_a_consumer_has_every_change_of_a_query_that_forgets_as_fast_as_it_can(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    inline = rng.choice([None, 0])
    query = Story(tmp_path, inline_budget_bytes=inline, parallelism=rng.choice([1, 3]), **FORGETFUL)
    query.run_batches(rng.randrange(1, 5), rng)
    feeds = [Feed(query.location, state, max(0, len(query.models) - 2)) for state in STATES]
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
                feed.step()
    for feed in feeds:
        feed.step_to_the_end()
        require_all(feed, query, before)


def test_only_certain_batches_are_delivered(tmp_path: Path) -> None:
    query = Story(tmp_path)
    query.run_batches(1, random.Random(1))
    feed = Feed(query.location)
    assert feed.step() == 0
    query.run_batches(1, random.Random(1))
    assert (feed.step(), feed.position.batch) == (1, 0)
    assert feed.step() == 0


def test_a_step_has_batches_of_one_parallelism(tmp_path: Path) -> None:
    query = Story(tmp_path, parallelism=3)
    query.run_batches(3, random.Random(1))
    query.start(5)
    query.run_batches(4, random.Random(1))
    feed = Feed(query.location)
    assert [feed.step(), feed.step(), feed.step()] == [3, 3, 0]
    require_all(feed, query)


def test_a_step_has_no_more_bytes_than_it_may_but_at_least_one_batch(tmp_path: Path) -> None:
    query = Story(tmp_path)
    query.run_batches(12, random.Random(1))
    sizes = [
        sum(segment.length for segment in checkpoint.segments)
        for checkpoint in open_logged(query.location, None, None).history.checkpoints
    ]
    feed = Feed(query.location)
    steps: list[int] = []
    while count := feed.step(max_bytes=sum(sizes[:3])):
        steps.append(count)
    assert steps[0] == 3
    assert sum(steps) == 11
    places = itertools.accumulate(steps, initial=0)
    assert all(sum(sizes[at : at + count]) <= sum(sizes[:3]) for at, count in zip(places, steps, strict=False))
    require_all(feed, query)
    slow = Feed(query.location)
    assert [slow.step(max_bytes=1) for _ in range(12)] == [1] * 11 + [0]


def test_a_new_consumer_begins_with_the_oldest_stored_changes(tmp_path: Path) -> None:
    query = Story(tmp_path, **FORGETFUL)
    query.run_batches(12, random.Random(1))
    feed = Feed(query.location, after=None)
    first = feed.position.batch + 1
    assert 1 < first < 12
    with pytest.raises(StateMissingError, match=rf"the changes of batch {first - 1} are gone"):
        Feed(query.location, after=first - 2)
    query.run_batches(6, random.Random(1))
    feed.step_to_the_end()
    require_all(feed, query, first - 1)


@pytest.mark.parametrize(("after", "words"), [(7, "has no batch 7 yet; its newest one is 1"), (-2, "after batch -2")])
def test_a_consumer_cannot_begin_after_a_batch_that_does_not_exist(after: int, words: str, tmp_path: Path) -> None:
    query = Story(tmp_path)
    query.run_batches(2, random.Random(1))
    with pytest.raises((StateMissingError, ConfigurationError), match=words):
        Feed(query.location, after=after)


def test_the_changes_of_a_consumer_that_has_stopped_stay_until_its_pin_expires(tmp_path: Path) -> None:
    query = Story(tmp_path, **FORGETFUL)
    query.run_batches(3, random.Random(1))
    feed = Feed(query.location, after=1, pin_s=100.0)
    query.run_batches(10, random.Random(1))
    query.start(2, keep_local=False)
    query.run_batches(10, random.Random(1))
    feed.restart()
    feed.step()
    feed.step_to_the_end()
    require_all(feed, query, 1)

    query.engine.clock.advance(2 * MARGIN_S + 100.0)
    kept = files(query)
    query.run_batches(10, random.Random(1))
    query.engine.clock.advance(2 * MARGIN_S + 100.0)
    query.run_batches(3, random.Random(1))
    assert files(query) < kept
    feed.restart()
    with pytest.raises(StateMissingError, match=rf"the changes of batch {feed.position.batch + 1} are gone"):
        feed.step()


def test_a_pin_whose_changes_are_gone_keeps_nothing(tmp_path: Path) -> None:
    """A reader may have listed it before the query, for which it has expired, deletes it and what it names."""
    query = Story(tmp_path, **FORGETFUL)
    query.run_batches(3, random.Random(1))
    feed = Feed(query.location, after=1, pin_s=100.0)
    [pin] = Path(query.location, "pins").iterdir()
    listed = pin.read_bytes()
    query.engine.clock.advance(2 * MARGIN_S + 100.0)
    query.run_batches(10, random.Random(1))
    query.engine.clock.advance(2 * MARGIN_S + 100.0)
    query.run_batches(3, random.Random(1))
    assert not pin.exists()
    pin.parent.mkdir(exist_ok=True)
    pin.write_bytes(listed)
    feed.restart()
    with pytest.raises(StateMissingError, match="the changes of batch 2 are gone"):
        feed.step()


def test_a_consumer_that_is_too_far_behind_loses_its_pin(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    query = Story(tmp_path, **FORGETFUL)
    query.run_batches(3, random.Random(1))
    feed = Feed(query.location, after=1, max_bytes=150_000)
    with caplog.at_level(logging.WARNING):
        query.run_batches(4, random.Random(1))
        assert not caplog.records
        feed.clock.advance(61)
        assert feed.step()
        query.run_batches(40, random.Random(1))
    assert len([one for one in caplog.records if "consumer-behind" in one.message]) == 1
    assert statelog.list_pins(query.location) == []
    with pytest.raises(StateMissingError, match="are gone"):
        feed.step()


def test_a_query_that_was_set_back_is_told_by_its_batch(tmp_path: Path) -> None:
    query = Story(tmp_path, retained_checkpoints=8)
    query.run_batches(6, random.Random(1))
    feed, behind = Feed(query.location), Feed(query.location, after=1)
    assert feed.step() == 5
    del query.models[3:]
    query.start()
    query.run_batches(1, random.Random(2))
    with pytest.raises(StateMissingError, match="batch 4 is no longer in the log.*set back"):
        feed.step()
    query.run_batches(4, random.Random(2))
    with pytest.raises(StateMissingError, match="batch 4 was replaced.*set back"):
        feed.step()
    behind.step_to_the_end()
    require_all(behind, query, 1)


def test_without_a_changelog_a_consumer_is_refused(tmp_path: Path) -> None:
    query = Story(tmp_path, changelog=False)
    query.run_batches(3, random.Random(1))
    feed = Feed(query.location, after=0)
    with pytest.raises(ConfigurationError, match=r"changes in batch 1: the batch ran with Tuning\(changelog=False\)"):
        feed.step()


def test_without_the_right_to_write_a_consumer_reads_while_the_changes_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    query = Story(tmp_path, **FORGETFUL)
    query.run_batches(3, random.Random(1))
    monkeypatch.setattr("statelog.reading.open.open_location", lambda location: ReadOnly(LocalStore(location)))
    feed = Feed(query.location, after=1)
    query.run_batches(1, random.Random(1))
    assert feed.step() == 1
    require_all(feed, query, 1)
    assert len([one for one in caplog.records if "cannot be kept" in one.message]) == 1
    query.run_batches(10, random.Random(1))
    with pytest.raises(StateMissingError, match="are gone"):
        feed.step()


def test_a_query_stopped_at_any_request_keeps_what_a_consumer_needs(tmp_path: Path) -> None:
    made = Story(tmp_path / "made", **FORGETFUL)
    made.run_batches(5, random.Random(1))
    delivered = 0
    for number in itertools.count(1, 5):
        feeds: list[Feed] = []
        stop = Stop(number, partial(begin, str(tmp_path / str(number) / "location"), feeds))
        query = made.copied(tmp_path / str(number), open_store=partial(stopping, stop))
        query.start(keep_local=False)
        query.run_batches(8, random.Random(2))
        for feed in feeds:
            before = feed.position.batch
            feed.step_to_the_end()
            require_all(feed, query, before)
            delivered += feed.position.batch - before
        if stop.requests < number:
            break
    assert delivered > 50


def begin(location: str, feeds: list[Feed]) -> None:
    feeds.append(Feed(location, after=None))


def test_a_consumer_stopped_at_any_request_has_every_change_or_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Story(tmp_path / "made", **FORGETFUL)
    made.run_batches(5, random.Random(1))
    told = delivered = 0
    for number in itertools.count(1, 2):
        query = made.copied(tmp_path / str(number))
        query.start()
        before = len(query.models) - 2
        stop = Stop(number, partial(query.run_batches, 6, random.Random(1)))
        monkeypatch.setattr("statelog.reading.open.open_location", partial(stopping, stop))
        try:
            feed = Feed(query.location, after=before)
            feed.step()
            query.run_batches(3, random.Random(1))
            feed.step_to_the_end()
        except StateMissingError:
            told += 1
        else:
            require_all(feed, query, before)
            delivered += 1
        if stop.requests < number:
            break
    assert delivered > told


def test_positions_are_compared_by_batch_token_and_id(tmp_path: Path) -> None:
    query = Story(tmp_path)
    query.run(0, random_commands(random.Random(1), 5))
    query.run(1, random_commands(random.Random(2), 5))
    feed = Feed(query.location)
    name = feed.position.consumer
    assert feed.position == Position(-1, "", "", name)
    feed.step()
    first = query.query().at(0)
    assert first is not None
    assert feed.position == Position(0, first.token.hex(), first.id.hex(), name)
    assert Feed(query.location).position.consumer != name


def test_a_consumer_has_one_pin_whatever_it_goes_through(tmp_path: Path) -> None:
    query = Story(tmp_path, **FORGETFUL)
    query.run_batches(3, random.Random(1))
    feed, other = Feed(query.location), Feed(query.location)
    for turn in range(4):
        query.run_batches(2, random.Random(turn))
        feed.clock.advance(61)
        if turn % 2:
            feed.restart()
        feed.step()
    owners = {f"{OWNER} {each.position.consumer}" for each in (feed, other)}
    pins = [pin for pin in statelog.list_pins(query.location) if pin.owner.startswith(OWNER)]
    assert {pin.owner for pin in pins} == owners
    assert len(pins) == 2


def test_a_step_ends_at_a_batch(tmp_path: Path) -> None:
    query = Story(tmp_path)
    query.run_batches(6, random.Random(1))
    feed = Feed(query.location)
    assert feed.consumer.newest(feed.position, 2).batch == 2
    assert feed.consumer.newest(feed.position, 9).batch == 4
    assert feed.consumer.newest(feed.position, -1) == feed.position
    assert feed.consumer.newest(None).batch == 4


def test_the_last_batch_is_certain_once_spark_has_committed_it(tmp_path: Path) -> None:
    query = Story(tmp_path)
    query.run_batches(3, random.Random(1))
    checkpoints = Path(query.location)
    with pytest.raises(ConfigurationError, match="no Spark offsets"):
        Feed(query.location, takes_last=True)
    for name in ("offsets", "commits"):
        (checkpoints / name).mkdir()
    (checkpoints / "offsets" / "2").write_text("")
    (checkpoints / "commits" / "1").write_text("")
    feed = Feed(query.location, takes_last=True)
    feed.step_to_the_end()
    assert feed.position.batch == 1
    (checkpoints / "commits" / "2").write_text("")
    feed.step_to_the_end()
    assert feed.position.batch == 2
    require_all(feed, query)
