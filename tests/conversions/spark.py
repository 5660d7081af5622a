"""Asks Spark's own operator: ``./dev python -m tests.conversions.spark``, ten minutes; writes ``spark-4.3*.txt``.

Arguments choose what is asked: ``values`` or ``inputs``.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import cast

from pyspark.serializers import PickleSerializer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.stateful_processor_api_client import StatefulProcessorApiClient
from pyspark.sql.types import DataType, StructType

from tests.conversions.answers import SPARK, SPARK_INPUTS, Answers, write
from tests.conversions.cases import INPUTS, TYPES, VALUES, ZONE, show, value
from tests.conversions.catching import CatchingFrames, CatchingRows
from tests.conversions.probes import STATES, FrameInputProbe, FrameProbe, InputProbe, OutputProbe, StateProbe

Results = dict[str, str]


def session() -> SparkSession:
    """A session in which Spark's own operator runs."""
    return (
        SparkSession.builder.master("local[1]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.sql.session.timeZone", ZONE)
        .config("spark.sql.timeType.enabled", "true")
        .config("spark.task.maxFailures", "1")
        .config("spark.log.level", "OFF")
        .config("spark.ui.showConsoleProgress", "false")
        .config(
            "spark.sql.streaming.stateStore.providerClass",
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
        )
        .getOrCreate()
    )


def of_states(spark: SparkSession, kind: str) -> dict[str, Results]:
    """What becomes of every value in the states of a type, by way.

    Bytes at which the connection to Spark's state broke once are not sent again.
    """
    found: dict[str, Results] = {}
    left = [f"{way}|{text}" for way in STATES for text in VALUES]
    while left:
        left = [item for item in left if _sent(kind, item) not in _breaking]
        if not left:
            break
        with tempfile.NamedTemporaryFile() as log:
            rows = spark.createDataFrame([("k", text) for text in left], "key string, text string").coalesce(1)
            failed = False
            try:
                probe = StateProbe(kind, log.name)
                rows.groupBy("key").transformWithState(probe, "key string", "append", "None").collect()
            except Exception:
                failed = True
            lines = Path(log.name).read_text().splitlines()
        begun = [line[2:] for line in lines if line.startswith("? ")]
        results = [line[2:] for line in lines if line.startswith("= ")]
        if not begun:
            return {way: dict.fromkeys(VALUES, "refused") for way in STATES}
        for item, result in zip(begun, results + ["error"] * (len(begun) - len(results)), strict=True):
            way, _, text = item.partition("|")
            found.setdefault(way, {})[text] = result
        if failed:
            _breaking.add(_sent(kind, begun[-1]))
        left = left[left.index(begun[-1]) + 1 :]
    for way in STATES:
        found[way] = {text: found.get(way, {}).get(text, "error") for text in VALUES}
    return found


_breaking: set[bytes] = set()


def _sent(kind: str, item: str) -> bytes:
    """What Spark's client sends of a value; the item itself if it does not get so far."""
    way, _, text = item.partition("|")
    try:
        schema = cast(StructType, DataType.fromDDL(f"f {kind}"))
        row = value(text) if way.startswith("bare") else (value(text),)
        return _Client()._serialize_to_bytes(schema, row)
    except Exception:
        return item.encode()


class _Client(StatefulProcessorApiClient):
    """A client without a connection."""

    def __init__(self) -> None:
        self.pickleSer = PickleSerializer()


def of_outputs(spark: SparkSession, kind: str, probe: type[OutputProbe]) -> Results:
    """What becomes of every value in an output column of a type."""
    results: Results = {}
    left = list(VALUES)
    while left:
        with tempfile.NamedTemporaryFile() as log:
            grouped = spark.createDataFrame([(text,) for text in left], "text string").coalesce(1).groupBy("text")
            apply: Callable[..., DataFrame] = (
                grouped.transformWithStateInPandas if issubclass(probe, FrameProbe) else grouped.transformWithState
            )
            failed = False
            try:
                found = apply(probe(log.name), f"text string, f {kind}", "append", "None").toArrow()
                results |= {row["text"]: show(row["f"]) for row in found.to_pylist() if row["text"] != "caught"}
            except Exception:
                failed = True
            lines = Path(log.name).read_text().splitlines()
        begun = [line[2:] for line in lines if line.startswith("? ")]
        if not begun:
            return dict.fromkeys(VALUES, "refused")
        results |= {begun[i]: "error" for i in _errors(lines)}
        if failed:
            results[begun[-1]] = "error"
        left = [text for text in left if text not in results] if failed else []
    return {text: results[text] for text in VALUES}


def of_inputs(spark: SparkSession, kind: str, *, in_pandas: bool) -> tuple[Results, Results]:
    """What a processor gets of every value of a type: in a column, and as its key."""
    columns: list[Results] = []
    for key in ("text", "f"):
        try:
            grouped = input_rows(spark, kind).groupBy(key)
            if in_pandas:
                found = grouped.transformWithStateInPandas(FrameInputProbe(), "seen string", "append", "None").collect()
            else:
                found = grouped.transformWithState(InputProbe(), "seen string", "append", "None").collect()
            parts = [row.seen.split("\t") for row in found]
            columns.append({text: key_seen if key == "f" else seen for text, seen, key_seen in parts})
        except Exception:
            columns.append(dict.fromkeys([*INPUTS[kind], "null"], "refused"))
    return columns[0], columns[1]


def input_rows(spark: SparkSession, kind: str) -> DataFrame:
    """A row for each value of a type."""
    rows = [
        spark.sql(f"SELECT '{text.replace(chr(39), chr(92) + chr(39))}' AS text, {text} AS f") for text in INPUTS[kind]
    ]
    rows.append(spark.sql(f"SELECT 'null' AS text, CAST(NULL AS {kind}) AS f"))
    return functools.reduce(DataFrame.union, rows).coalesce(1)


def _errors(lines: list[str]) -> list[int]:
    """Which values' conversions were caught."""
    count, caught = -1, []
    for line in lines:
        if line.startswith("? "):
            count += 1
        else:
            caught.append(count)
    return caught


def main(chosen: list[str]) -> None:
    """Ask for all types."""
    spark = session()
    if "inputs" not in chosen:
        answers: Answers = {}
        for kind in TYPES:
            by_way = of_states(spark, kind)
            by_way["output row"] = of_outputs(spark, kind, CatchingRows)
            by_way["output frame"] = of_outputs(spark, kind, CatchingFrames)
            answers |= {(kind, way, text): result for way, found in by_way.items() for text, result in found.items()}
            print(kind, flush=True)
        write(SPARK, answers)
    if "values" not in chosen:
        inputs: Answers = {}
        for kind in INPUTS:
            for mode, in_pandas in (("row", False), ("frame", True)):
                ways = (f"input {mode}", f"key of {mode}s")
                for way, found in zip(ways, of_inputs(spark, kind, in_pandas=in_pandas), strict=True):
                    inputs |= {(kind, way, text): result for text, result in found.items()}
            print(kind, flush=True)
        write(SPARK_INPUTS, inputs)


if __name__ == "__main__":
    main(sys.argv[1:])
