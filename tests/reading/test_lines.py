"""Readers of a query that went back: they see the line that counts, and what was taken back by its pin's name only."""

from __future__ import annotations

import itertools
import random
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import statelog
from statelog import ConfigurationError, CorruptionError, Options, StateMissingError
from statelog.coordinator.batch import BatchTime
from statelog.history.pins import read_pin, standing_pins
from statelog.queries.load import RestoreTarget, restore_operators
from statelog.reading.checkpoints import StoredQuery
from statelog.reading.rows import one_by_one
from statelog.storage import LocalStore
from tests.model.engine import Model, command_query, command_rows
from tests.options import changed_options
from tests.query_runner import QueryRunner
from tests.reading.changes_support import Rows, replayed
from tests.reading.changes_with_before_support import require_before
from tests.reading.consumer_support import FORGETFUL, Feed, require_all
from tests.reading.saved import save
from tests.reading.story import KEYS, STATES, Story, hash_of, value_rows
from tests.stored_query import StoredQuery as StoredQueryFiles

BACK_TO = 5
PINNED = (3, 7, 9)
"""The checkpoints that are pinned before the query goes back: one that counts afterwards, and two that do not."""
KEEP: dict[str, Any] = {
    "retained_checkpoints": 100,
    "materialization_interval_s": 1e9,
    "max_log_to_base": 1e9,
    "max_file_bytes": 1,
    "log_min_age_s": 0.0,
}
"""Options of a query that gives up nothing."""


def rewind(query: Story) -> None:
    query.go_back(BACK_TO)


def repeat(query: Story) -> None:
    """Have a start begin with an earlier batch, as if Spark's checkpoint was an older one."""
    del query.models[BACK_TO + 1 :]
    query.start()


class Past:
    """A query that went back to a checkpoint, and the states and pins of the line that it left."""

    def __init__(
        self, directory: Path, go_back: Callable[[Story], None], batches: int, *, forgets: bool, has_points: bool = True
    ) -> None:
        self.query = Story(directory, parallelism=2, retained_s={4.0: 1e6} if has_points else {}, **KEEP)
        times = {batch: BatchTime(1000 * batch, 0) for batch in self.query.engine.times}
        self.query.engine.times |= times
        self.query.run_batches(11, random.Random(1))
        self.pins = {
            batch: statelog.pin(self.location, at=batch, lasts_s=None, owner=f"audit {batch}") for batch in PINNED
        }
        self.models = list(self.query.models)
        if forgets:
            self.query.engine.options = replace(
                self.query.engine.options,
                retained_checkpoints=2,
                materialization_interval_s=0.0,
                tuning=replace(self.query.engine.options.tuning, max_log_to_base=0.0),
            )
        go_back(self.query)
        self.query.run_batches(batches, random.Random(2))

    @property
    def location(self) -> str:
        return self.query.location

    @property
    def now(self) -> list[Model]:
        """The states of the line that counts."""
        return self.query.models


def time_of(batch: float) -> datetime:
    return datetime.fromtimestamp(batch, UTC)


@pytest.fixture(scope="module", params=["rewound", "repeated", "long ago"])
def past(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Past:
    """A query just after it went back, and one whose log has long forgotten that."""
    directory = tmp_path_factory.mktemp("past") / "query"
    if request.param == "long ago":
        return Past(directory, rewind, 30, forgets=True)
    return Past(directory, rewind if request.param == "rewound" else repeat, 3, forgets=False)


def read(location: str, state: str, at: Any, **arguments: Any) -> list[tuple[Any, ...]]:
    rows = statelog.read_state(location, state=state, at=at, **arguments).read_all()
    return sorted(zip(*rows.to_pydict().values(), strict=True), key=repr)


# ---- Which checkpoint ----


def test_the_log_begins_after_the_checkpoint_that_the_query_went_back_to(tmp_path: Path) -> None:
    """Otherwise the tests below would show little."""
    past = Past(tmp_path / "query", rewind, 30, forgets=True)
    history = past.query.query()
    assert history.entries[0].batch > max(PINNED)
    assert BACK_TO in [cut.batch for cut in history.cuts]


@pytest.mark.parametrize("state", STATES)
def test_a_batch_is_the_one_of_the_line_that_counts(past: Past, state: str) -> None:
    told = 0
    for batch in range(len(past.now)):
        try:
            found = read(past.location, state, batch)
        except StateMissingError:
            continue
        assert found == STATES[state](past.now[batch])
        told += 1
    assert told >= 3


@pytest.mark.parametrize("state", STATES)
def test_a_time_is_that_of_the_line_that_counts(past: Past, state: str) -> None:
    readable = {info.batch for info in statelog.list_checkpoints(past.location) if info.is_on_line}
    for batch in range(len(past.now)):
        expected = max(one for one in readable if one <= batch)
        assert read(past.location, state, time_of(batch + 0.5)) == STATES[state](past.now[expected])
    assert {0, 3, 4} <= readable


@pytest.mark.parametrize("state", STATES)
def test_what_was_taken_back_is_read_by_the_name_of_its_pin(past: Past, state: str) -> None:
    for batch, pin in past.pins.items():
        assert read(past.location, state, pin.name) == STATES[state](past.models[batch])
        with statelog.open_state(past.location, at=pin.name) as reader:
            assert reader.batch == batch
            key = next(iter(past.models[batch].keys))
            found = reader.read("value", keys=[key]).read_all().to_pylist()
            assert [row["value_field"] for row in found] == [
                row[-1] for row in value_rows(past.models[batch]) if row[:2] == key
            ]
    [same] = [one for one in statelog.compare(past.location, past.location, at=past.pins[3].name) if one.state == state]
    assert same.is_equal
    other = statelog.compare(past.location, past.location, at=past.pins[7].name, other_at=past.pins[9].name)
    assert not all(one.is_equal for one in other)


def test_a_pin_that_is_not_there_is_told(past: Past) -> None:
    with pytest.raises(StateMissingError, match="has no pin"):
        read(past.location, "value", "pins/none.json")
    with pytest.raises(ConfigurationError, match="nor the name of a pin"):
        read(past.location, "value", "log/00000000000000000001.log")
    with pytest.raises(ConfigurationError, match="keeps 'op'"):
        statelog.read_state(past.location, "other", "value", at=past.pins[3].name)


def test_lists_tell_what_was_taken_back(past: Past) -> None:
    listed = statelog.list_checkpoints(past.location)
    off_line = {info.batch: info for info in listed if not info.is_on_line}
    assert off_line.keys() == {7, 8, 9}, "8 is one of those that stay for a while"
    assert {batch: info.kept_by for batch, info in off_line.items()} == {
        7: ("audit 7",),
        8: ("retained_s",),
        9: ("audit 9",),
    }
    on_line = Counter(info.batch for info in listed if info.is_on_line)
    assert set(on_line.values()) == {1}
    assert on_line.keys() >= {0, 3, 4, len(past.now) - 1}
    assert {
        pin.owner: pin.is_on_line for pin in statelog.list_pins(past.location) if pin.owner.startswith("audit")
    } == {
        "audit 3": True,
        "audit 7": False,
        "audit 9": False,
    }


def test_points_in_time_are_kept_anew_after_the_query_went_back(tmp_path: Path) -> None:
    past = Past(tmp_path / "query", rewind, 30, forgets=True)
    points = [info for info in statelog.list_checkpoints(past.location) if "retained_s" in info.kept_by]
    assert [(info.batch, info.is_on_line) for info in points if info.batch <= 12] == [
        (0, True),
        (4, True),
        (8, False),
        (8, True),
        (12, True),
    ]
    assert read(past.location, "map", 8) == STATES["map"](past.now[8])


# ---- Pins by hand ----


@pytest.mark.parametrize("uid", [None, "op"])
def test_a_pin_at_a_batch_or_a_time_keeps_a_checkpoint_of_the_line(past: Past, uid: str | None) -> None:
    readable = {info.batch for info in statelog.list_checkpoints(past.location) if info.is_on_line}
    ats: list[Any] = [3, time_of(3.5), time_of(7.5), time_of(9.5), None, past.pins[3].name]
    for at in ats:
        made = statelog.pin(past.location, uid, at=at, lasts_s=None, owner="test")
        try:
            if isinstance(at, datetime):
                assert made.batch == max(batch for batch in readable if batch <= at.timestamp())
            assert made.is_on_line
            assert made.uids == ("op",)
            assert read(past.location, "map", made.name) == STATES["map"](past.now[made.batch])
        finally:
            statelog.unpin(past.location, made.name)
    if 7 not in readable:
        with pytest.raises(StateMissingError, match="has no checkpoint 7"):
            statelog.pin(past.location, uid, at=7, lasts_s=None, owner="test")


@pytest.mark.parametrize("uid", [None, "op"])
def test_what_was_taken_back_stays_by_a_pin_of_its_pin(tmp_path: Path, uid: str | None) -> None:
    past = Past(tmp_path / "query", rewind, 3, forgets=True)
    another = statelog.pin(past.location, uid, at=past.pins[7].name, lasts_s=None, owner="another")
    assert (another.batch, another.is_on_line, another.uids) == (7, False, ("op",))
    statelog.unpin(past.location, past.pins[7].name)
    past.query.run_batches(10, random.Random(3))
    assert read(past.location, "list", another.name) == STATES["list"](past.models[7])
    statelog.unpin(past.location, another.name)
    past.query.run_batches(2, random.Random(3))
    with pytest.raises(StateMissingError, match="has no pin"):
        read(past.location, "list", another.name)
    names = {info.name for info in LocalStore(past.location).list()}
    assert not [name for name in names if "/changes/1/" in name or "/runs/1/" in name]


# ---- Differences, changes and histories ----


def expected_difference(before: Model, after: Model, state: str) -> dict[Any, Any]:
    old = {row[:-1]: row[-1] for row in STATES[state](before)}
    new = {row[:-1]: row[-1] for row in STATES[state](after)}
    return {entry: (old.get(entry), new.get(entry)) for entry in old | new if old.get(entry) != new.get(entry)}


def require_difference(past: Past, state: str, sides: dict[Any, Model], before: Any, after: Any) -> None:
    """Compare the difference between two checkpoints with that of their states."""
    names = ["key_a", "key_b", *(["mapkey_field"] if state == "map" else [])]
    rows = statelog.read_diff(past.location, before, after, state=state).read_all().to_pylist()
    found = {tuple(row[name] for name in names): (row["before_field"], row["value_field"]) for row in rows}
    assert found == expected_difference(sides[before], sides[after], state), (before, after)
    assert len(found) == len(rows)


@pytest.mark.parametrize("state", ["value", "map"])
def test_a_difference_of_two_lines_is_that_of_their_states(past: Past, state: str) -> None:
    last = len(past.now) - 1
    named = {pin.name: past.models[batch] for batch, pin in past.pins.items()}
    kept = {batch: past.now[batch] for batch in (3, last - 1, last)}
    sides: dict[Any, Model] = named | kept
    for before, after in itertools.permutations(sides, 2):
        require_difference(past, state, sides, before, after)


@pytest.mark.parametrize(("batch", "batches"), [(7, 5), (9, 7)])
def test_a_log_that_begins_behind_what_was_taken_back_does_not_lead_from_it(
    tmp_path: Path, batch: int, batches: int
) -> None:
    """All changes after the batch are there, but they follow another checkpoint of it than the pinned one."""
    past = Past(tmp_path / "query", rewind, batches, forgets=True)
    [history] = past.query.query().histories.values()
    assert history.changes_from == history.first_batch == batch + 1
    pinned, last = past.pins[batch].name, len(past.now) - 1
    sides: dict[Any, Model] = {pinned: past.models[batch], last: past.now[last]}
    for state in ("value", "map"):
        for before, after in ((pinned, last), (last, pinned)):
            require_difference(past, state, sides, before, after)


@pytest.mark.parametrize("state", STATES)
def test_changes_are_those_of_the_line(past: Past, state: str) -> None:
    for with_before in (False, True):
        rows = statelog.read_changes(past.location, state=state, with_before=with_before).read_all().to_pylist()
        first = rows[0]["batch"]
        known = STATES[state](past.now[first - 1]) if first else []
        assert replayed(known, rows, state) == STATES[state](past.now[-1])
        if with_before:
            require_before(past.query, rows, state)


@pytest.mark.parametrize("batch", [7, 9])
def test_the_state_before_changes_is_not_one_that_was_taken_back(tmp_path: Path, batch: int) -> None:
    """The changes after a batch are stored, its checkpoint is given up, and a pin keeps another one of the batch."""
    past = Past(tmp_path / "query", rewind, 1, forgets=False)
    past.query.engine.options = replace(past.query.engine.options, retained_checkpoints=2, retained_s={})
    past.query.start()
    past.query.run_batches(12, random.Random(3))
    plain = statelog.read_changes(past.location, state="map", after=batch).read_all().to_pylist()
    assert plain[0]["batch"] == batch + 1, "the changes are there"
    with pytest.raises(StateMissingError, match=f"has no checkpoint {batch}"):
        statelog.read_changes(past.location, state="map", after=batch, with_before=True)
    rows = statelog.read_changes(past.location, state="map", after=3, with_before=True).read_all().to_pylist()
    assert rows[0]["batch"] == 4, "checkpoint 3 is pinned and counts"
    require_before(past.query, rows, "map")


def test_changes_up_to_a_checkpoint_that_was_taken_back_are_its_own(past: Past) -> None:
    name = past.pins[9].name
    rows = statelog.read_changes(past.location, state="value", up_to=name).read_all().to_pylist()
    first = rows[0]["batch"]
    assert rows[-1]["batch"] == 9
    known = value_rows(past.models[first - 1]) if first else []
    assert replayed(known, rows, "value") == value_rows(past.models[9])
    for after in (7, 8):
        with pytest.raises(StateMissingError):
            statelog.read_changes(past.location, state="value", up_to=name, after=after, with_before=True)


@pytest.mark.parametrize("state", STATES)
def test_the_history_of_a_key_has_no_state_that_was_taken_back(past: Past, state: str) -> None:
    told: set[int] = set()
    for key in past.now[-1].keys:
        rows = statelog.read_history(past.location, key, state=state).read_all().to_pylist()
        for batch, own in itertools.groupby(
            (row for row in rows if row["operation"] == "state"), lambda row: row["batch"]
        ):
            expected = [row[-1] for row in STATES[state](past.now[batch]) if row[:2] == key]
            assert Counter(row["value_field"] for row in own) == Counter(expected)
            told.add(batch)
    off_line = {info.batch for info in statelog.list_checkpoints(past.location) if not info.is_on_line}
    on_line = {info.batch for info in statelog.list_checkpoints(past.location) if info.is_on_line}
    assert told
    assert told <= on_line
    assert off_line


# ---- What is checked and counted ----


def test_damage_of_what_was_taken_back_is_told_by_its_pin(tmp_path: Path) -> None:
    past = Past(tmp_path / "query", rewind, 30, forgets=True, has_points=False)
    whole = statelog.verify(past.location)
    assert (whole.damages, whole.whole) == ((), {"op": len(past.now) - 1})
    assert whole.checkpoints == len(statelog.list_checkpoints(past.location))
    needed = {
        one.point.checkpoint.token: set(one.needed.objects)
        for one in StoredQuery(LocalStore(past.location), past.location, past.query.query()).kept(
            past.query.identity, standing_pins(LocalStore(past.location), time.time())
        )
    }
    pin = read_pin(LocalStore(past.location), past.pins[9].name)
    assert pin is not None
    damaged = needed.pop(pin.token).difference(*needed.values())
    assert damaged, "something is needed by this pin only"
    store = LocalStore(past.location)
    for name in damaged:
        store.put(name, bytes(store.size_bytes(name)))
    done = statelog.verify(past.location)
    assert done.whole == whole.whole
    assert {(one.batches, one.pins) for one in done.damages} == {((), (past.pins[9].name,))}
    assert not any(one.is_general for one in done.damages)
    with pytest.raises(CorruptionError):
        read(past.location, "value", past.pins[9].name)
    assert read(past.location, "value", 3) == value_rows(past.now[3])


def test_what_only_pins_of_another_line_keep_is_counted(tmp_path: Path) -> None:
    past = Past(tmp_path / "query", rewind, 30, forgets=True, has_points=False)
    [before] = statelog.stats(past.location)
    for batch in (7, 9):
        statelog.unpin(past.location, past.pins[batch].name)
    past.query.run_batches(1, random.Random(5))
    [after] = statelog.stats(past.location)
    assert (before.oldest_batch, before.checkpoints, before.pins, after.pins) == (len(past.now) - 3, 2, 3, 1)
    assert before.pinned_bytes > after.pinned_bytes > 0


# ---- Consumers ----


def test_a_consumer_is_told_however_long_ago_its_batches_were_taken_back(tmp_path: Path) -> None:
    """Whether or not its pin stands, and although the log does not tell any more that something was taken back."""
    query = Story(tmp_path / "query", parallelism=2, **KEEP)
    query.run_batches(25, random.Random(1))
    feeds = [Feed(query.location, "map", after=batch) for batch in range(8, 23)]
    for feed in feeds[::2]:
        [pin] = [pin for pin in statelog.list_pins(query.location) if pin.owner.endswith(feed.position.consumer)]
        statelog.unpin(query.location, pin.name)
    query.engine.options = changed_options(query.engine.options, **FORGETFUL)
    query.go_back(BACK_TO)
    query.run_batches(20, random.Random(2))
    query.start(3, keep_local=False)
    query.run_batches(3, random.Random(2))
    first = query.query().entries[0].batch
    assert 8 < first <= 22, "some of the positions are before the log, one directly"
    for feed in feeds:
        feed.clock.advance(61)
        for consumer in (feed.consumer, Feed(query.location, "map", after=None).consumer):
            with pytest.raises(StateMissingError, match="set back|are gone"):
                consumer.newest(feed.position)


def test_a_consumer_goes_on_with_what_counts(tmp_path: Path) -> None:
    """Its position is before the batches that were taken back."""
    query = Story(tmp_path / "query", parallelism=2, **KEEP)
    query.run_batches(11, random.Random(1))
    feed = Feed(query.location, "map", after=2, with_before=True)
    assert feed.step(max_bytes=1) == 1
    query.engine.options = changed_options(query.engine.options, **FORGETFUL)
    query.go_back(BACK_TO)
    query.run_batches(25, random.Random(2))
    feed.step_to_the_end()
    require_all(feed, query, 2)
    require_before(query, feed.rows, "map")


# ---- Operators that end, begin and are restored ----


def states_of(location: str, uid: str, at: Any = None) -> list[tuple[Any, ...]]:
    return read(location, "list", at, uid=uid)


def test_an_operator_that_begins_anew_has_none_of_the_state_that_was_given_up(tmp_path: Path) -> None:
    query = StoredQueryFiles(tmp_path).run(["a", "b"], range(4))
    place = str(query.checkpoint)
    both, one = (statelog.pin(place, uid, lasts_s=None, owner="audit") for uid in (None, "b"))
    assert (both.uids, one.uids, both.batch) == (("a", "b"), ("b",), 3)
    before = states_of(place, "b")
    statelog.forget(query.checkpoint, "b")
    for text in ("no operator 'b'", "if a pin keeps it"):
        with pytest.raises(ConfigurationError, match=text):
            states_of(place, "b")
    query.run(["a", "b"], range(4, 6))
    assert [row[-1] for row in states_of(place, "b")] == ["4", "5"]
    assert [row[-1] for row in states_of(place, "a")] == ["0", "1", "2", "3", "4", "5"]
    with pytest.raises(StateMissingError, match="no checkpoint 3"):
        states_of(place, "b", 3)
    for name in (both.name, one.name):
        assert states_of(place, "b", name) == before
    assert len(states_of(place, "a", both.name)) == 4
    with pytest.raises(ConfigurationError, match="keeps 'b'"):
        states_of(place, "a", one.name)
    listed = {(info.uid, info.batch): info.is_on_line for info in statelog.list_checkpoints(place)}
    assert (listed["a", 3], listed["b", 3], listed["b", 5]) == (True, False, True)
    assert {pin.name for pin in statelog.list_pins(place, "a")} == {both.name}
    assert {pin.name for pin in statelog.list_pins(place, "b")} == {both.name, one.name}
    done = statelog.verify(place)
    assert (done.damages, done.whole, done.operators) == ((), {"a": 5, "b": 5}, 3)
    rows = statelog.read_diff(place, one.name, None, "b", "list").read_all().to_pylist()
    assert Counter(row["change"] for row in rows) == {"removed": 4, "added": 2}


def test_the_changes_of_an_operator_begin_with_it(tmp_path: Path) -> None:
    runner = QueryRunner(tmp_path, Options())
    queries = {uid: command_query(uid, hash_of, runner.options) for uid in "ab"}
    for uids, batches in (("a", range(3)), ("ab", range(3, 6))):
        runner.start([queries[uid].operator for uid in uids], 2, batches[0])
        for batch in batches:
            for uid in uids:
                runner.run_operator(uid, batch, command_rows(queries[uid], [(KEYS[0], ("set", batch))]))
    for with_before in (False, True):
        rows = statelog.read_changes(runner.location, "b", "value", with_before=with_before).read_all().to_pylist()
        assert [(row["batch"], row["value_field"]) for row in rows] == [(3, 3), (4, 4), (5, 5)]
        if with_before:
            assert [row["before_field"] for row in rows] == [None, 3, 4]
    told = statelog.read_history(runner.location, KEYS[0], "b", "value").read_all().to_pylist()
    assert [(row["batch"], row["value_field"]) for row in told if row["operation"] == "put"] == [(3, 3), (4, 4), (5, 5)]


def test_the_changes_of_a_restored_operator_come_after_its_state(tmp_path: Path) -> None:
    query = Story(tmp_path / "first", parallelism=2)
    query.run_batches(3, random.Random(1))
    saved = save(query.location, tmp_path / "saved", 2)
    restored = query.copied(tmp_path / "second")
    shutil.rmtree(restored.location)
    target = RestoreTarget(
        location=restored.location,
        query_id=query.engine.query_id,
        run_id="restore",
        batch=2,
        options=query.engine.options,
        clock=query.engine.clock,
        new_token=lambda: secrets.token_bytes(16),
    )
    restore_operators(saved.operators, str(tmp_path / "saved"), target, one_by_one)

    def changed(state: str, **arguments: Any) -> Rows:
        found: Rows = statelog.read_changes(restored.location, state=state, **arguments).read_all().to_pylist()
        return found

    def told(state: str, key: Any) -> Rows:
        found: Rows = statelog.read_history(restored.location, key, state=state).read_all().to_pylist()
        return found

    *key, value = value_rows(query.models[2])[0]
    assert changed("value") == changed("value", with_before=True) == changed("map", after=2) == []
    assert [(row["batch"], row["operation"], row["value_field"]) for row in told("value", tuple(key))] == [
        (2, "state", value)
    ]
    with pytest.raises(StateMissingError, match="changes of batch 3 and later batches, but the changes since batch 2"):
        changed("value", after=1)
    restored.start()
    restored.run_batches(4, random.Random(2))
    for state, with_before in itertools.product(STATES, (False, True)):
        rows = changed(state, with_before=with_before)
        assert replayed(STATES[state](query.models[2]), rows, state) == STATES[state](restored.models[-1])
        assert rows == changed(state, with_before=with_before, after=2)
        if with_before:
            require_before(restored, rows, state)
        feed = Feed(restored.location, state, after=None, with_before=with_before)
        feed.step_to_the_end()
        require_all(feed, restored, 2)
    assert told("value", tuple(key))[0]["batch"] == 2
