"""Processors of Arrow columns: states and timers of many keys at once, against the same processor called key by key."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import statelog
from statelog import ArrowBatch, ArrowProcessor, ArrowTimers, Options, ProcessorError, Step
from statelog.runs.byte_slices import Budget
from statelog.testing import Harness
from statelog.testing.harness import parts_of
from statelog.testing.keyed import LocalKeyedOperator
from tests.model.query_engine import DRIVER_STEPS

INPUT = "user string, n long"


class Everything(ArrowProcessor):
    """Counts rows in a value, keeps them in a list, counts each n in a map, and forgets a user some time after rows."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._count = handle.getValueState("count", "n long")
        self._rows = handle.getListState("rows", "n long")
        self._times = handle.getMapState("times", "n long", "times long")

    def process(self, batch: ArrowBatch) -> Any:
        numbers = batch.rows.column("n").combine_chunks()
        keys = batch.key_index
        counts = self._count.get().column("n").fill_null(0).to_numpy() + np.bincount(keys, minlength=len(batch.keys))
        self._count.put({"n": counts})
        self._rows.append(keys, {"n": numbers})
        held = self._times.entries()
        before = dict(
            zip(
                zip(held.key_index.tolist(), held.map_keys.column("n").to_pylist(), strict=True),
                held.values.column("times").to_pylist(),
                strict=True,
            )
        )
        for key, number in zip(keys.tolist(), numbers.to_pylist(), strict=True):
            before[key, number] = before.get((key, number), 0) + 1
        changed = sorted({(key, number) for key, number in zip(keys.tolist(), numbers.to_pylist(), strict=True)})
        owners = [key for key, _ in changed]
        self._times.put(owners, {"n": [number for _, number in changed]}, {"times": [before[one] for one in changed]})
        now_ms = batch.times.getCurrentProcessingTimeInMs()
        self._handle.registerTimers(np.arange(len(batch.keys)), np.full(len(batch.keys), now_ms + 3))
        lists = self._rows.entries()
        sums = np.bincount(lists.key_index, lists.values.column("n").to_numpy(), len(batch.keys)).astype(np.int64)
        kinds = np.bincount(self._times.entries().key_index, minlength=len(batch.keys))
        return pa.table({"user": batch.keys.column("user"), "count": counts, "sum": sums, "kinds": kinds})

    def fire(self, timers: ArrowTimers) -> Iterator[Any]:
        now_ms = timers.times.getCurrentProcessingTimeInMs()
        assert (timers.times_ms <= now_ms).all()
        even = np.flatnonzero(self._count.get().column("n").fill_null(1).to_numpy() % 2 == 0)
        self._count.clear(even)
        self._rows.clear(even)
        self._times.clear(even)
        users = timers.keys.column("user").take(pa.array(even))
        nulls = pa.nulls(len(users), pa.int64())
        yield pa.RecordBatch.from_pydict({"user": users, "count": nulls, "sum": nulls, "kinds": nulls})


OUTPUT = "user string, count long, sum long, kinds long"
STORIES = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.integers(0, 3)), max_size=6),
        st.integers(0, 3),
        st.none() | st.tuples(st.sampled_from(list(Step)), st.integers(0, 1)),
        st.none() | st.integers(1, 3),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40)
@given(STORIES, st.sampled_from(["runs", "memory", "rocksdb"]))
def test_states_and_timers_of_many_keys(story: list[Any], table: Any) -> None:
    held: dict[Any, list[int]] = defaultdict(list)
    timers: dict[Any, set[int]] = defaultdict(set)
    now_ms = 0
    options = Options(table=table)
    with Harness(
        Everything(), input=INPUT, output=OUTPUT, keys=["user"], timeMode="ProcessingTime", options=options
    ) as query:
        for rows, advance_ms, crash, parallelism, repeats in story:
            now_ms += advance_ms
            if parallelism is not None:
                query.restart(parallelism, keepLocal=parallelism != 2)
            if crash is not None:
                query.crash(crash[0], None if crash[0] in DRIVER_STEPS else crash[1])
            for user, number in rows:
                held[user].append(number)
                timers[user].add(now_ms + 3)
            expected: list[tuple[Any, ...]] = [
                (user, len(held[user]), sum(held[user]), len(set(held[user]))) for user in {user for user, _ in rows}
            ]
            for user, times in timers.items():
                due = {time for time in times if time <= now_ms}
                if due and held[user] and len(held[user]) % 2 == 0:
                    held[user].clear()
                    expected.append((user, None, None, None))
                times -= due
            found = [tuple(row) for row in query.push(rows, now_ms)]
            assert sorted(found, key=repr) == sorted(expected, key=repr)
            if repeats:
                query.repeatBatch()
        for user in held:
            assert sorted(query.timers(user)) == sorted(timers[user])
            assert query.value("count", user) == ((len(held[user]),) if held[user] else None)


class Scripted(ArrowProcessor):
    """Does what a test wants with one state of each kind."""

    def __init__(self, act: Callable[[Any, ArrowBatch], Any]) -> None:
        self._act = act

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.value = handle.getValueState("v", "n int, t string")
        self.map = handle.getMapState("m", "k long", "n long")

    def process(self, batch: ArrowBatch) -> Any:
        return self._act(self, batch)


def run(act: Callable[[Any, ArrowBatch], Any]) -> list[Any]:
    with Harness(Scripted(act), input=INPUT, output="user string, n int", keys=["user"], parallelism=1) as query:
        return query.push([("a", 1), ("b", 2)])


def test_what_is_written_is_read_back_in_the_same_call() -> None:
    def act(self: Any, batch: ArrowBatch) -> Any:
        self.value.put({"n": [1, 2, 3], "t": ["x", "y", "z"]}, keys=[0, 1, 0])
        assert self.value.get().to_pylist() == [{"n": 3, "t": "z"}, {"n": 2, "t": "y"}]
        self.value.clear([1])
        assert self.value.exists().tolist() == [True, False]
        assert self.value.get().to_pylist()[1] == {"n": None, "t": None}
        self.map.put([1, 0, 1], {"k": [5, 5, 4]}, {"n": [1, 2, 3]})
        self.map.remove([1], {"k": [5]})
        entries = self.map.entries()
        assert entries.key_index.tolist() == [0, 1]
        assert entries.map_keys.to_pylist() == [{"k": 5}, {"k": 4}]
        self.map.clear()
        assert not len(self.map.entries().key_index)
        return None

    assert run(act) == []


def test_chunks_are_bounded_by_the_bytes_of_lists_and_maps() -> None:
    def act(self: Any, batch: ArrowBatch) -> Any:
        self.map.put(batch.key_index, {"k": batch.rows["n"]}, {"n": batch.rows["n"]})
        users = batch.keys.column("user")
        return pa.table({"user": users, "n": np.full(len(users), len(users))})

    rows = [(str(user), n) for user in range(4) for n in range(100)]
    with Harness(Scripted(act), input=INPUT, output="user string, n int", keys=["user"], parallelism=1) as query:
        local = parts_of(query).query
        assert isinstance(local.operator, LocalKeyedOperator)
        local.operator = local.operator.with_budget(Budget(slice_bytes=2_000))
        assert [row.n for row in query.push(rows)] == [1, 1, 1, 1], "by the rows"
        assert [row.n for row in query.push(rows[::100])] == [1, 1, 1, 1], "by the entries"


class Alarms(ArrowProcessor):
    """Stores rows, and counts the keys that fire together."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.map = handle.getMapState("m", "k long", "n long")

    def process(self, batch: ArrowBatch) -> Any:
        self.map.put(batch.key_index, {"k": batch.rows["n"]}, {"n": batch.rows["n"]})
        owners = np.unique(batch.key_index)
        self.handle.registerTimers(owners, np.full(len(owners), 5))
        self.handle.registerTimers(owners, np.full(len(owners), 4))

    def fire(self, timers: Any) -> Any:
        assert timers.times_ms.tolist() == [4, 5] * timers.keys.num_rows
        assert len(self.map.entries().key_index) == 100 * timers.keys.num_rows
        return pa.table({"user": timers.keys.column("user"), "n": np.full(len(timers.keys), len(timers.keys))})


@pytest.mark.parametrize(("slice_bytes", "together"), [(2_000, 1), (64 << 20, 4)])
def test_keys_that_fire_together_are_bounded_by_the_bytes_of_lists_and_maps(slice_bytes: int, together: int) -> None:
    rows = [(str(user), n) for user in range(4) for n in range(100)]
    arguments: dict[str, Any] = {"keys": ["user"], "parallelism": 1, "timeMode": "ProcessingTime"}
    with Harness(Alarms(), input=INPUT, output="user string, n int", **arguments) as query:
        local = parts_of(query).query
        assert isinstance(local.operator, LocalKeyedOperator)
        local.operator = local.operator.with_budget(Budget(slice_bytes=slice_bytes))
        query.push(rows, 1)
        assert [row.n for row in query.push([], 7)] == [together] * 4


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda self, batch: self.value.put({"n": [1, 2]}), "state 'v' takes the columns n, t, but got n"),
        (lambda self, batch: self.value.put({"n": [1], "t": ["x"]}), "column 'n' has 1 values, but there are 2 keys"),
        (lambda self, batch: self.value.put({"n": [2**40, 1], "t": ["x", "y"]}), "column 'n' does not fit its type"),
        (lambda self, batch: self.map.put([0], {"k": ["x"]}, {"n": [1]}), "map key of state 'm': column 'k' does not"),
        (lambda self, batch: self.handle.registerTimers([0], [1]), "timeMode is None"),
        (lambda self, batch: 5, "'int' object is not iterable"),
        (lambda self, batch: [5], "it returned int, which is not a pyarrow.RecordBatch"),
        (lambda self, batch: pa.table({"user": ["a"]}), "the output takes the columns user, n, but got user"),
        (lambda self, batch: pa.table({"user": ["a"], "n": ["x"]}), "the output: column 'n' does not fit its type"),
        (lambda self, batch: self.value.get(keys=1), "TypeError"),
        (lambda self, batch: self.value.put([1]), "state 'v' takes columns by name, but got list"),
        (lambda self, batch: self.value.put({"n": [2**70, 1], "t": ["x", "y"]}), "column 'n' does not fit its type"),
        (lambda self, batch: self.value.put(twice(batch.keys)), "takes the columns n, t, but got user, user"),
    ],
)
def test_mistakes_are_named(act: Callable[[Any, ArrowBatch], Any], message: str) -> None:
    with pytest.raises(ProcessorError, match="process\\(\\) failed.*" + message.replace("(", "\\(")):
        run(act)


def twice(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([batch.column(0)] * 2, names=batch.schema.names * 2)


USES: list[tuple[str, Callable[[Any, Any], Any]]] = [
    ("state 'v'", lambda self, given: self.value.put({"n": [1] * 2, "t": ["x"] * 2}, keys=given)),
    ("state 'v'", lambda self, given: self.value.clear(given)),
    ("state 'l'", lambda self, given: self.list.append(given, {"n": [1] * 2})),
    ("state 'l'", lambda self, given: self.list.clear(given)),
    ("state 'm'", lambda self, given: self.map.put(given, {"k": [1] * 2}, {"n": [1] * 2})),
    ("state 'm'", lambda self, given: self.map.remove(given, {"k": [1] * 2})),
    ("state 'm'", lambda self, given: self.map.clear(given)),
    ("timers", lambda self, given: self.handle.registerTimers(given, [7] * 2)),
    ("timers", lambda self, given: self.handle.deleteTimers(given, [7] * 2)),
]
POSITIONS: list[tuple[Any, str]] = [
    (np.array([False, True]), "an array of type bool.* numpy.flatnonzero"),
    (pa.array([False, True]), "an array of type bool.* numpy.flatnonzero"),
    ([True, True], "an array of type bool.* numpy.flatnonzero"),
    ([0, 1.7], "an array of type float64, such as 0[.]0"),
    ([0, None], "an array of type object"),
    (["0", "1"], "an array of type <U1"),
    ([[0, 1]], "an array of 2 dimensions"),
    ([[0], [0, 1]], "are not an array"),
    ([0, 2**64], "an array of type object"),
    ([0, -1], "-1 is given as the position of a key, but the call has 2 keys"),
    ([0, 2], "2 is given as the position of a key, but the call has 2 keys"),
    (np.array([0, 2**63], np.uint64), "9223372036854775808 is given as the position of a key"),
]


@pytest.mark.parametrize(("given", "message"), POSITIONS)
def test_positions_are_integers_of_the_calls_keys(given: Any, message: str) -> None:
    class Acting(ArrowProcessor):
        def init(self, handle: Any) -> None:
            self.handle = handle
            self.value = handle.getValueState("v", "n int, t string")
            self.list = handle.getListState("l", "n int")
            self.map = handle.getMapState("m", "k long", "n long")

        def process(self, batch: ArrowBatch) -> Any:
            for subject, act in USES:
                with pytest.raises(ProcessorError, match=f"{subject}: .*{message}"):
                    act(self, given)
                act(self, np.array([1, 0], np.uint8))

    arguments: dict[str, Any] = {"keys": ["user"], "timeMode": "ProcessingTime", "parallelism": 1}
    with Harness(Acting(), input=INPUT, output=INPUT, **arguments) as query:
        query.push([("a", 1), ("b", 2)])
        assert query.value("v", "a") is None
        assert query.list("l", "a") == []


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([1, 2.5], "an array of type float64"),
        (np.array([1, 2], "datetime64[ms]"), "an array of type datetime64"),
        ([1], "there are 1 times for 2 positions"),
        (np.array([1, 2**63], np.uint64), "a time is 9223372036854775808"),
    ],
)
def test_times_of_timers_are_integers_of_64_bits_one_for_each_position(times: Any, message: str) -> None:
    class Alarm(ArrowProcessor):
        def init(self, handle: Any) -> None:
            self.handle = handle

        def process(self, batch: ArrowBatch) -> Any:
            self.handle.registerTimers([0, 1], times)

    arguments: dict[str, Any] = {"keys": ["user"], "timeMode": "ProcessingTime", "parallelism": 1}
    with (
        Harness(Alarm(), input=INPUT, output=INPUT, **arguments) as query,
        pytest.raises(ProcessorError, match=f"timers: .*{message}"),
    ):
        query.push([("a", 1), ("b", 2)])


NESTED = "s struct<total:bigint,at:struct<x:int>>, l array<struct<a:int>>, m map<string,struct<b:int>>"


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("s", [{"total": 1, "ta": {"x": 1}}], "'s' takes the fields total, at, but got total, ta"),
        ("s", [{"total": 1}], "'s' takes the fields total, at, but got total"),
        ("s", [{"total": 1, "at": {"x": 1}, "y": 1}], "'s' takes the fields total, at, but got total, at, y"),
        ("s", [{"total": 1, "at": {"y": 1}}], "'s', field 'at' takes the fields x, but got y"),
        ("l", [[{"a": 1}, {"b": 1}]], "'l', its elements: takes the fields a, but got a, b"),
        (
            "m",
            pa.array([[("k", {"c": 1})]], pa.map_(pa.string(), pa.struct([("c", pa.int32())]))),
            "'m', its values: takes the fields b, but got c",
        ),
        (
            "s",
            pa.array([{"total": 1}], pa.struct([("total", pa.int64())])).cast(
                pa.opaque(pa.struct([("total", pa.int64())]), "a struct", "another library")
            ),
            "'s' takes the fields total, at, but got total",
        ),
    ],
)
def test_fields_are_matched_by_name_at_every_depth(name: str, column: Any, message: str) -> None:
    class Nested(ArrowProcessor):
        def __init__(self, into_state: bool) -> None:
            self.into_state = into_state

        def init(self, handle: Any) -> None:
            self.state = handle.getValueState("v", NESTED)

        def process(self, batch: ArrowBatch) -> Any:
            at, mapped = {"x": 1}, pa.array([[("k", {"b": 1})]], pa.map_(pa.string(), pa.struct([("b", pa.int8())])))
            right = {"m": mapped, "l": pa.array([[{"a": 1}, None]]), "s": pa.array([{"at": at, "total": 1}])}
            self.state.put(right)
            assert self.state.get().to_pylist() == [
                {"s": {"total": 1, "at": at}, "l": [{"a": 1}, None], "m": [("k", {"b": 1})]}
            ]
            wrong = right | {name: column if isinstance(column, pa.Array) else pa.array(column)}
            if self.into_state:
                self.state.put(wrong)
            return pa.table(wrong)

    for into_state, owner in ((True, "state 'v'"), (False, "the output")):
        with (
            Harness(Nested(into_state), input=INPUT, output=NESTED, keys=["user"], parallelism=1) as query,
            pytest.raises(ProcessorError, match=f"{owner}: column {message}"),
        ):
            query.push([("a", 1)])


def test_arrays_can_be_used_again_after_they_were_handed_to_a_state() -> None:
    def act(self: Any, batch: ArrowBatch) -> Any:
        numbers, owners = np.array([1, 2]), np.array([0, 1])
        self.map.put(owners, {"k": numbers}, {"n": numbers})
        self.value.put({"n": numbers.astype(np.int32), "t": ["x", "y"]}, keys=owners)
        numbers[:], owners[:] = 0, 0
        entries = self.map.entries()
        assert entries.key_index.tolist() == [0, 1]
        assert entries.values.to_pylist() == [{"n": 1}, {"n": 2}]

    assert run(act) == []


def test_columns_come_by_name_in_any_order() -> None:
    def act(self: Any, batch: ArrowBatch) -> Any:
        assert batch.rows.column_names == ["user", "n"]
        return [pa.table({"n": pc.cast(batch.rows["n"], pa.int64()), "user": batch.rows["user"]})]

    assert [tuple(row) for row in run(act)] == [("a", 1), ("b", 2)]


def test_only_processors_of_columns_are_taken() -> None:
    with pytest.raises(TypeError):
        ArrowProcessor()  # type: ignore[abstract]  # the mistake
    assert statelog.ArrowProcessor is ArrowProcessor
