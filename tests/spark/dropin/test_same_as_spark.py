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

import decimal
import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import DataFrame, GroupedData, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StructField, StructType

from statelog import ErrorKind
from tests.spark.dropin import processors
from tests.spark.dropin.processors import (
    FRAME_RESULTS,
    ROW_RESULTS,
    SEEN,
    TYPED,
    Mistake,
)
from tests.spark.dropin.same_as_spark_support import (
    EMITTED,
    IS_4_1,
    RECORDED,
    ROCKSDB,
    SCENARIOS,
    digests,
    initial_rows,
    require_same,
)
from tests.spark.dropin.scenarios import (
    SPARK,
    STATELOG,
    Engine,
    Leg,
    Run,
    Scenario,
    add_input,
    rows,
    run_both,
    run_on,
    settings,
)

pytestmark = pytest.mark.spark


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


SMOKE = {"states", "states in pandas mode", "timers of processing time"}

every_scenario = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.smoke if name in SMOKE else ()) for name in SCENARIOS]
)


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
    initial = initial_rows(session, "key string, number long, word string")
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
    "timer that is not an integer": _use(lambda self: self.handle.registerTimer("1"), "ProcessingTime"),
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
