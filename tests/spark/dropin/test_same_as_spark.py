"""The same processors on Spark's operator and on statelog's: every batch must have the same output.

The output of Spark's is recorded. The extended round runs both, and shows the rows that differ.

What cannot be the same, or should not, is left out of the scenarios:

============================================================  =====================================================
Difference                                                    Reason
============================================================  =====================================================
A handler deletes another timer that is due                   Spark has read the due timers ahead and fires it all
                                                              the same. Deleted is deleted.
Order of ``listTimers``, of a map, of timers across keys      Spark's is that of encoded bytes. Sorted here.
A number of another Python type than its field's              Spark stores null, or wraps around.
A tuple, or a row without names, as an output row             Spark fails. Here they go by position.
More values than fields, one of which is a timestamp          Spark leaves out the rest.
Rows without any of the declared columns                      Spark returns nulls.
Null keys of numbers in pandas mode, null timestamp keys      Spark shows ``nan``; and fails.
A Row within a value                                          Spark 4.1 fails.
Rows with NaN keys                                            Spark calls the processor once per row, with one state.
One key's rows in several calls                               Spark does that with initial state in row mode, when a
                                                              key has more rows than ``maxRecordsPerBatch``.
A pandas column with null in another key's row                Spark infers dtypes per Arrow batch, over all keys.
A digit string in a frame, for a column of numbers             Spark's Arrow cast takes it.
An iterator that is made before, and read after a write       Spark reads when the iterator is used first.
What was written last to a state that ``init`` deletes and    Spark deletes when a batch starts, not when it ends.
then declares, once it is only declared
A value and a list of one name                                Spark keeps both.
Processing time without data, with ``availableNow``           Spark runs batches for ever. Here it is told not to, by
                                                              ``noDataMicroBatches.enabled``.
Error texts                                                   Spark's name its state server.
============================================================  =====================================================
"""

from __future__ import annotations

import datetime
import decimal
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyspark
import pytest
from pyspark.sql import DataFrame, GroupedData, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StructField, StructType

from statelog import ErrorKind
from tests.spark.dropin import processors
from tests.spark.dropin.processors import (
    CONVERSION_PROBES,
    FRAME_RESULTS,
    ROW_RESULTS,
    SEEN,
    STATE_PROBES,
    TYPED,
    UTC,
    Mistake,
)
from tests.spark.dropin.scenarios import (
    SPARK,
    STATELOG,
    Answer,
    Engine,
    Leg,
    Rows,
    Run,
    Scenario,
    add_input,
    rows,
    run_both,
    run_on,
    settings,
)

pytestmark = pytest.mark.spark

ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
IS_4_1 = pyspark.__version__.startswith("4.1.")
"""Spark's own operator fails there with a Row within a value, so scenarios lack that."""
NO_IDLE_BATCHES = {"spark.sql.streaming.noDataMicroBatches.enabled": "false"}
AVRO = {"spark.sql.streaming.stateStore.encodingFormat": "avro"}


@pytest.fixture(scope="module")
def session(spark: SparkSession) -> Iterator[SparkSession]:
    with settings(spark, {"spark.sql.streaming.stateStore.providerClass": ROCKSDB}):
        yield spark


@pytest.fixture
def one_partition(session: SparkSession) -> Iterator[SparkSession]:
    """A failure costs a Python worker for each partition."""
    with settings(session, {"spark.sql.shuffle.partitions": "1"}):
        yield session


# ---- Streams ----


def _states() -> Scenario:
    left_out = {processors.nested_values} if IS_4_1 else set()
    names = [probe.__name__ for probe in STATE_PROBES if probe not in left_out]
    first = rows(*((name, name) for name in names))
    second = rows(*((name, "left") for name in names), *((name, name) for name in names))
    return Scenario([Leg([first, second]), Leg([rows(*((name, "left") for name in names))])], processors.States)


def _conversions() -> Scenario:
    """Of the values that only tests/conversions compares one by one, those that stand for a rule."""
    names = [probe.__name__ for probe in CONVERSION_PROBES]
    return Scenario([Leg([rows(*((name, name) for name in names))])], processors.Converts)


def _large() -> Scenario:
    batch = rows(("list", "large_list"), ("value", "large_value"))
    return Scenario([Leg([batch, batch])], processors.Large)


def _timers_of_processing_time() -> Scenario:
    first = (
        "times",
        "timers_in_the_past",
        "timers_at_odd_times",
        "timer_now",
        "timer_soon",
        "timers_far_away",
        "timer_deleted_before_it_fires",
        "timer_set_again_when_it_fires",
        "timers_set_when_one_fires",
        "handler_writes_state",
    )
    second = (("timers_far_away", "timer_deleted"), ("handler_writes_state", "left"))
    third = [(name, "listed") for name in first]
    return Scenario(
        [
            Leg([rows(*((name, name) for name in first)), rows(*second)]),
            Leg([rows(*third), rows(("other", "times"))]),
        ],
        functools.partial(processors.States, counts_from_now=True),
        output_mode="Update",
        time_mode="processingTime",
        query_mode="update",
        conf=NO_IDLE_BATCHES,
    )


def _event_time() -> Scenario:
    batches = [
        rows(
            ("a", "0 -7 500 1000 1001 2000", 1000),
            ("null", "", None),
            ("b", "", 500),
            ("handler", "500 700/600 100 500 1500 90000", 1),
            ("handler 2", "900/900 x900 3000", 1),
        ),
        rows(
            ("a", "", 900),
            ("b", "999 1000 1001", 1000),
            ("null", "", None),
            ("c", "", 999),
            ("moves the watermark", "", 2000),
        ),
        rows(("late", "1 2", 999), ("late", "", 1000), ("d", "5", 1001), ("null", "", None), ("late a", "", 1000)),
        rows(("a", "x2000", 3000), ("late", "", 1999), ("late", "", 2000), ("d", "7000 x8000", 2001)),
        rows(("a", "20000", 10_000), ("null", "", None)),
        rows(("late", "", 2999), ("b", "", 3001)),
        rows(("a", "", 30_000)),
    ]
    return Scenario(
        [Leg(batches[:4]), Leg(batches[4:])],
        processors.EventTimers,
        time_mode="EventTime",
        watermark=("at", "0 seconds"),
    )


def _event_time_with_delay() -> Scenario:
    batches = [
        rows(("a", "2000 4000", 5000), ("b", "", 1)),
        rows(("a", "", 3000), ("b", "2999 3000 3001", 2999), ("c", "", 4000)),
        rows(("a", "", 2000), ("a", "", 3001), ("b", "", 9000), ("b", "", 3000)),
        rows(("c", "", 7000), ("b", "6999", 7001)),
    ]
    return Scenario(
        [Leg(batches)],
        processors.EventTimersOfFrames,
        time_mode="EventTime",
        watermark=("at", "2 seconds"),
        uses_frames=True,
    )


def _without_a_watermark() -> Scenario:
    batches = [rows(("a", "0 -1 1 10", 1000)), rows(("a", "", 1))]
    return Scenario([Leg(batches)], processors.EventTimers, time_mode="EventTime")


def _watermark_in(time_mode: str) -> Scenario:
    batches = [rows(("a", "times", at)) for at in (1000, 5000, 1)]
    return Scenario(
        [Leg(batches)],
        processors.States,
        output_mode="complete",
        time_mode=time_mode,
        watermark=("at", "0 seconds"),
        conf=NO_IDLE_BATCHES,
    )


EMITTED = "key string, seen string, time timestamp"
_EMITS = [
    rows(("a", "1000 100 2500 null", 1000)),
    rows(("a", "2001 5000", 2000), ("b", "2002", 1500)),
    rows(("b", "3000", 4000)),
    rows(("c", "8000", 8000), ("late", "8000", 2000)),
]


def _count_by_second(_: Engine, df: DataFrame) -> DataFrame:
    counts = df.groupBy(F.window("time", "1 second")).count()
    return counts.select(F.col("window.start").cast("string").alias("start"), "count")


def _second_operator(engine: Engine, df: DataFrame) -> DataFrame:
    return engine.apply(df, ("key",), processors.Follows(), SEEN, "append", "EventTime", uid="second")


def _into(then: Callable[[Engine, DataFrame], DataFrame]) -> Scenario:
    return Scenario(
        [Leg(_EMITS)],
        processors.Emits,
        output=EMITTED,
        time_mode="EventTime",
        event_time_column="time",
        watermark=("at", "0 seconds"),
        then=then,
    )


def _emits_what_is_late() -> Scenario:
    batches = [rows(("a", "1000", 1000)), rows(("a", "1000", 2000)), rows(("a", "1001", 2001))]
    return Scenario(
        [Leg(batches), Leg([rows(("a", "2000", 3000))], fails=True)],
        processors.Emits,
        output=EMITTED,
        time_mode="EventTime",
        event_time_column="time",
        watermark=("at", "0 seconds"),
    )


def _expiry() -> Scenario:
    batches = [
        rows(("a", "ttl_write"), ("b", "ttl_write"), ("c", "ttl_write"), ("d", "ttl_write")),
        rows(("a", "ttl_read"), ("b", "ttl_write_a_part"), ("c", "ttl_touch"), ("d", "ttl_write")),
        rows(*((key, "ttl_read") for key in "abcd")),
    ]
    return Scenario(
        [Leg(batches[:2]), Leg(batches[2:])], processors.Expiring, time_mode="ProcessingTime", conf=NO_IDLE_BATCHES
    )


def _initial_rows(session: SparkSession, names: str) -> DataFrame:
    held = [("a", 1, "x"), ("a", 2, "y"), ("c", 3, None), ("a", 4, "w"), (None, 5, "null"), ("d", 6, "")]
    return session.createDataFrame(held, names)


def _initial_state(*, uses_frames: bool) -> Scenario:
    batches = [rows(("a", ""), ("a", ""), ("b", "")), rows(("c", ""), ("a", ""), (None, ""))]
    names = "name string, number long, word string" if uses_frames else "key string, number long, word string"
    return Scenario(
        [Leg(batches), Leg([rows(("c", ""), ("d", ""))])],
        processors.InitialFrames if uses_frames else functools.partial(processors.Initial, sets_timers=True),
        time_mode="None" if uses_frames else "ProcessingTime",
        initial=functools.partial(_initial_rows, names=names),
        initial_keys=("name",) if uses_frames else ("key",),
        uses_frames=uses_frames,
        conf=NO_IDLE_BATCHES,
    )


_FULL: dict[str, Any] = {
    "long": 5,
    "int": -1,
    "short": 2,
    "double": 0.5,
    "float": 0.25,
    "flag": True,
    "text": "ä",
    "bytes": b"\0",
    "exact": decimal.Decimal("1.50"),
    "day": datetime.date(1960, 2, 3),
    "at": datetime.datetime(2024, 1, 2, 3, 4, 5, 678, tzinfo=UTC),
    "wall": datetime.datetime(1960, 1, 2, 3, 4, 5),
    "pair": {"number": 1, "word": "x"},
    "array": [1, 2],
    "map": [("a", 1)],
}
_TYPES = pa.schema(
    {
        "k": pa.int64(),
        "long": pa.int64(),
        "int": pa.int32(),
        "short": pa.int16(),
        "double": pa.float64(),
        "float": pa.float32(),
        "flag": pa.bool_(),
        "text": pa.string(),
        "bytes": pa.binary(),
        "exact": pa.decimal128(10, 2),
        "day": pa.date32(),
        "at": pa.timestamp("us", tz="UTC"),
        "wall": pa.timestamp("us"),
        "pair": pa.struct({"number": pa.int64(), "word": pa.string()}),
        "array": pa.list_(pa.int64()),
        "map": pa.map_(pa.string(), pa.int64()),
    }
)
_NULLS = dict.fromkeys(_FULL)
_NESTED = ("array", "map")


def _rows_of_all_types(*, uses_frames: bool) -> Scenario:
    batches: list[Rows] = [
        [{"k": 1} | _FULL, {"k": 1} | _FULL | {"long": 2**60, "text": ""}],
        [{"k": 1} | _FULL, {"k": 1} | _NULLS],
        [{"k": 1} | _NULLS],
    ]
    return Scenario(
        [Leg(batches)],
        processors.LooksAtFrames if uses_frames else processors.LooksAtRows,
        keys=("k",),
        uses_frames=uses_frames,
        schema=_TYPES,
        columns=[],
    )


def _keys_of_all_types(*, uses_frames: bool) -> Scenario:
    """One key with a column of each type. Null numbers and times are left out in pandas mode."""
    nullable = ("text", "bytes", "exact", "day", "pair") if uses_frames else tuple(_FULL)
    keys = [_FULL, _FULL | dict.fromkeys(nullable), _FULL | {"double": -0.0}, _FULL | {"double": 0.0}]
    keys += [_FULL | {name: None} for name in nullable if name not in _NESTED]
    if not uses_frames:
        keys += [_FULL | {"double": float("nan")}, _FULL | {"double": float("-inf")}]
    batch = [{"k": 1} | key for key in keys]
    return Scenario(
        [Leg([batch, batch[:3]])],
        processors.CountsKeysOfFrames if uses_frames else processors.CountsKeys,
        keys=tuple(reversed([name for name in _FULL if name not in _NESTED])),
        uses_frames=uses_frames,
        schema=_TYPES,
        columns=[],
    )


def _declarations() -> Scenario:
    def leg(name: str, states: list[str], deleted: list[str], batches: int = 1) -> Leg:
        make = functools.partial(processors.Declares, states, deleted)
        return Leg([rows(("a", f"{name} {number}")) for number in range(batches)], make)

    return Scenario(
        [
            leg("first", ["v", "list", "w"], []),
            leg("without a list", ["w", "v"], [], 2),
            leg("with it again", ["v", "list"], ["unknown"]),
            leg("deleted", ["v"], ["list", "w"], 2),
            leg("declared again", ["v", "list", "w", "x"], [], 2),
        ],
        functools.partial(processors.Declares, [], []),
    )


def _deleted_by_their_own_init() -> Scenario:
    orders = ("declare", "declare delete", "declare", "delete declare delete", "declare", "delete declare")
    batches = [rows(("a", ""), ("b", "")), rows(("a", ""))]
    legs = [Leg(batches, functools.partial(processors.DeletesOwn, order)) for order in orders]
    return Scenario(legs, functools.partial(processors.DeletesOwn, "declare"))


def _evolution() -> Scenario:
    def leg(schema: str, value: tuple[Any, ...], **more: Any) -> Leg:
        fails = more.pop("fails", False)
        return Leg([rows(("a", ""))], functools.partial(processors.Evolves, schema, value, **more), fails)

    return Scenario(
        [
            leg("number int, word string, pair struct<a:int>, single float", (1, "a", (1,), 0.5)),
            leg("number long, word string, pair struct<a:int>, single float", (2**40, "b", (2,), 0.5)),
            leg("more date, single double, pair struct<a:int,b:string>", (datetime.date(2024, 1, 2), 1.5, (3, "c"))),
            leg("single double, number double, word string, pair struct<b:string>", (2.5, 3.5, "d", ("e",))),
            leg("single float, number double", (2.5, 3.5), fails=True),
            leg("single double, number double, word string", (1.0, 1.0, "a"), map_key="word string", fails=True),
        ],
        functools.partial(processors.Evolves, "", ()),
        conf=AVRO,
    )


SCENARIOS: dict[str, Callable[[], Scenario]] = {
    "states": _states,
    "states in pandas mode": lambda: replace(_states(), processor=processors.Frames, uses_frames=True),
    "large states": _large,
    "values of other types": _conversions,
    "timers of processing time": _timers_of_processing_time,
    "event time": _event_time,
    "event time with a delay, in pandas mode": _event_time_with_delay,
    "event time without a watermark": _without_a_watermark,
    "a watermark in processing time": lambda: _watermark_in("ProcessingTime"),
    "a watermark without time mode": lambda: _watermark_in("NONE"),
    "into a native aggregation": lambda: _into(_count_by_second),
    "into a second operator": lambda: _into(_second_operator),
    "emits what is late": _emits_what_is_late,
    "expiry": _expiry,
    "initial state": lambda: _initial_state(uses_frames=False),
    "initial state in pandas mode": lambda: _initial_state(uses_frames=True),
    "rows of all types": lambda: _rows_of_all_types(uses_frames=False),
    "frames of all types": lambda: _rows_of_all_types(uses_frames=True),
    "keys of all types": lambda: _keys_of_all_types(uses_frames=False),
    "keys of all types in pandas mode": lambda: _keys_of_all_types(uses_frames=True),
    "declarations": _declarations,
    "states that their own init deletes": _deleted_by_their_own_init,
    "schema evolution": _evolution,
}


SMOKE = {"states", "states in pandas mode", "timers of processing time"}
RECORDED = Path(__file__).with_name("recorded.json")
"""Digests of the batches that Spark's own operator returned in each scenario, written by record.py."""

every_scenario = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.smoke if name in SMOKE else ()) for name in SCENARIOS]
)


def digests(answer: Answer) -> dict[str, str]:
    """A digest of each batch's rows."""
    return {str(batch): hashlib.sha256(repr(found).encode()).hexdigest()[:16] for batch, found in answer.items()}


@every_scenario
@pytest.mark.skipif(IS_4_1, reason="the scenarios there lack a probe, so their output is another one")
def test_every_batch_is_as_recorded(session: SparkSession, tmp_path: Path, name: str) -> None:
    """Without Spark's own operator, which would take most of the time; the next test runs it."""
    [found], failures = run_on([STATELOG], session, SCENARIOS[name](), tmp_path)

    assert digests(found) == json.loads(RECORDED.read_text())[name], "test_every_batch_is_the_same shows the rows"
    for text in failures:
        require_own_error(text)


@every_scenario
@pytest.mark.extended
@pytest.mark.skipif(not hasattr(GroupedData, "transformWithState"), reason="Spark has no operator for rows")
def test_every_batch_is_the_same(session: SparkSession, tmp_path: Path, name: str) -> None:
    expected, found, failures = run_both(session, SCENARIOS[name](), tmp_path)

    require_same(expected, found)
    for text in failures:
        require_own_error(text)
    assert IS_4_1 or digests(expected) == json.loads(RECORDED.read_text())[name], "run tests.spark.dropin.record"


def require_same(expected: Answer, found: Answer) -> None:
    """All batches have the same rows; else show those that differ."""
    lines = []
    for batch in sorted({*expected, *found}):
        ours, theirs = list(found.get(batch, [])), list(expected.get(batch, []))
        for row in list(ours):
            if row in theirs:
                ours.remove(row)
                theirs.remove(row)
        lines += [f"batch {batch} spark:    {row}" for row in theirs]
        lines += [f"batch {batch} statelog: {row}" for row in ours]
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


def require_own_error(text: str) -> None:
    """A failure shows one of statelog's errors."""
    assert re.search(rf"\[({'|'.join(ErrorKind)})\]", text), text


@pytest.mark.parametrize(
    "engine", [pytest.param(SPARK, marks=pytest.mark.extended), STATELOG], ids=lambda engine: engine.name
)
def test_a_processor_lives_for_a_batch(session: SparkSession, tmp_path: Path, engine: Engine) -> None:
    (tmp_path / "input").mkdir()
    log = tmp_path / "log"
    scenario = Scenario([], functools.partial(processors.Attributes, str(log)))
    run = Run(session, scenario, engine, tmp_path)
    add_input(tmp_path, scenario.schema, [rows((key, "")) for key in "aab"])
    run.start(Leg([])).awaitTermination()

    assert run.answer == {0: [("a", "1")], 1: [("a", "1")], 2: [("b", "1")]}
    lines = log.read_text().splitlines()
    assert lines.count("init 0") == len(lines) / 2
    assert lines.count("close 1") == 3
    assert lines.count("close 0") + 3 == lines.count("init 0")


# ---- Batch queries ----


def _in_batch(
    session: SparkSession, engine: Engine, keys: list[str], processor: StatefulProcessor, *arguments: str, **more: Any
) -> list[tuple[Any, ...]]:
    df = session.createDataFrame(
        [(key, number, key) for number, key in enumerate(keys)], "key string, seq long, probe string"
    )
    return sorted((tuple(row) for row in engine.apply(df, ("key",), processor, *arguments, **more).collect()), key=repr)


@pytest.mark.parametrize("time_mode", ["None", "ProcessingTime", "EventTime"])
def test_times_of_a_batch_query(session: SparkSession, time_mode: str) -> None:
    keys = ["times"]
    if time_mode != "None":
        keys += ["timers_in_the_past", "timer_now", "timers_far_away", "timer_set_again_when_it_fires"]
    processor = processors.States(counts_from_now=True)
    expected, found = (
        _in_batch(session, engine, keys, processor, SEEN, "update", time_mode) for engine in (SPARK, STATELOG)
    )
    require_same({0: expected}, {0: found})


def test_initial_state_of_a_batch_query(session: SparkSession) -> None:
    initial = _initial_rows(session, "key string, number long, word string")
    expected, found = (
        _in_batch(session, engine, ["a", "a", "b"], processors.Initial(), SEEN, "append", "None", initial=initial)
        for engine in (SPARK, STATELOG)
    )
    require_same({0: expected}, {0: found})


@pytest.mark.parametrize(
    ("results", "uses_frames"), [(ROW_RESULTS, False), (FRAME_RESULTS, True)], ids=["rows", "frames"]
)
def test_results(session: SparkSession, results: dict[str, Any], uses_frames: bool) -> None:
    expected, found = (
        _in_batch(
            session,
            engine,
            list(results),
            processors.Returns(results),
            TYPED,
            "append",
            "None",
            uses_frames=uses_frames,
        )
        for engine in (SPARK, STATELOG)
    )
    require_same({0: expected}, {0: found})


GROUPINGS: dict[str, Callable[[DataFrame], tuple[Any, ...]]] = {
    "other case": lambda df: ("KEY", "seq"),
    "other order": lambda df: ("seq", "key"),
    "list": lambda df: (["key", "seq"],),
    "twice": lambda df: ("key", "key"),
    "columns": lambda df: (df.key, F.col("Seq")),
    "field of a struct": lambda df: ("pair.word", "seq"),
    "field of a struct in another case": lambda df: (F.col("PAIR.Word"),),
}


@pytest.mark.parametrize("name", GROUPINGS)
def test_grouping_columns_are_named_as_in_spark(session: SparkSession, name: str) -> None:
    df = session.createDataFrame(
        [("a", 1, ("x", 2)), ("b", 1, ("x", 3)), ("a", 1, ("y", 3))],
        "key string, seq long, pair struct<word: string, number: long>",
    )
    keys = GROUPINGS[name](df)
    expected, found = (
        sorted(map(tuple, engine.apply(df, keys, processors.LooksAtRows(), SEEN, "append", "None").collect()))
        for engine in (SPARK, STATELOG)
    )
    require_same({0: expected}, {0: found})


def test_frames_are_cut_by_number_of_rows(session: SparkSession) -> None:
    keys = ["ten"] * 10 + ["three"] * 3 + ["part"] * 5
    with settings(session, {"spark.sql.execution.arrow.maxRecordsPerBatch": "3"}):
        expected, found = (
            _in_batch(session, engine, keys, processors.Chunks(), SEEN, "append", "None", uses_frames=True)
            for engine in (SPARK, STATELOG)
        )
    require_same({0: expected}, {0: found})


def test_the_schema_of_the_result(session: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "0.json").write_text("{}")
    stream = session.readStream.schema("key string, at timestamp").json(str(tmp_path)).withWatermark("at", "1 second")
    results = {}
    for column in ("", "time", "TIME"):
        results[column] = [
            engine.apply(
                stream, ("key",), processors.Emits(), EMITTED, "append", "EventTime", eventTimeColumnName=column
            ).schema
            for engine in (SPARK, STATELOG)
        ]
    for name, (expected, found) in results.items():
        assert _with_metadata(found) == _with_metadata(expected), name


def _with_metadata(schema: StructType) -> list[tuple[StructField, dict[str, Any]]]:
    return [(column, column.metadata) for column in schema]


# ---- Mistakes ----


@dataclass(frozen=True)
class Case:
    """A mistake, and how it is made."""

    processor: Mistake = field(default_factory=Mistake)
    time_mode: str = "None"
    output_mode: str = "append"
    output: str = "key string, number long"
    keys: tuple[Any, ...] = ("key",)
    uses_frames: bool = False
    event_time: str = ""
    initial_keys: tuple[str, ...] | None = None


def _init(mistake: Callable[[Any], Any], time_mode: str = "None") -> Case:
    return Case(Mistake(init=mistake), time_mode)


def _use(mistake: Callable[[Any], Any], time_mode: str = "None") -> Case:
    return Case(Mistake(use=mistake), time_mode)


def _row(**columns: Any) -> Case:
    return Case(Mistake(returns=lambda: [Row(**columns)]))


def _rows(result: Any) -> Case:
    return Case(Mistake(returns=lambda: result))


def _frames(result: Any) -> Case:
    return Case(Mistake(returns=lambda: result), uses_frames=True)


_TOO_MUCH = decimal.Decimal("12345.6")
_AFRAME = pd.DataFrame({"key": ["a"], "number": [1]})
CASES: dict[str, Case] = {
    "ttl without time mode": _init(lambda handle: handle.getValueState("v", "a long", 1)),
    "negative ttl": _init(lambda handle: handle.getMapState("v", "a long", "a long", -1), "ProcessingTime"),
    "ttl of a float": _init(lambda handle: handle.getValueState("v", "a long", 1.5), "ProcessingTime"),
    "declared twice": _init(lambda handle: handle.getValueState("value", "a long")),
    "name with a dollar": _init(lambda handle: handle.getValueState("$v", "a long")),
    "unknown type": _init(lambda handle: handle.getValueState("v", "a lon")),
    "type without fields": _init(lambda handle: handle.getValueState("v", "long")),
    "timer in init": _init(lambda handle: handle.registerTimer(1), "ProcessingTime"),
    "state used in init": _init(lambda handle: handle.getValueState("v", "a long").get()),
    "declared outside init": _use(lambda self: self.handle.getValueState("v", "a long")),
    "deleted outside init": _use(lambda self: self.handle.deleteIfExists("value")),
    "timer without time mode": _use(lambda self: self.handle.registerTimer(1)),
    "timers listed without time mode": _use(lambda self: list(self.handle.listTimers())),
    "timer that is no integer": _use(lambda self: self.handle.registerTimer("1"), "ProcessingTime"),
    "too few values": _use(lambda self: self.value.update((1,))),
    "too many values": _use(lambda self: self.list.appendValue((1, 2))),
    "None as value": _use(lambda self: self.value.update(None)),
    "None as element": _use(lambda self: self.list.appendValue(None)),
    "empty list put": _use(lambda self: self.list.put([])),
    "part of a map key": _use(lambda self: self.map.updateValue((1,), (1,))),
    "too large a decimal": _use(lambda self: self.value.update((1, _TOO_MUCH, None))),
    "number as timestamp": _use(lambda self: self.value.update((1, None, 5))),
    "no iterator": _rows(None),
    "text for long": _row(key="a", number="many"),
    "array for text": _row(key=[1], number=1),
    "an exception": Case(Mistake(returns=processors.failing_rows)),
    "no frames": _frames(None),
    "a frame instead of frames": _frames(_AFRAME),
    "row instead of frame": _frames([Row(key="a", number=1)]),
    "column missing": _frames([_AFRAME[["key"]]]),
    "column of another case": _frames([_AFRAME.rename(columns={"key": "KEY"})]),
    "position missing": _frames([pd.DataFrame([["a"]])]),
    "names and positions": _frames([pd.DataFrame([["a", 1]], columns=["key", 1])]),
    "fraction for long": _frames([pd.DataFrame({"key": ["a"], "number": [1.5]})]),
    "text for long in a frame": _frames([pd.DataFrame({"key": ["a"], "number": ["many"]})]),
    "array for text in a frame": _frames([pd.DataFrame({"key": [[1]], "number": [1]})]),
    "overflow in a frame": replace(
        _frames([pd.DataFrame({"key": ["a"], "number": [2**40]})]), output="key string, number int"
    ),
    "unknown time mode": Case(time_mode="sometimes"),
    "unknown output mode": Case(output_mode="sometimes"),
    "unknown output type": Case(output="key strin"),
    "unknown key": Case(keys=("nobody",)),
    "no key": Case(keys=()),
    "key of an expression": Case(keys=("seq % 2",)),
    "event time without watermark": Case(output=EMITTED, event_time="time"),
    "initial state with more keys": Case(initial_keys=("key", "number")),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(SPARK, marks=pytest.mark.extended),
        replace(STATELOG, own_arguments=lambda uid: {"parallelism": 1}),
    ],
    ids=lambda engine: engine.name,
)
def test_mistakes_fail_on_both(one_partition: SparkSession, engine: Engine, name: str) -> None:
    session = one_partition
    case = CASES[name]
    df = session.createDataFrame([("a", 1)], "key string, seq long").coalesce(1)
    initial = session.createDataFrame([("a", 1)], "key string, number long") if case.initial_keys else None
    with pytest.raises(Exception) as failure:  # noqa: PT011 - Spark raises many kinds
        engine.apply(
            df,
            case.keys,
            case.processor,
            case.output,
            case.output_mode,
            case.time_mode,
            uses_frames=case.uses_frames,
            initial=initial,
            initial_keys=case.initial_keys,
            eventTimeColumnName=case.event_time,
        ).collect()

    if engine.name == "statelog":
        require_own_error(str(failure.value))
