"""Scenarios: what goes through an operator, and a way to run one on both engines at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StreamingQuery

import statelog
from tests.spark.dropin.processors import SEEN
from tests.spark.inputs import add_file, add_json
from tests.spark.support import start_until_idle

INPUT = "key string, seq long, at_ms long, probe string"

Rows = list[dict[str, Any]]
Answer = dict[int, list[tuple[Any, ...]]]
"""The output rows of each batch that has some."""


@dataclass(frozen=True)
class Engine:
    """Spark's operator or statelog's.

    Parameters
    ----------
    name : str
        Its name.
    group : callable
        What makes the object that ``transformWithState`` is called on of a DataFrame and names of columns.
    own_arguments : callable
        Further arguments of it, of the name that an operator has in a query.
    """

    name: str
    group: Callable[..., Any]
    own_arguments: Callable[[str], dict[str, Any]]

    def apply(
        self,
        df: DataFrame,
        keys: tuple[str, ...],
        processor: StatefulProcessor,
        *arguments: Any,
        uses_frames: bool = False,
        initial: DataFrame | None = None,
        initial_keys: tuple[str, ...] | None = None,
        uid: str = "main",
        **more: Any,
    ) -> DataFrame:
        """The operator's output; `arguments` are its output type, output mode and time mode."""
        grouped = self.group(df, *keys, **self.own_arguments(uid))
        method = grouped.transformWithStateInPandas if uses_frames else grouped.transformWithState
        state = None if initial is None else self.group(initial, *(initial_keys or keys))
        result: DataFrame = method(processor, *arguments, initialState=state, **more)
        return result


SPARK = Engine("spark", lambda df, *keys: df.groupBy(*keys), lambda uid: {})
STATELOG = Engine("statelog", statelog.key_by, lambda uid: {"uid": uid, "parallelism": 2})


@dataclass(frozen=True)
class Leg:
    """A run of the query, from one start to the end of its input.

    Parameters
    ----------
    batches : list of Rows
        The new input: a file per batch.
    processor : callable or None
        What makes the processor, if it is another one than the scenario's.
    fails : bool
        Whether the run must fail.
    """

    batches: list[Rows]
    processor: Callable[[], StatefulProcessor] | None = None
    fails: bool = False


@dataclass(frozen=True)
class Scenario:
    """A query with one stateful operator, or more.

    Parameters
    ----------
    legs : list of Leg
        Its runs.
    processor : callable
        What makes the processor.
    output, output_mode, time_mode, event_time_column : str
        The operator's arguments.
    keys : tuple of str
        The grouping columns.
    uses_frames : bool
        Whether the processor takes pandas frames.
    schema : str or pyarrow.Schema
        Type of the input rows: of JSON files or of Parquet files.
    columns : list of str
        Expressions that make the operator's input of them.
    watermark : tuple of str or None
        Column and delay.
    initial : callable or None
        What makes the initial state.
    then : callable or None
        What comes after the operator.
    query_mode : str
        The query's output mode.
    conf : dict
        Settings of the session.
    """

    legs: list[Leg]
    processor: Callable[[], StatefulProcessor]
    output: str = SEEN
    output_mode: str = "append"
    time_mode: str = "None"
    event_time_column: str = ""
    keys: tuple[str, ...] = ("key",)
    uses_frames: bool = False
    schema: str | pa.Schema = INPUT
    columns: list[str] = field(default_factory=lambda: ["key", "seq", "timestamp_millis(at_ms) AS at", "probe"])
    watermark: tuple[str, str] | None = None
    initial: Callable[[SparkSession], DataFrame] | None = None
    initial_keys: tuple[str, ...] | None = None
    then: Callable[[Engine, DataFrame], DataFrame] | None = None
    query_mode: str = "append"
    conf: dict[str, str] = field(default_factory=dict)


def rows(*probes: tuple[Any, ...]) -> Rows:
    """Input rows of ``(key, probe)`` or ``(key, probe, milliseconds)``."""
    return [
        {"key": key, "seq": seq, "probe": text, "at_ms": at[0] if at else 0}
        for seq, (key, text, *at) in enumerate(probes)
    ]


# ---- Running ----


class Run:
    """A scenario on one engine: its query, and the output of all batches so far."""

    def __init__(self, session: SparkSession, scenario: Scenario, engine: Engine, folder: Path) -> None:
        self._session, self._scenario, self._engine, self._folder = session, scenario, engine, folder
        self.answer: Answer = {}

    def start(self, leg: Leg) -> StreamingQuery:
        """Start the query over all input that is there."""
        writer = self.plan(leg.processor or self._scenario.processor).writeStream.outputMode(self._scenario.query_mode)
        checkpoint = str(self._folder / self._engine.name)
        return start_until_idle(writer.foreachBatch(self._save).option("checkpointLocation", checkpoint))

    def plan(self, make: Callable[[], StatefulProcessor]) -> DataFrame:
        """The query's output, with a processor."""
        scenario = self._scenario
        reader = self._session.readStream.option("maxFilesPerTrigger", 1)
        source = str(self._folder / "input")
        if isinstance(scenario.schema, str):
            df = reader.schema(scenario.schema).json(source)
        else:
            df = reader.schema(self._session.read.parquet(source).schema).parquet(source)
        if scenario.columns:
            df = df.selectExpr(*scenario.columns)
        if scenario.watermark:
            df = df.withWatermark(*scenario.watermark)
        result = self._engine.apply(
            df,
            scenario.keys,
            make(),
            scenario.output,
            scenario.output_mode,
            scenario.time_mode,
            uses_frames=scenario.uses_frames,
            initial=scenario.initial(self._session) if scenario.initial else None,
            initial_keys=scenario.initial_keys,
            eventTimeColumnName=scenario.event_time_column,
        )
        return scenario.then(self._engine, result) if scenario.then else result

    def _save(self, df: DataFrame, batch: int) -> None:
        found = sorted((tuple(row) for row in df.collect()), key=repr)
        if found:
            self.answer[batch] = found


def run_both(session: SparkSession, scenario: Scenario, folder: Path) -> tuple[Answer, Answer, list[str]]:
    """Run a scenario on both engines at the same time.

    Returns
    -------
    tuple
        Spark's output, statelog's output, and the texts of statelog's failures in legs that must fail.
    """
    (expected, found), failures = run_on((SPARK, STATELOG), session, scenario, folder)
    return expected, found, failures


def run_on(
    engines: Sequence[Engine], session: SparkSession, scenario: Scenario, folder: Path
) -> tuple[list[Answer], list[str]]:
    """Run a scenario on some engines at the same time.

    Returns
    -------
    tuple
        The output of each, and the texts of the last one's failures in legs that must fail.
    """
    (folder / "input").mkdir(parents=True)
    runs = [Run(session, scenario, engine, folder) for engine in engines]
    failures: list[str] = []
    with settings(session, scenario.conf):
        for leg in scenario.legs:
            add_input(folder, scenario.schema, leg.batches)
            queries = [_started(run, leg) for run in runs]
            texts = [query if isinstance(query, str) else _outcome(query) for query in queries]
            if leg.fails:
                assert all(texts), f"fails on one engine only: {' '.join(map(brief, texts))}"
                failures.append(texts[-1])
            else:
                named = zip([engine.name for engine in engines], texts, strict=True)
                assert not any(texts), ", ".join(f"{name}: {brief(text)}" for name, text in named)
    return [run.answer for run in runs], failures


def _started(run: Run, leg: Leg) -> StreamingQuery | str:
    """The query, or the text of the error that it cannot be planned."""
    try:
        return run.start(leg)
    except statelog.StatelogError as error:
        return str(error)


def _outcome(query: StreamingQuery) -> str:
    """Wait for a query; the text of its failure, empty if there is none."""
    try:
        query.awaitTermination()
    except StreamingQueryException as error:
        return str(error)
    return ""


def brief(text: str) -> str:
    """The errors that the text of a failure names."""
    lines = dict.fromkeys(
        line for line in text.splitlines() if re.match(r"[\w.]*(Error|Exception)\b|\[[A-Z_.]+\]", line)
    )
    return "\n".join(line[:1000] for line in lines) or text[:1000]


def add_input(folder: Path, schema: str | pa.Schema, batches: list[Rows]) -> None:
    """Add input, a file per batch."""
    if isinstance(schema, str):
        add_json(folder / "input", batches)
        return
    for batch in batches:
        table = pa.Table.from_pylist(batch, schema=schema)
        add_file(folder / "input", partial(pq.write_table, table))


@contextmanager
def settings(session: SparkSession, conf: dict[str, str]) -> Iterator[None]:
    """Settings of a session for some time."""
    before = {name: session.conf.get(name, None) for name in conf}
    for name, value in conf.items():
        session.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                session.conf.unset(name)
            else:
                session.conf.set(name, old)
