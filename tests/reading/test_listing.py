"""The lists of operators, states, checkpoints and pins, and pins made by hand."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import statelog
from statelog import ConfigurationError, Options, PinInfo, StateMissingError, Tuning
from statelog.coordinator.batch import BatchTime
from statelog.storage import LocalStore
from statelog.testing.query import ManualClock
from tests.model.engine import Command, Key, command_query, command_rows
from tests.query_runner import QueryRunner
from tests.reading.story import KEYS, Story, hash_of, rows, value_rows

RETAINED = 3
START_MS = 1_000_000


@pytest.fixture
def query(tmp_path: Path) -> Story:
    """A query with a batch per second of Spark's time, which retains and merges as little as it can."""
    made = Story(
        tmp_path / "query",
        retained_checkpoints=RETAINED,
        materialization_interval_s=0.0,
        max_log_to_base=0.0,
        max_file_bytes=1,
        log_min_age_s=0.0,
    )
    made.engine.times |= {batch: BatchTime(START_MS + 1000 * batch, 0) for batch in made.engine.times}
    made.run_batches(6, random.Random(1))
    return made


def time_of(batch: float) -> datetime:
    return datetime.fromtimestamp(START_MS / 1000 + batch, UTC)


def read(query: Story, at: Any = None) -> list[tuple[Any, ...]]:
    return rows(statelog.read_state(query.location, state="value", at=at).read_all())


def test_operators_and_states_are_listed_with_their_columns(query: Story) -> None:
    [operator] = statelog.list_operators(query.location)
    assert (operator.uid, operator.parallelism, operator.batch) == ("op", 3, 5)
    assert operator.key == "a int64, b string"
    states = {state.state: state for state in statelog.list_states(query.location)}
    assert tuple(states) == operator.states
    for name, state in states.items():
        schema = statelog.read_state(query.location, state=name).schema
        assert state.columns == tuple(f"{field.name} {field.type}" for field in schema)
    assert states["value"].kind == "value"


def test_a_pinned_checkpoint_is_listed_and_read_until_its_pin_is_removed(query: Story) -> None:
    made = statelog.pin(query.location, at=3, lasts_s=None, owner="audit")
    assert (made.batch, made.owner, made.expires_ms) == (3, "audit", None)
    query.run_batches(20, random.Random(2))
    assert statelog.list_pins(query.location) == [made]
    infos = statelog.list_checkpoints(query.location)
    assert [(info.batch, info.kept_by) for info in infos] == [
        (3, ("audit",)),
        *((batch, ("retained_checkpoints",)) for batch in (23, 24, 25)),
    ]
    assert read(query, 3) == value_rows(query.models[3])

    before = {info.name: info.size_bytes for info in LocalStore(query.location).list()}
    statelog.unpin(query.location, made.name)
    query.run_batches(1, random.Random(3))
    left = {info.name for info in LocalStore(query.location).list()}
    gone = sum(size for name, size in before.items() if name not in left and name != made.name)
    # The batch after it gives checkpoint 23 up as well.
    assert gone == infos[0].own_bytes + infos[1].own_bytes > 0
    with pytest.raises(StateMissingError):
        read(query, 3)


def test_a_checkpoint_that_is_retained_and_pinned_is_listed_once(query: Story) -> None:
    statelog.pin(query.location, at=5, lasts_s=1000, owner="audit")
    info = statelog.list_checkpoints(query.location)[-1]
    assert (info.batch, info.kept_by, info.kept_until_ms) == (5, ("retained_checkpoints", "audit"), None)
    query.run_batches(5, random.Random(2))
    info = statelog.list_checkpoints(query.location)[0]
    assert (info.batch, info.kept_by) == (5, ("audit",))
    assert info.kept_until_ms is not None
    assert 900 < info.kept_until_ms / 1000 - time.time() < 1010


@pytest.mark.parametrize(("seconds", "batch"), [(3.0, 3), (3.7, 3), (5.0, 5), (99.0, 5)])
def test_a_time_means_the_newest_checkpoint_that_is_not_later(query: Story, seconds: float, batch: int) -> None:
    assert read(query, time_of(seconds)) == value_rows(query.models[batch])
    local = time_of(seconds).astimezone(None).replace(tzinfo=None).astimezone()
    assert read(query, local) == value_rows(query.models[batch])


def test_a_time_finds_pinned_checkpoints(query: Story) -> None:
    statelog.pin(query.location, at=4, lasts_s=None, owner="audit")
    query.run_batches(6, random.Random(2))
    assert read(query, time_of(7)) == value_rows(query.models[4])


def test_a_time_before_all_checkpoints_or_without_a_zone_is_refused(query: Story) -> None:
    with pytest.raises(StateMissingError, match=r"the oldest one is of 1970-01-01T00:16:43.000\+00:00"):
        read(query, time_of(3) - timedelta(milliseconds=1))
    with pytest.raises(ConfigurationError, match="no time zone"):
        read(query, time_of(3).replace(tzinfo=None))


@pytest.mark.parametrize("lasts_s", [0, -1, float("inf"), float("nan")])
def test_a_pin_of_no_length_is_refused(query: Story, lasts_s: float) -> None:
    with pytest.raises(ConfigurationError, match="a finite number of seconds, more than 0"):
        statelog.pin(query.location, lasts_s=lasts_s, owner="audit")
    assert statelog.list_pins(query.location) == []


def test_a_pin_that_is_not_there_is_named(query: Story) -> None:
    made: PinInfo = statelog.pin(query.location, lasts_s=None, owner="audit")
    statelog.unpin(query.location, made.name)
    for name in (made.name, "log/00000000000000000001.log", "../other"):
        with pytest.raises(ConfigurationError, match="has no pin"):
            statelog.unpin(query.location, name)


def test_a_pin_of_a_checkpoint_that_is_gone_is_refused(query: Story) -> None:
    with pytest.raises(StateMissingError, match="it retains 3 to 5"):
        statelog.pin(query.location, at=1, lasts_s=None, owner="audit")
    with pytest.raises(ConfigurationError, match="holds no state"):
        statelog.list_checkpoints(Path(query.location) / "nowhere")


# ---- Several operators ----


def value_of(uid: str, batch: int) -> int:
    """The value of each key of an operator after a batch."""
    return batch if uid == "a" else 1000 + batch


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Callable[[int], None]]:
    """Runs batches of a query of two operators, which retains as little as it can."""
    options = Options(
        retained_checkpoints=RETAINED,
        materialization_interval_s=0.0,
        inline_budget_bytes=0,
        tuning=Tuning(max_log_to_base=0.0, max_file_bytes=1, log_min_age_s=0.0),
    )
    runner = QueryRunner(tmp_path, options)
    runner.clock = ManualClock(time.time())
    queries = {uid: command_query(uid, hash_of, options) for uid in ("a", "b")}
    runner.start([query.operator for query in queries.values()], 2, 0)
    batches = itertools.count()

    def run(count: int) -> None:
        for batch in itertools.islice(batches, count):
            for uid, query in queries.items():
                commands: list[tuple[Key, Command]] = [(key, ("set", value_of(uid, batch))) for key in KEYS]
                runner.run_operator(uid, batch, command_rows(query, commands))

    yield run
    runner.stop()


def test_a_pin_keeps_all_operators_or_one(two: Callable[[int], None], tmp_path: Path) -> None:
    place = str(tmp_path / "location")

    def pin(uid: str | None, at: int | str | None) -> PinInfo:
        return statelog.pin(place, uid, at=at, lasts_s=None, owner="audit")

    two(3)
    both, own = pin(None, 1), pin("a", 2)
    assert (both.uids, own.uids) == (("a", "b"), ("a",))
    two(10)
    listed = [(info.uid, info.batch) for info in statelog.list_checkpoints(place)]
    assert listed == [*(("a", batch) for batch in (1, 2, 10, 11, 12)), *(("b", batch) for batch in (1, 10, 11, 12))]
    assert statelog.list_checkpoints(place, "b") == statelog.list_checkpoints(place)[5:]
    assert statelog.list_pins(place) == [both, own]
    assert statelog.list_pins(place, "b") == [both]
    again, of_b, of_a = pin(None, 1), pin("b", 1), pin("a", own.name)
    assert (again.uids, of_b.uids, of_a.uids) == (("a", "b"), ("b",), ("a",))
    assert again.state_bytes == both.state_bytes == pin("a", 1).state_bytes + of_b.state_bytes
    assert pin(None, own.name).uids == ("a",), "what another pin keeps"
    with pytest.raises(StateMissingError, match="The query at .* has no checkpoint 2"):
        pin(None, 2)
    with pytest.raises(StateMissingError, match="has no checkpoint 2"):
        pin("b", 2)
    with pytest.raises(ConfigurationError, match="several operators: 'a', 'b'"):
        statelog.read_state(place, state="value")
    for uid, batch in listed:
        values = statelog.read_state(place, uid, "value", at=batch).read_all().column("value_field").to_pylist()
        assert set(values) == {value_of(uid, batch)}


def test_numbers_of_several_operators(two: Callable[[int], None], tmp_path: Path) -> None:
    place = tmp_path / "location"
    two(8)
    statelog.pin(place, "a", at=6, lasts_s=None, owner="audit")
    two(6)
    a, b = statelog.stats(place)
    assert ([a.uid, b.uid], [a.pins, b.pins], [a.batch, b.batch]) == (["a", "b"], [1, 0], [13, 13])
    sizes = {path.relative_to(place).parts[0]: 0 for path in place.rglob("*") if path.is_file()}
    for path in place.rglob("*"):
        if path.is_file():
            sizes[path.relative_to(place).parts[0]] += path.stat().st_size
    shared = sizes.pop("log") + sizes.pop("pins")
    assert [a.stored_bytes, b.stored_bytes] == [shared + sizes[name] for name in sorted(sizes)]
    assert a.pinned_bytes > b.pinned_bytes == 0
    done = statelog.verify(place)
    assert (done.operators, done.checkpoints, done.damages, done.whole) == (2, 7, (), {"a": 13, "b": 13})
    [of_b] = [name for name in sizes if name.startswith("b-")]
    for path in (place / of_b).rglob("*.run"):
        path.write_bytes(bytes(path.stat().st_size))
    done = statelog.verify(place)
    assert {damage.uid for damage in done.damages} == {"b"}
    assert done.whole == {"a": 13, "b": None}
    assert statelog.verify(place, "a").damages == ()
