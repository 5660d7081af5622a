"""``statelog.replay``: a batch run again for one key does what it did, or the difference is found."""

from __future__ import annotations

import datetime
import inspect
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import statelog
from statelog import ConfigurationError, ConfigurationWarning, ProcessorError, StateMissingError
from statelog.storage import LocalStore
from statelog.testing.clock import ManualClock
from statelog.testing.harness import parts_of
from tests.model.operator_engine import OperatorEngine
from tests.reading.replayed import USERS, Commands, Restless, Sampled, random_rows


@pytest.mark.parametrize(("table", "seed"), [("runs", 0), ("memory", 1), ("runs", 2)])
def test_every_batch_does_again_what_it_did(table: str, seed: int) -> None:
    """For every key that had rows or timers: the same output and the changes of the log, after rescaling too."""
    rng = random.Random(seed)
    options = {"table": table, "materialization_interval_s": 0.0, "max_log_to_base": 0.0, "retained_checkpoints": 40}
    with Sampled(sample_batches=38, parallelism=3, options=options) as query:
        for batch in range(8):
            if batch in (3, 6):
                query.restart(parallelism=rng.randint(1, 5), keepLocal=False)
            query.run(random_rows(rng, 25) if batch % 4 else [], 700 * batch)
        replayed = changed = 0
        for batch in range(8):
            users = sorted({row.user for row in query.returned[batch]}, key=str)
            for user in rng.sample(users, min(3, len(users))):
                again = statelog.replay(query.location, batch, (user,), Commands())
                assert again.different_states == ()
                assert [Row(**row) for row in again.output.to_pylist()] == query.of(batch, user)
                replayed += 1
                changed += sum(rows.num_rows for rows in again.changes.values())
        assert replayed > 15
        assert changed > 30


def test_what_a_replay_tells() -> None:
    with Sampled(parallelism=2) as query:
        query.run([("ann", "timer", 2), ("ann", "set", 1)], 1000)
        query.run([("bob", "set", 1), ("ann", "append", 3), ("ann", "put", 6)], 2000)
        again = statelog.replay(query.location, 1, "ann", Commands())
    assert (again.uid, again.batch, again.key) == ("main", 1, {"user": "ann"})
    assert (again.batch_time_ms, again.watermark_ms) == (2000, 0)
    assert [tuple(row.values()) for row in again.rows.to_pylist()] == [("ann", "append", 3), ("ann", "put", 6)]
    assert again.is_order_known
    assert again.timers_ms == (2000,)
    assert again.is_equal
    assert again.changes["map"].to_pylist() == [
        {"operation": "put", "mapkey_entry": 1, "value_n": 6, "expires_ms": 5000}
    ]
    assert again.changes["timers"].to_pylist() == [{"operation": "delete", "time_ms": 2000}]
    assert [row["value_n"] for row in again.changes["list"].to_pylist()] == [3, 4, 2000]
    assert again.changes == again.logged


def test_a_processor_that_is_not_deterministic_is_found() -> None:
    with Sampled(Restless()) as query:
        query.run([("ann", "append", 1)])
        query.run([("ann", "append", 2)])
        again = statelog.replay(query.location, 1, "ann", Restless())
    assert not again.is_equal
    assert again.different_states == ("value",)
    assert again.logged["value"].column("value_n").to_pylist() != again.changes["value"].column("value_n").to_pylist()


def test_another_version_of_the_processor_shows_its_difference() -> None:
    class Mended(Commands):
        def _run(self, command: str, n: int, now_ms: int) -> None:
            super()._run(command, 10 * n, now_ms)

    with Sampled() as query:
        query.run([("ann", "append", 1)])
        again = statelog.replay(query.location, 0, "ann", Mended())
    assert again.different_states == ("list",)
    assert again.changes["list"].column("value_n").to_pylist() == [10, 11]
    assert again.logged["list"].column("value_n").to_pylist() == [1, 2]


def test_a_deletion_of_what_is_not_there_is_no_difference() -> None:
    """Whether a query stores it depends on what else it has read."""

    class Reading(Commands):
        def _run(self, command: str, n: int, now_ms: int) -> None:
            assert not self.value.exists()
            assert not list(self.map.iterator())
            super()._run(command, n, now_ms)

    with Sampled() as query:
        query.run([("ann", command, 1) for command in ("unset", "wipe", "remove", "empty")])
        query.run([("bob", "set", 1), ("bob", "put", 1)], 1000)
        query.run([("bob", "unset", 1), ("bob", "remove", 1)], 20_000)  # all has expired
        for batch, user in ((0, "ann"), (2, "bob")):
            again = statelog.replay(query.location, batch, user, Reading())
            assert again.is_equal
            assert all(rows.num_rows == 0 for rows in again.logged.values())


def test_expired_state_is_not_seen_again() -> None:
    with Sampled() as query:
        query.run([("ann", "set", 1), ("ann", "put", 2)], 1000)
        query.run([("ann", "append", 3)], 3999)
        query.run([("ann", "append", 4)], 4000)
        query.run([("ann", "unset", 5)], 6000)
        for batch in range(4):
            again = statelog.replay(query.location, batch, "ann", Commands())
            assert [Row(**row) for row in again.output.to_pylist()] == query.of(batch, "ann")
            assert again.is_equal
        assert "[(2, 2)]" in query.of(1, "ann")[0].what
        assert "[(2, 2)]" not in query.of(2, "ann")[0].what


# ---- Repeated batches ----


def test_the_sample_is_that_of_the_attempt_that_counts() -> None:
    """A later attempt had its rows in another order, and so another result: its rows are replayed."""
    with Sampled(parallelism=1) as query:
        query.run([("ann", "set", 0)])
        rows = [("ann", "append", 1), ("ann", "append", 5)]
        query.run(rows)
        query.run_again([*reversed(rows)])
        again = statelog.replay(query.location, 1, "ann", Commands())
        assert again.rows.column("n").to_pylist() == [5, 1]
        assert again.is_equal
        query.run_again([*reversed(rows)])  # the same result: the earlier attempt counts
        assert statelog.replay(query.location, 1, "ann", Commands()).is_equal
        assert len([name for name in query.objects() if "/1-" in name]) == 3
        query.run([])
        assert len([name for name in query.objects() if "/1-" in name]) == 1
        assert statelog.replay(query.location, 1, "ann", Commands()).rows.column("n").to_pylist() == [5, 1]


def test_a_batch_that_a_new_start_repeats() -> None:
    with Sampled(parallelism=2) as query:
        for number in range(3):
            query.run([("ann", "append", number), ("bob", "append", number)])
        query.repeatBatch(restart=True)
        again = statelog.replay(query.location, 2, "ann", Commands())
        assert again.is_equal
        query.run([("ann", "append", 3)])
        epochs = {name.split("/")[2] for name in query.objects() if "/samples/" in name and "/2-" in name}
        assert epochs == {"2"}, "the sample of the attempt that was replaced is gone"
        assert statelog.replay(query.location, 1, "ann", Commands()).is_equal


# ---- Given rows ----


def given(kind: str, rows: list[tuple[Any, ...]]) -> Any:
    columns = [list(column) for column in zip(*rows, strict=True)]
    table = pa.table({"user": columns[0], "command": columns[1], "n": columns[2]})
    return {"table": table, "batch": table.to_batches()[0], "pandas": table.to_pandas()}[kind]


@pytest.mark.parametrize("kind", ["table", "batch", "pandas"])
def test_rows_may_be_given(kind: str) -> None:
    rows = [("ann", "append", 1), ("bob", "set", 2), ("ann", "put", 6)]
    with Sampled(sample_batches=0) as query:
        query.run([("ann", "set", 0)], 1000)
        query.run(rows, 2000)
        again = statelog.replay(
            query.location, 1, "ann", Commands(), rows=given(kind, rows), output="user string, what string"
        )
        assert again.is_equal
        assert not again.is_order_known
        assert [Row(**row) for row in again.output.to_pylist()] == query.of(1, "ann")
        with pytest.raises(StateMissingError, match=r"no sample of the rows of subtask .*Pass the rows as rows="):
            statelog.replay(query.location, 1, "ann", Commands(), output="user string, what string")
        with pytest.raises(ConfigurationError, match=r"no sample that tells the output type.*Pass output="):
            statelog.replay(query.location, 1, "ann", Commands())


def test_given_rows_get_the_types_of_the_sample() -> None:
    with Sampled() as query:
        query.run([("ann", "append", 1)])
        narrow = pa.table({"n": pa.array([1], pa.int8()), "command": ["append"], "user": ["ann"], "more": [None]})
        again = statelog.replay(query.location, 0, "ann", Commands(), rows=narrow)
        assert again.is_equal
        assert again.rows.schema.field("n").type == pa.int64()
        assert again.rows.column_names == ["user", "command", "n"]
        for rows, problem in (
            (narrow.drop_columns(["n"]), "the rows have no column 'n'"),
            (narrow.set_column(0, "n", pa.array(["x"])), "column 'n' of the rows is string, and int64 is needed"),
            ([("ann", "append", 1)], "rows is .*Pass a pyarrow.Table"),
        ):
            with pytest.raises(ConfigurationError, match=problem):
                statelog.replay(query.location, 0, "ann", Commands(), rows=rows)


def test_a_wrong_row_is_a_difference() -> None:
    with Sampled() as query:
        query.run([("ann", "append", 1)])
        again = statelog.replay(query.location, 0, "ann", Commands(), rows=given("table", [("ann", "append", 2)]))
    assert again.different_states == ("list",)


# ---- Other processors ----


class Frames(Commands):
    """Takes and returns pandas frames."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        import pandas as pd

        for frame in rows:
            assert isinstance(frame, pd.DataFrame)
            self.list.appendList([(int(n),) for n in frame["n"]])
            yield pd.DataFrame({"user": [key[0]], "what": [str(len(frame))]})

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield from ()


class Columns(statelog.ArrowProcessor):
    """Adds up numbers, by columns."""

    def init(self, handle: Any) -> None:
        self.sum = handle.getValueState("sum", "n long")

    def process(self, batch: statelog.ArrowBatch) -> Any:
        sums = self.sum.get().column("n").fill_null(0).to_numpy().copy()
        np.add.at(sums, batch.key_index, batch.rows.column("n").to_numpy())
        self.sum.put({"n": sums})
        return pa.table({"user": batch.keys.column("user"), "what": [str(number) for number in sums]})


@pytest.mark.parametrize(("make", "pandas"), [(Frames, True), (Columns, False)])
def test_frames_and_columns(make: Callable[[], Any], pandas: bool) -> None:
    with Sampled(make(), pandas=pandas) as query:
        for number in range(3):
            query.run([("ann", "x", number), ("bob", "x", number), ("ann", "x", 5)])
        again = statelog.replay(query.location, 2, "ann", make())
        assert again.is_equal
        assert sum(rows.num_rows for rows in again.logged.values()) > 0
        assert [Row(**row) for row in again.output.to_pylist()] == query.of(2, "ann")


class Starting(Commands):
    """Begins with a list from the initial state."""

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.list.appendValue((initialState.start,))


def test_batch_0_has_the_rows_of_the_initial_state() -> None:
    initial = ("user string, start long", [("ann", 100), ("bob", 200), ("carl", 300)])
    with Sampled(Starting(), initialState=initial, parallelism=8) as query:
        query.run([("ann", "append", 1)])
        query.run([("ann", "append", 2)])
        assert [sum(batch == number for batch, _ in query.samples()) for number in (0, 1)] == [8, 1]
        assert "100, 1, 2" in query.of(0, "ann")[0].what
        for user, batch in (("ann", 0), ("bob", 0), ("ann", 1)):
            again = statelog.replay(query.location, batch, user, Starting())
            assert again.is_equal
            assert [Row(**row) for row in again.output.to_pylist()] == query.of(batch, user)
        assert statelog.replay(query.location, 0, "bob", Starting()).logged["list"].num_rows == 1
        for user in ("dora", "erik", "fred", "gina", "hugo"):
            with pytest.raises(ConfigurationError, match=f"Nothing happened to .*'{user}'"):
                statelog.replay(query.location, 0, user, Starting())


def test_batch_0_of_a_subtask_with_rows_but_none_of_the_initial_state(caplog: pytest.LogCaptureFixture) -> None:
    initial = ("user string, start long", [("ann", 100)])
    with Sampled(Starting(), initialState=initial, parallelism=8) as query:
        query.run([(user, "append", 1) for user in USERS])
        for user in USERS:
            again = statelog.replay(query.location, 0, user, Starting())
            assert again.is_equal
            assert [Row(**row) for row in again.output.to_pylist()] == query.of(0, user)
    assert "could not be stored" not in caplog.text


def test_samples_tell_that_there_was_no_initial_state() -> None:
    with Sampled(Starting(), parallelism=3) as query:
        query.run([("ann", "append", 1)])
        assert statelog.replay(query.location, 0, "ann", Starting()).is_equal
        for user in ("bob", "carl", "dora"):
            with pytest.raises(ConfigurationError, match="Nothing happened"):
                statelog.replay(query.location, 0, user, Starting())


def test_batch_0_without_its_initial_state_is_refused() -> None:
    initial = ("user string, start long", [("ann", 100)])
    with Sampled(Starting(), sample_batches=0, initialState=initial) as query:
        query.run([("ann", "append", 1)])
        rows = given("table", [("ann", "append", 1)])
        with pytest.raises(StateMissingError, match="rows of an initial state"):
            statelog.replay(query.location, 0, "ann", Starting(), rows=rows, output="user string, what string")


class Timed(StatefulProcessor):
    """Goes by event time: timers at the times of the rows, and elements that expire."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.fired = handle.getListState("fired", "n long")
        self.seen = handle.getListState("seen", "n long", statelog.Ttl(4000, "event"))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            self.seen.appendValue((row.n,))
            self.handle.registerTimer(row.n * 1000)
            seen = [item[0] for item in self.seen.get()]
            yield Row(user=key[0], what=f"{seen} {timerValues.getCurrentWatermarkInMs()}")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        self.fired.appendValue((expiredTimerInfo.getExpiryTimeInMs(),))
        yield Row(user=key[0], what=f"fired {expiredTimerInfo.getExpiryTimeInMs()}")

    def close(self) -> None:
        pass


@pytest.mark.parametrize("watermark", [None, statelog.Watermark("at", delay_ms=1000)])
def test_event_time_late_rows_and_timers(watermark: statelog.Watermark | None) -> None:
    def row(second: int) -> tuple[Any, ...]:
        return ("ann", datetime.datetime.fromtimestamp(second, datetime.UTC), second)

    times: dict[str, Any] = {"eventTime": "at"} if watermark is None else {"watermark": watermark}
    columns: dict[str, Any] = {"input": "user string, at timestamp, n long", "timeMode": "EventTime"}
    with Sampled(Timed(), **columns, **times) as query:
        query.run([row(10), row(12)])
        if watermark is None:
            query.returned.append(query.advanceWatermark(11_000))
        query.run([row(13), row(11)])
        query.run([row(14), row(9), row(15)])
        query.run([])
        late = sum(one.late_rows for one in query.checkpoints)
        assert late > 0
        assert any(row.what.startswith("fired") for rows in query.returned for row in rows)
        for batch, returned in enumerate(query.returned):
            if not returned:
                continue
            again = statelog.replay(query.location, batch, "ann", Timed())
            assert again.is_equal
            assert [Row(**one) for one in again.output.to_pylist()] == query.of(batch, "ann")


# ---- Refusals, and the debugger ----


def test_a_key_to_which_nothing_happened() -> None:
    with Sampled() as query:
        query.run([("ann", "set", 1)])
        with pytest.raises(ConfigurationError, match=r"Nothing happened to .*key \('bob',\) in batch 0.*read_history"):
            statelog.replay(query.location, 0, "bob", Commands())
        with pytest.raises(ConfigurationError, match="the given keys do not fit"):
            statelog.replay(query.location, 0, (1, 2), Commands())


def test_a_batch_that_is_not_retained() -> None:
    options = {"materialization_interval_s": 0.0, "max_log_to_base": 0.0, "retained_checkpoints": 3}
    with Sampled(sample_batches=1, parallelism=1, options=options) as query:
        for number in range(8):
            query.run([("ann", "append", number)])
        rows = pa.table({"user": ["ann"], "command": ["append"], "n": [5]})
        with pytest.raises(StateMissingError, match="Batch 5 cannot be replayed without the checkpoint before it"):
            statelog.replay(query.location, 5, "ann", Commands(), rows=rows)
        for batch in (4, 9):
            with pytest.raises(StateMissingError, match=f"has no checkpoint {batch}: it retains 5 to 7"):
                statelog.replay(query.location, batch, "ann", Commands(), rows=rows)
        assert statelog.replay(query.location, 6, "ann", Commands()).is_equal


def test_operators_that_cannot_be_replayed(tmp_path: Path) -> None:
    with Sampled(options={"changelog": False}) as query:
        query.run([("ann", "set", 1)])
        query.run([("ann", "set", 2)])
        with pytest.raises(ConfigurationError, match="has no changes of batch 1: it ran with .*changelog=False"):
            statelog.replay(query.location, 1, "ann", Commands())
    engine = OperatorEngine(tmp_path)
    engine.start(1, 0)
    engine.run_subtask(0, 0, [["add", "items", "x"]])
    with pytest.raises(ConfigurationError, match="has no keys, so no batch of it can be replayed"):
        statelog.replay(engine.location, 0, "ann", Commands())


def test_a_processor_that_does_not_fit() -> None:
    class Other(Commands):
        def init(self, handle: Any) -> None:
            super().init(handle)
            self.list = handle.getMapState("list", "n long", "n long")

    class Failing(Commands):
        def _run(self, command: str, n: int, now_ms: int) -> None:
            raise ValueError("no such command")

    class Changed(Commands):
        def init(self, handle: Any) -> None:
            self.handle = handle
            self.list = handle.getValueState("list", "n long")

    with Sampled() as query:
        query.run([("ann", "set", 1)])
        for processor, error, problem in (
            (Commands, ConfigurationError, "an instance of StatefulProcessor, not <class"),
            (Other(), ConfigurationError, "state 'list' is declared twice"),
            (Changed(), ConfigurationError, "the location holds list state 'list'"),
            (Failing(), ProcessorError, r"handleInputRows\(\) failed for key \('ann',\): ValueError: no such command"),
        ):
            with pytest.raises(error, match=problem):
                statelog.replay(query.location, 0, "ann", processor)


def test_the_debugger_stops_before_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[str] = []
    monkeypatch.setattr("sys.breakpointhook", lambda: stops.append(inspect.stack()[1].function))
    initial = ("user string, start long", [("ann", 100), ("bob", 200)])
    with Sampled(Starting(), initialState=initial) as query:
        query.run([("ann", "timer", 1), ("bob", "timer", 1), ("bob", "set", 1)], 1000)
        query.run([("ann", "set", 1)], 1500)
        for batch in (0, 1):
            assert statelog.replay(query.location, batch, "ann", Starting()).is_equal
        assert stops == []
        assert statelog.replay(query.location, 0, "ann", Starting(), breakpoint=True).is_equal
        assert stops == ["handleInitialState", "handleInputRows"]
        assert statelog.replay(query.location, 1, "ann", Starting(), breakpoint=True).is_equal
        assert stops[2:] == ["handleInputRows", "handleExpiredTimer"]
    stops.clear()
    with Sampled(Columns()) as query:
        query.run([("ann", "x", 1)])
        assert statelog.replay(query.location, 0, "ann", Columns(), breakpoint=True).is_equal
        assert stops == ["process"]


def test_a_replay_leaves_nothing_behind() -> None:
    with Sampled() as query:
        query.run([("ann", "set", 1)])
        query.run([("ann", "set", 2)])
        before = query.objects()
        statelog.replay(query.location, 1, "ann", Commands())
        assert query.objects() == before


@pytest.mark.parametrize("batch", range(2, 6))
def test_the_files_are_pinned_while_they_are_read(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The query goes on meanwhile, and gives up the batch."""
    options = {"materialization_interval_s": 0.0, "max_log_to_base": 0.0, "retained_checkpoints": 3}
    options |= {"max_file_bytes": 1, "inline_budget_bytes": 0}
    with Sampled(sample_batches=1, parallelism=1, options=options) as query:
        parts_of(query).query.clock = ManualClock(time.time())  # pins have the file system's time
        for number in range(batch + 1):
            query.run([("ann", "append", number)])
        read = LocalStore.read
        ran: list[str] = []

        def read_later(store: LocalStore, name: str, **part: Any) -> bytes:
            if "/samples/" in name and not ran:
                ran.append(name)
                data = read(store, name, **part)
                for number in range(6):
                    query.run([("ann", "append", number)])
                return data
            return read(store, name, **part)

        monkeypatch.setattr(LocalStore, "read", read_later)
        assert statelog.replay(query.location, batch, "ann", Commands()).is_equal
        assert ran
        with pytest.raises(StateMissingError):
            statelog.replay(query.location, batch, "ann", Commands())


def test_a_state_that_is_deleted_and_declared_anew() -> None:
    class Deleting(Commands):
        def init(self, handle: Any) -> None:
            handle.deleteIfExists("list")
            super().init(handle)

        def _run(self, command: str, n: int, now_ms: int) -> None:
            self.map.updateValue((n,), (n,))

        def _seen(self) -> list[Any]:
            return []

    with Sampled() as query:
        query.run([("ann", "append", 1)])
        with pytest.warns(ConfigurationWarning, match="deletes and then declares"):
            query.restart(processor=Deleting())
        query.run([("ann", "append", 2)])
        query.restart(processor=Commands())
        query.run([("ann", "append", 3)])
        query.run([("ann", "append", 4)])
        for batch, processor in enumerate([Commands(), Deleting(), Commands(), Commands()]):
            again = statelog.replay(query.location, batch, "ann", processor)
            assert again.is_equal
            assert [Row(**row) for row in again.output.to_pylist()] == query.of(batch, "ann")
        assert "[3, 4]" in query.of(2, "ann")[0].what


def test_a_key_of_several_fields_and_a_map_with_many_entries() -> None:
    columns: dict[str, Any] = {"input": "user string, command string, n long", "keys": ["n", "user"]}
    with Sampled(Many(), **columns) as query:
        for _ in range(3):
            query.run([("ann", "x", 1), (None, "x", 1), ("ann", "x", 2)])
        for key in ((1, "ann"), {"user": None, "n": 1}):
            again = statelog.replay(query.location, 2, key, Many())
            assert again.is_equal
            assert again.logged["map"].num_rows > 1000
            assert list(again.key) == ["n", "user"]


class Many(Commands):
    """Writes many entries in each batch."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        count = sum(1 for _ in self.map.iterator())
        for _ in rows:
            for entry in range(count - 50 if count else 0, count + 2000):
                self.map.updateValue((entry,), (entry,))
        yield Row(user=key[1], what=str(count))


def test_pins_keep_a_batch_that_is_replayed_with_given_rows() -> None:
    options = {"materialization_interval_s": 0.0, "max_log_to_base": 0.0, "retained_checkpoints": 3}
    with Sampled(sample_batches=1, parallelism=1, options=options) as query:
        parts_of(query).query.clock = ManualClock(time.time())  # pins have the file system's time
        for number in range(4):
            query.run([("ann", "append", number)])
        for batch in (2, 3):
            statelog.pin(query.location, at=batch, lasts_s=None, owner="a test")
        for number in range(6):
            query.run([("ann", "append", number)])
        rows = pa.table({"user": ["ann"], "command": ["append"], "n": [3]})
        again = statelog.replay(query.location, 3, "ann", Commands(), rows=rows)
        assert again.is_equal
        assert again.logged["list"].num_rows == 2
