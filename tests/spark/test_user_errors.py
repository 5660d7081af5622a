"""Mistakes in the user's code and set-up: the message names what and where, and nothing of the batch is kept."""

from __future__ import annotations

import stat
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

import statelog
from statelog import ConfigurationError, ErrorKind, ProcessorError
from tests.spark.support import LEDGER, Job, Ledger, make_orders

pytestmark = pytest.mark.spark


# ---- Found when the query is built ----


class WithLock(Ledger):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class WithSession(Ledger):
    def __init__(self, session: SparkSession) -> None:
        super().__init__()
        self.session = session


class WithBroadcast(Ledger):
    def __init__(self, session: SparkSession) -> None:
        super().__init__()
        self.names = session.sparkContext.broadcast({"a": "Ann"})


class InitFails(Ledger):
    def init(self, handle: Any) -> None:
        raise KeyError("DATABASE_URL")


class WithTtl(Ledger):
    def init(self, handle: Any) -> None:
        handle.getValueState("account", "count long", 1000)


class WithTimer(Ledger):
    def init(self, handle: Any) -> None:
        handle.registerTimer(5)


class WithBadSchema(Ledger):
    def init(self, handle: Any) -> None:
        handle.getValueState("account", "count lon")


class WithOddType(Ledger):
    def init(self, handle: Any) -> None:
        handle.getValueState("account", "span interval year to month")


class DeclaredTwice(Ledger):
    def init(self, handle: Any) -> None:
        handle.getValueState("account", "count long")
        handle.getListState("account", "count long")


@pytest.mark.parametrize(
    ("make", "error", "kind", "words"),
    [
        (lambda _: WithLock(), ProcessorError, ErrorKind.PROCESSOR_NOT_PICKLABLE, ["WithLock", "in init()"]),
        (WithSession, ProcessorError, ErrorKind.PROCESSOR_NOT_PICKLABLE, ["WithSession", "SparkSession"]),
        (WithBroadcast, ConfigurationError, ErrorKind.UNSUPPORTED_FEATURE, ["broadcast variable", "in init()"]),
        (lambda _: InitFails(), ProcessorError, ErrorKind.PROCESSOR_FAILED, ["InitFails", "DATABASE_URL"]),
        (lambda _: WithTtl(), ConfigurationError, ErrorKind.INVALID_OPTION, ["'account'", "'ProcessingTime'"]),
        (lambda _: WithTimer(), ProcessorError, ErrorKind.STATE_USAGE, ["init() or close() uses timers"]),
        (lambda _: WithBadSchema(), ConfigurationError, ErrorKind.INVALID_OPTION, ["'count lon'", "'account'"]),
        (lambda _: WithOddType(), ConfigurationError, ErrorKind.UNSUPPORTED_STATE_TYPE, ["'account'", "'span'"]),
        (lambda _: DeclaredTwice(), ConfigurationError, ErrorKind.INVALID_OPTION, ["'account' is declared twice"]),
        (lambda _: Ledger, ConfigurationError, ErrorKind.INVALID_OPTION, ["an object, not a class"]),
    ],
    ids=["lock", "session", "broadcast", "init", "ttl", "timer", "schema", "type", "twice", "class"],
)
def test_a_processor_that_cannot_run_is_refused_when_the_query_is_built(
    spark: SparkSession,
    tmp_path: Path,
    make: Callable[[SparkSession], Any],
    error: type[Exception],
    kind: ErrorKind,
    words: list[str],
) -> None:
    job = Job(tmp_path).add(make_orders(1))
    with pytest.raises(error) as failure:
        job.ledger(spark, 2, processor=make(spark))
    assert str(failure.value).endswith(f"[{kind}]")
    for word in words:
        assert word in str(failure.value)


OF_KEY_BY = ("uid", "parallelism", "location", "options", "watermark")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"timeMode": "Sometimes"}, ["'Sometimes'", "'ProcessingTime'"]),
        ({"timeMode": "EventTime", "eventTimeColumnName": "at"}, ["eventTimeColumnName", "withWatermark"]),
        ({"initialState": object()}, ["initialState", "statelog.key_by"]),
        ({"watermark": statelog.Watermark("at")}, ["'at'", "a timestamp column"]),
        ({"outputMode": "sometimes"}, ["'sometimes'", "'append'"]),
        ({"outputStructType": "user strin"}, ["'user strin'"]),
        ({"parallelism": 0}, ["parallelism is 0", "1 to 32768"]),
        ({"uid": ""}, ["uid is ''"]),
        ({"location": 5}, ["location is 5", "It must be a path"]),
        ({"location": " "}, ["location is ' '"]),
        ({"location": "viewfs://host/state"}, ["viewfs", "not supported"]),
        ({"options": {"table": "memory"}}, ["options is {'table': 'memory'}", "statelog.Options(...)"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_argument_that_is_not_supported_is_refused(
    spark: SparkSession, tmp_path: Path, changed: dict[str, Any], words: list[str]
) -> None:
    job = Job(tmp_path).add(make_orders(1))
    arguments: dict[str, Any] = {
        "statefulProcessor": Ledger(),
        "outputStructType": LEDGER,
        "outputMode": "update",
        "timeMode": "None",
    }
    own = {name: value for name, value in changed.items() if name in OF_KEY_BY}
    arguments |= {name: value for name, value in changed.items() if name not in OF_KEY_BY}
    with pytest.raises(ConfigurationError) as failure:
        statelog.key_by(job.read(spark), "user", **own).transformWithState(**arguments)
    for word in words:
        assert word in str(failure.value)


def test_a_table_whose_package_is_missing_is_refused(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path).add(make_orders(1))
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    with pytest.raises(ConfigurationError, match=r"pip install statelog\[rocksdb\]"):
        job.ledger(spark, 2, options=statelog.Options(table="rocksdb"))


@pytest.mark.parametrize("key", ["interval '1' month", "parse_json('1')", "user collate unicode_ci"])
def test_a_key_type_that_is_not_supported_is_refused(spark: SparkSession, tmp_path: Path, key: str) -> None:
    job = Job(tmp_path).add(make_orders(1))
    with pytest.raises(ConfigurationError, match="grouping column 'key'") as failure:
        statelog.key_by(job.read(spark).selectExpr(f"{key} AS key", "*"), "key")
    assert failure.value.kind == ErrorKind.UNSUPPORTED_KEY_TYPE


def test_an_interpreter_of_another_version_is_refused(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path).add(make_orders(1))
    python = tmp_path / "python3.8"
    python.write_text("#!/bin/sh\necho '[[3, 8], []]'\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
    with pytest.raises(
        ConfigurationError, match=f"would run {python}, which is Python 3.8, but the driver runs"
    ) as failure:
        job.ledger(spark, 2)
    assert failure.value.kind is ErrorKind.WORKER_IMPORT
    assert f"here {sys.executable}, before the session is created" in failure.value.hint


def test_event_time_without_a_watermark_is_warned_of_once(spark: SparkSession) -> None:
    def build(stream: DataFrame, **more: Any) -> None:
        statelog.key_by(stream, "value", **more).transformWithState(Ledger(), LEDGER, "update", "EventTime")

    rows = spark.readStream.format("rate").load()
    with pytest.warns(statelog.ConfigurationWarning, match="operator 'main': timeMode is 'EventTime'") as told:
        build(rows)
    (warning,) = told
    assert warning.filename == __file__, "the user's line"
    marked = rows.withWatermark("timestamp", "1 second")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(marked)
        build(rows, watermark=statelog.Watermark("timestamp"))
        build(marked.drop("timestamp"))


# ---- Found when rows are processed ----


class Raises(Ledger):
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        if key[0] == "user-3":
            raise ZeroDivisionError("an account without orders")
        yield from super().handleInputRows(key, rows, timerValues)


class OtherColumns(Ledger):
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        yield Row(name=key[0])


class ReturnsARow(Ledger):
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Any:
        return Row(user=key[0], count=1)


class ReturnsNothing(Ledger):
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Any:
        return None


class WrongOutputType(Ledger):
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in super().handleInputRows(key, rows, timerValues):
            yield Row(**{**row.asDict(), "count": "many"})


class Writes(Ledger):
    """Writes a value that does not fit into a state of (small int, name string)."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def init(self, handle: Any) -> None:
        super().init(handle)
        self._odd = handle.getValueState("odd", "small int, name string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        if key[0] == "user-3":
            self._odd.update(self._value)
        yield from super().handleInputRows(key, rows, timerValues)


@pytest.mark.parametrize(
    ("processor", "kind", "words"),
    [
        (Raises(), ErrorKind.PROCESSOR_FAILED, ["('user-3',)", "ZeroDivisionError: an account without orders"]),
        (OtherColumns(), ErrorKind.OUTPUT_MISMATCH, ["Row(name=", "(user, count, amount, history, items)"]),
        (ReturnsARow(), ErrorKind.OUTPUT_MISMATCH, ["returned str 'user-", "Yield it, or return a list"]),
        (ReturnsNothing(), ErrorKind.OUTPUT_MISMATCH, ["it returned None, not rows. Hint: Yield rows"]),
        (WrongOutputType(), ErrorKind.OUTPUT_MISMATCH, ["'many' for output column 'count' of type bigint"]),
        (Writes(("five", "a")), ErrorKind.VALUE_MISMATCH, ["('user-3',)", "state 'odd'", "'small'", "'five'"]),
        (
            Writes((1,)),
            ErrorKind.VALUE_MISMATCH,
            ["('user-3',)", "state 'odd'", "takes a tuple of 2 (small int, name string)"],
        ),
        (Writes(1), ErrorKind.VALUE_MISMATCH, ["('user-3',)", "state 'odd'", "Give a value for each field"]),
        (Writes((1 << 31, "a")), ErrorKind.VALUE_MISMATCH, ["('user-3',)", "state 'odd'", "'small'", "2147483648"]),
    ],
    ids=[
        "raises",
        "missing column",
        "returned row",
        "nothing",
        "output type",
        "value type",
        "arity",
        "no tuple",
        "overflow",
    ],
)
def test_a_processor_that_fails_on_a_row_is_named_and_the_batch_can_be_repeated(
    spark: SparkSession, tmp_path: Path, processor: Ledger, kind: ErrorKind, words: list[str]
) -> None:
    job = Job(tmp_path).add(make_orders(1, seed=3)[:1])
    job.run(job.ledger(spark, 2))
    job.add(make_orders(1, seed=4, rows=60))
    text = job.fail(job.ledger(spark, 2, processor=processor))
    assert f"[{kind}]" in text
    assert "operator 'main'" in text
    for word in words:
        assert word in text
    job.run(job.ledger(spark, 3))

    job.require_exact()


def test_messages_hide_keys_and_values_on_request(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(make_orders(1, seed=4, rows=60))
    options = statelog.Options(redact_keys=True)
    text = job.fail(job.ledger(spark, 2, processor=Writes(("five", "a")), options=options))
    own = [line for line in text.splitlines() if "operator 'main': handleInputRows() failed" in line]
    assert own
    for line in own:
        assert "failed for key \N{BULLET}" in line
        assert "str \N{BULLET}" in line
        assert "user-3" not in line
        assert "five" not in line


def test_workers_without_statelog_say_which_interpreter_lacks_it(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path).add(make_orders(2, seed=5))
    python = tmp_path / "python-without-statelog"
    hide = "import runpy, sys; sys.modules['statelog'] = None; sys.argv = sys.argv[2:]; "
    run = "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{hide}{run}" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    with monkeypatch.context() as patch:
        patch.setattr(spark.sparkContext, "pythonExec", str(python))
        text = job.fail(job.ledger(spark, 2))
    assert "[worker-import]" in text
    assert f"The Python workers run {sys.executable}, which cannot import statelog" in text
    assert "set PYSPARK_PYTHON" in text
    job.run(job.ledger(spark, 2))

    job.require_exact()


# ---- How grouping columns are named ----


@pytest.mark.parametrize(
    "name",
    [
        lambda df: (["user", "seq"],),
        lambda df: ("USER", "seq"),
        lambda df: (F.col("user"), df.seq),
        lambda df: ([df["user"], "seq"],),
    ],
    ids=["list", "case", "columns", "mixed"],
)
def test_grouping_columns_are_named_as_in_spark(
    spark: SparkSession, name: Callable[[DataFrame], tuple[Any, ...]]
) -> None:
    df = spark.createDataFrame([("ann", 1, 5), ("ann", 1, 6), ("bob", 1, 7)], "user string, seq long, amount long")

    class Count(StatefulProcessor):
        def init(self, handle: Any) -> None:
            pass

        def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
            yield Row(user=key[0], seq=key[1], n=len(list(rows)))

        def close(self) -> None:
            pass

    counted = statelog.key_by(df, *name(df)).transformWithState(
        Count(), "user string, seq long, n long", "update", "None"
    )
    assert sorted(map(tuple, counted.collect())) == [("ann", 1, 2), ("bob", 1, 1)]


def test_keys_that_are_computed(spark: SparkSession) -> None:
    """They become columns in front of the others."""
    df = spark.createDataFrame([("Ann", 1), ("ann", 2), ("BOB", 3)], "user string, seq long")

    class Look(StatefulProcessor):
        def init(self, handle: Any) -> None:
            pass

        def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
            yield Row(key=repr(key), rows=sorted(repr(row) for row in rows))

        def close(self) -> None:
            pass

    stream = statelog.key_by(df, F.lower("user").alias("name"), "seq")
    looked = stream.transformWithState(Look(), "key string, rows array<string>", "update", "None")
    assert sorted(map(tuple, looked.collect())) == [
        ("('ann', 1)", ["Row(name='ann', user='Ann', seq=1)"]),
        ("('ann', 2)", ["Row(name='ann', user='ann', seq=2)"]),
        ("('bob', 3)", ["Row(name='bob', user='BOB', seq=3)"]),
    ]
    counted = statelog.key_by(df, F.lower("user")).window(statelog.CountWindows(2)).agg(statelog.Count())
    assert [tuple(row) for row in counted.collect()] == [("ann", 2)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (lambda df: (), "without a column"),
        (lambda df: ("nobody",), "grouped by nobody"),
        (lambda df: ("user.name",), "grouped by user.name"),
        (lambda df: (F.sum("seq"),), "grouped by"),
        (lambda df: (F.lower("user").alias("user"),), "two columns are named 'user'"),
        (lambda df: (7,), "not 7"),
    ],
    ids=["none", "unknown", "no struct", "aggregate", "doubled", "number"],
)
def test_other_grouping_columns_are_refused(
    spark: SparkSession, name: Callable[[DataFrame], tuple[Any, ...]], words: str
) -> None:
    df = spark.createDataFrame([("ann", 1)], "user string, seq long")
    with pytest.raises(ConfigurationError, match=words):
        statelog.key_by(df, *name(df))
