"""The user's entry: a keyed stream, and the plan that a stateful operator becomes."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import DataType, StructType

from statelog.errors import ConfigurationError, ErrorKind, ProcessorError
from statelog.options import Options
from statelog.spark.declare import declare_states
from statelog.spark.endpoint import Endpoint, OperatorPlan
from statelog.spark.types import arrow_type, key_schema
from statelog.spark.worker import HASH_COLUMN, TIME_COLUMN, SubtaskSpec, bind_state
from statelog.state.key_groups import GROUP_SHIFT, KEY_GROUPS
from statelog.state.keys import KeyCodec
from statelog.state.schema import encode_schema

__all__ = ["KeyedStream", "key_by"]

_OUTPUT_MODES = ("append", "update", "complete")
_DEFAULT_UID = "main"

_instances = itertools.count()
_endpoint: Endpoint | None = None
_endpoint_lock = threading.Lock()


def key_by(df: DataFrame, *cols: str) -> KeyedStream:
    """Key a DataFrame by columns, like ``df.groupBy(*cols)``.

    Parameters
    ----------
    df : DataFrame
        A streaming DataFrame, or a batch one: then the state is empty at first and not kept.
    *cols : str
        Names of the grouping columns; at least one.

    Returns
    -------
    KeyedStream
        What ``transformWithState`` is called on.

    Raises
    ------
    ConfigurationError
        If a column does not exist, or its type cannot be a key.

    Examples
    --------
    >>> counts = statelog.key_by(events, "user").transformWithState(  # doctest: +SKIP
    ...     Counter(), "user string, count long", "update", "None"
    ... )
    """
    if not isinstance(df, DataFrame):
        raise ConfigurationError(f"key_by takes a DataFrame, not {type(df).__name__}.")
    if not cols or not all(isinstance(name, str) for name in cols):
        raise ConfigurationError(
            f"key_by takes names of columns, not {cols!r}.", hint="Make a column of an expression first."
        )
    unknown = [name for name in cols if name not in df.columns]
    if unknown:
        raise ConfigurationError(f"key_by: there is no column {unknown[0]!r}; the columns are {', '.join(df.columns)}.")
    doubled = [name for name in df.columns if df.columns.count(name) > 1]
    if doubled:
        raise ConfigurationError(f"key_by: two columns are named {doubled[0]!r}.", hint="Rename one of them first.")
    KeyCodec(key_schema(df.schema, list(cols)))
    return KeyedStream(df, list(cols))


class KeyedStream:
    """A DataFrame keyed by columns; made by :func:`key_by`."""

    def __init__(self, df: DataFrame, columns: list[str]) -> None:
        self._df = df
        self._columns = columns

    def transformWithState(
        self,
        statefulProcessor: StatefulProcessor,
        outputStructType: StructType | str,
        outputMode: str,
        timeMode: str,
        initialState: Any = None,
        eventTimeColumnName: str = "",
        *,
        uid: str | None = None,
        parallelism: int | None = None,
        location: str | None = None,
        options: Options | None = None,
    ) -> DataFrame:
        """Apply a stateful processor to each key, as Spark's method of this name does.

        Parameters
        ----------
        statefulProcessor : StatefulProcessor
            A processor as written for Spark's ``transformWithState`` with rows.
        outputStructType : StructType or str
            Type of the output rows.
        outputMode : {"append", "update", "complete"}
            As Spark's; it has no effect on what the processor does.
        timeMode : {"None"}
            As Spark's; time modes with timers are not supported yet.
        initialState : None
            Not supported yet.
        eventTimeColumnName : str
            Not supported yet.
        uid : str, optional
            The operator's name in the checkpoint. It must be given, and differ, once a query has two
            stateful operators.
        parallelism : int, optional
            Number of subtasks, from 1 to 32,768; may differ at every start. The default is the
            application's number of cores.
        location : str, optional
            Where the state is kept: a directory that driver and executors share. The default is the folder
            ``statelog`` below the query's checkpointLocation.
        options : Options, optional
            Options.

        Returns
        -------
        DataFrame
            The output rows; a streaming DataFrame if the input is one.

        Raises
        ------
        ConfigurationError
            If an argument or a setting of the session is not supported.
        ProcessorError
            If the processor cannot be pickled, or its ``init`` fails.
        """
        session = self._df.sparkSession
        _check_arguments(statefulProcessor, outputMode, timeMode, initialState, eventTimeColumnName)
        _check_session(session)
        uid = _checked_uid(uid)
        subtasks = _checked_parallelism(parallelism, session)
        settings = options or Options()
        output = _parse_output(session, outputStructType)
        processor = _pickled(statefulProcessor, uid)
        states = declare_states(processor, session, uid)
        keys = key_schema(self._df.schema, self._columns)
        plan = OperatorPlan(
            instance=f"{os.getpid()}-{next(_instances)}",
            session=session,
            uid=uid,
            parallelism=subtasks,
            location=location,
            key_schema=encode_schema(keys),
            states=[bind_state(state).descriptor.to_stored() for state in sorted(states, key=lambda s: s.name)],
            options=settings,
        )
        host, port, secret = "", 0, b""
        if self._df.isStreaming:
            host, endpoint = _require_endpoint(session)
            endpoint.register(plan)
            port, secret = endpoint.port, endpoint.secret
        spec = SubtaskSpec(
            uid=uid,
            instance=plan.instance,
            parallelism=subtasks,
            is_streaming=self._df.isStreaming,
            key_schema=keys,
            columns=self._df.columns,
            key_columns=[self._df.columns.index(name) for name in self._columns],
            states=states,
            output_schema=output,
            processor=processor,
            options=settings,
            host=host,
            port=port,
            secret=secret,
        )
        return self._operator(spec, output)

    def _operator(self, spec: SubtaskSpec, output: StructType) -> DataFrame:
        # mapInArrow cannot take columns whose names need quoting, so names of our own stand in for them.
        plain = self._df.toDF(*[f"c{index}" for index in range(len(self._df.columns))])
        key_hash = F.xxhash64(*[F.col(f"c{index}") for index in spec.key_columns])
        rows = plain.withColumns({HASH_COLUMN: key_hash, TIME_COLUMN: F.unix_millis(F.current_timestamp())})
        if spec.is_streaming:
            # Spark folds away a branch that it can prove empty, and then the batch would miss an operator;
            # it does not fold what is observed.
            rows = rows.observe(f"statelog {spec.uid} {spec.instance}", F.count(F.lit(1)).alias("rows"))
        group = F.shiftrightunsigned(F.col(HASH_COLUMN), GROUP_SHIFT)
        subtask = F.floor(group * spec.parallelism / KEY_GROUPS).cast("int")
        return rows.repartitionById(spec.parallelism, subtask).mapInArrow(_task_function(spec), output)


def _task_function(spec: SubtaskSpec) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function that Spark sends to the workers.

    It is pickled by value and holds only bytes, so that a worker which cannot import statelog can say so.
    """
    pickled = _dumps(spec)

    def run(batches: Any) -> Any:
        import pickle
        import sys

        try:
            from statelog.spark.worker import run_subtask
        except ImportError as error:
            raise ImportError(
                f"The Python workers run {sys.executable}, which cannot import statelog ({error})."
                " Install statelog there, or set PYSPARK_PYTHON (or spark.pyspark.python) to the interpreter"
                " of the environment that has it before the session is created. [worker-import]"
            ) from error
        return run_subtask(pickle.loads(pickled), batches)

    return run


def _dumps(value: object) -> bytes:
    data: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]  # pyspark's copy has no types
    return data


def _pickled(processor: StatefulProcessor, uid: str) -> bytes:
    try:
        return _dumps(processor)
    except Exception as error:
        raise ProcessorError(
            f"operator '{uid}': the processor {type(processor).__name__} cannot be sent to the workers:"
            f" {type(error).__name__}: {error}.",
            kind=ErrorKind.PROCESSOR_NOT_PICKLABLE,
            hint="Open connections, locks and files in init() instead of in the constructor, and do not use the"
            " SparkSession in the processor.",
        ) from error


def _check_arguments(
    processor: object, output_mode: str, time_mode: str, initial_state: object, event_time_column: str
) -> None:
    missing = [name for name in ("init", "handleInputRows", "close") if not hasattr(processor, name)]
    if missing or isinstance(processor, type):
        raise ConfigurationError(
            f"statefulProcessor must be an instance of StatefulProcessor, not {processor!r}.",
            hint="Pass an object, not a class, that has init, handleInputRows and close.",
        )
    if str(output_mode).lower() not in _OUTPUT_MODES:
        raise ConfigurationError(f"outputMode is {output_mode!r}.", hint="It must be 'append', 'update' or 'complete'.")
    if str(time_mode).lower() in ("processingtime", "eventtime") or event_time_column:
        raise _not_yet("Timers (timeMode other than 'None', eventTimeColumnName)")
    if str(time_mode).lower() != "none":
        raise ConfigurationError(f"timeMode is {time_mode!r}.", hint="It must be 'None'.")
    if initial_state is not None:
        raise _not_yet("initialState")


def _not_yet(feature: str) -> ConfigurationError:
    return ConfigurationError(
        f"{feature} is not supported yet.",
        kind=ErrorKind.UNSUPPORTED_FEATURE,
        hint="Use Spark's own transformWithState for it.",
    )


def _check_session(session: SparkSession) -> None:
    if not hasattr(session, "_jsparkSession"):
        raise ConfigurationError(
            "statelog does not run on Spark Connect.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="Use a classic session, made by SparkSession.builder in the driver.",
        )
    if str(session.sparkContext.getConf().get("spark.speculation", "false")).lower() == "true":
        raise ConfigurationError(
            "spark.speculation is on: a second attempt may run beside the first, and either may become the result.",
            kind=ErrorKind.UNSUPPORTED_SETTING,
            hint="Set spark.speculation to false for applications with stateful operators.",
        )


def _checked_uid(uid: str | None) -> str:
    if uid is not None and (not isinstance(uid, str) or not uid or len(uid) > 200):
        raise ConfigurationError(f"uid is {uid!r}.", hint="It must be a text of 1 to 200 characters.")
    return _DEFAULT_UID if uid is None else uid


def _checked_parallelism(parallelism: int | None, session: SparkSession) -> int:
    if parallelism is None:
        return min(max(session.sparkContext.defaultParallelism, 1), KEY_GROUPS)
    if isinstance(parallelism, bool) or not isinstance(parallelism, int) or not 1 <= parallelism <= KEY_GROUPS:
        raise ConfigurationError(f"parallelism is {parallelism!r}.", hint="It must be from 1 to 32768.")
    return parallelism


def _parse_output(session: SparkSession, schema: StructType | str) -> StructType:
    try:
        parsed: DataType = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    except Exception as error:
        raise ConfigurationError(
            f"outputStructType {schema!r} cannot be parsed: {str(error).splitlines()[0]}.",
            hint="Write it like 'user string, count long'.",
        ) from error
    if not isinstance(parsed, StructType):
        raise ConfigurationError(f"outputStructType is {schema!r}.", hint="It must be a StructType or a DDL text.")
    for field in parsed:
        arrow_type(field.dataType, f"output column '{field.name}'")
    return parsed


def _require_endpoint(session: SparkSession) -> tuple[str, Endpoint]:
    """The address that executors reach the driver at, and the process's endpoint."""
    global _endpoint
    conf = session.sparkContext.getConf()
    is_local = str(session.sparkContext.master).split("[")[0] in ("local", "local-cluster")
    host = "127.0.0.1" if is_local else conf.get("spark.driver.host", "127.0.0.1")
    reachable = str(conf.get("spark.statelog.coordinator.host", host))
    bound = str(conf.get("spark.driver.bindAddress", reachable)) if not is_local else host
    with _endpoint_lock:
        if _endpoint is None or _endpoint.process_id != os.getpid():
            port = int(str(conf.get("spark.statelog.coordinator.port", "0")))
            try:
                _endpoint = Endpoint(bound, port)
            except OSError as error:
                raise ConfigurationError(
                    f"The coordinator cannot listen on {bound}:{port}: {error.strerror}.",
                    hint="Set spark.statelog.coordinator.host and .port to a free address of this machine.",
                ) from error
        return reachable, _endpoint
