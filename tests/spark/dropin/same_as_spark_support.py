"""What the tests of :mod:`tests.spark.dropin.test_same_as_spark` and others share."""

from __future__ import annotations

import datetime
import decimal
import functools
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.spark.dropin import processors
from tests.spark.dropin.processors import (
    CONVERSION_PROBES,
    SEEN,
    STATE_PROBES,
    UTC,
)
from tests.spark.dropin.scenarios import (
    Answer,
    Engine,
    Leg,
    Rows,
    Scenario,
    rows,
)

ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


IS_4_1 = pyspark.__version__.startswith("4.1.")
"""Spark's own operator fails there with a Row within a value, so scenarios lack that."""


NO_IDLE_BATCHES = {"spark.sql.streaming.noDataMicroBatches.enabled": "false"}


AVRO = {"spark.sql.streaming.stateStore.encodingFormat": "avro"}


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


def initial_rows(session: SparkSession, names: str) -> DataFrame:
    held = [("a", 1, "x"), ("a", 2, "y"), ("c", 3, None), ("a", 4, "w"), (None, 5, "null"), ("d", 6, "")]
    return session.createDataFrame(held, names)


def _initial_state(*, uses_frames: bool) -> Scenario:
    batches = [rows(("a", ""), ("a", ""), ("b", "")), rows(("c", ""), ("a", ""), (None, ""))]
    names = "name string, number long, word string" if uses_frames else "key string, number long, word string"
    return Scenario(
        [Leg(batches), Leg([rows(("c", ""), ("d", ""))])],
        processors.InitialFrames if uses_frames else functools.partial(processors.Initial, sets_timers=True),
        time_mode="None" if uses_frames else "ProcessingTime",
        initial=functools.partial(initial_rows, names=names),
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


RECORDED = Path(__file__).with_name("recorded.json")
"""Digests of the batches that Spark's own operator returned in each scenario, written by record.py."""


def digests(answer: Answer) -> dict[str, str]:
    """A digest of each batch's rows."""
    return {str(batch): hashlib.sha256(repr(found).encode()).hexdigest()[:16] for batch, found in answer.items()}


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
