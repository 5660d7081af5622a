"""Unkeyed operators: ``process``, and the plan that it makes."""

from __future__ import annotations

import pickle
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StructType, VariantType

from statelog.errors import ConfigurationError, ErrorKind
from statelog.operators.unkeyed.processor import OperatorContext, OperatorProcessor
from statelog.operators.unkeyed.states import OperatorStateMode
from statelog.options import Options
from statelog.runs.key_groups import GROUP_SHIFT, KEY_GROUPS
from statelog.spark.checks import (
    check_options,
    check_output_mode,
    check_session,
    checked_location,
    checked_parallelism,
    checked_uid,
    new_instance,
    parse_output,
    pickled_processor,
    require_endpoint,
    task_function,
)
from statelog.spark.clock_frame import with_clock
from statelog.spark.declare import DeclaredState, Parse, call_init, check_state_name, state_struct
from statelog.spark.key_hash import key_hash
from statelog.spark.operator_plan import OperatorPlan
from statelog.spark.placement import make_placement
from statelog.spark.process_worker import (
    BROADCAST_COLUMN,
    OperatorStateDeclaration,
    UnkeyedSpec,
    bind_operator_state,
)
from statelog.spark.ticks import NoDataRule
from statelog.spark.worker import HASH_COLUMN, SUBTASK_COLUMN, TIME_COLUMN


def process(
    df: DataFrame,
    processor: OperatorProcessor,
    outputStructType: StructType | str,
    outputMode: str = "append",
    *,
    uid: str | None = None,
    parallelism: int | None = None,
    location: str | None = None,
    options: Options | None = None,
    broadcast: DataFrame | None = None,
) -> DataFrame:
    """Apply a processor without keys: it runs once per subtask and batch, and each subtask has its own state.

    Parameters
    ----------
    df : DataFrame
        A streaming or a batch DataFrame. On a batch one, state starts empty and is discarded afterwards. The choice of
        the subtask that gets a row has no meaning, but equal rows go to the same subtask.
    processor : OperatorProcessor
        The processor, an instance of a subclass.
    outputStructType : StructType or str
        Type of the output rows.
    outputMode : {"append", "update", "complete"}
        One of Spark's output modes. It has no effect on the processor.
    uid : str, optional
        The operator's name in the checkpoint. A query with two or more stateful operators needs a different one for
        each.
    parallelism : int, optional
        Number of subtasks, from 1 to 32,768; may differ at every start. The default is the application's number of
        cores.
    location : str, optional
        The directory of the state, which driver and executors must share, or a folder in an object store. The default
        is the folder ``statelog`` below the query's checkpointLocation.
    options : Options, optional
        The operator's options; the defaults if None.
    broadcast : DataFrame, optional
        A DataFrame whose rows every subtask gets, in ``processBroadcast``. It must be streaming if `df` is, and only
        then.

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

    Examples
    --------
    >>> numbered = statelog.process(events, Number(), "user string, number string")  # doctest: +SKIP
    """
    _check_arguments(df, processor, broadcast)
    check_output_mode(outputMode)
    session = df.sparkSession
    check_session(session)
    uid = checked_uid(uid)
    subtasks = checked_parallelism(parallelism, session)
    settings = Options() if options is None else options
    check_options(settings)
    output = parse_output(outputStructType)
    pickled = pickled_processor(processor, uid)
    states = declare_operator_states(pickled, uid, subtasks)
    instance = new_instance()
    placement = make_placement(session, uid, instance, subtasks, settings) if df.isStreaming else None
    plan = OperatorPlan(
        instance=instance,
        session=session,
        uid=uid,
        parallelism=subtasks,
        location=checked_location(location),
        key_schema=b"",
        states=[bind_operator_state(state).descriptor.to_stored() for state in states],
        options=settings,
        ticks=NoDataRule(heartbeat_ms=settings.heartbeat_ms),
        placement=placement,
    )
    host, port, secret = "", 0, b""
    if df.isStreaming:
        host, endpoint = require_endpoint(session)
        endpoint.register(plan)
        port, secret = endpoint.port, endpoint.secret
        df = with_clock(df, plan, endpoint)
    spec = UnkeyedSpec(
        uid=uid,
        instance=plan.instance,
        parallelism=subtasks,
        is_streaming=df.isStreaming,
        columns=df.columns,
        broadcast_columns=None if broadcast is None else broadcast.columns,
        states=states,
        output_schema=output,
        processor=pickled,
        options=settings,
        host=host,
        port=port,
        secret=secret,
    )
    return _operator_frame(df, broadcast, spec, plan)


def _operator_frame(df: DataFrame, broadcast: DataFrame | None, spec: UnkeyedSpec, plan: OperatorPlan) -> DataFrame:
    # mapInArrow cannot take columns whose names need quoting, so columns are renamed to their positions.
    rows = df.toDF(*[f"c{index}" for index in range(len(df.columns))])
    group = F.shiftrightunsigned(_row_hash(rows), GROUP_SHIFT)
    rows = rows.withColumn(SUBTASK_COLUMN, F.floor(group * spec.parallelism / KEY_GROUPS).cast("int"))
    if broadcast is not None:
        copies = broadcast.toDF(*[f"b{index}" for index in range(len(broadcast.columns))])
        everyone = F.explode(F.sequence(F.lit(0), F.lit(spec.parallelism - 1)))
        copies = copies.withColumn(HASH_COLUMN, _row_hash(copies)).withColumn(SUBTASK_COLUMN, everyone)
        copies = copies.withColumn(BROADCAST_COLUMN, F.lit(True))
        rows = rows.withColumn(BROADCAST_COLUMN, F.lit(False)).unionByName(copies, allowMissingColumns=True)
    rows = rows.withColumn(TIME_COLUMN, F.unix_millis(F.current_timestamp()))
    if spec.is_streaming:
        # Spark folds away a branch that it can prove empty, and the batch would then miss an operator. It does not
        # fold an observed branch.
        rows = rows.observe(plan.observation, F.count(F.lit(1)).alias("rows"))
    if plan.placement is None:
        by_subtask = rows.repartitionById(spec.parallelism, F.col(SUBTASK_COLUMN))
    else:
        by_subtask = plan.placement.by_subtask(rows, SUBTASK_COLUMN)
    return by_subtask.mapInArrow(task_function(spec), spec.output_schema)


def _row_hash(df: DataFrame) -> Column:
    """A hash of all columns that Spark can hash: a repeated batch sends its rows to the same subtasks as before."""
    fields = [field for field in df.schema if not _has_variant(field.dataType)]
    if not fields:
        return F.lit(0).cast("long")
    return key_hash([F.col(field.name) for field in fields], [field.dataType for field in fields])


def _has_variant(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return any(_has_variant(field.dataType) for field in kind)
    if isinstance(kind, MapType):
        return _has_variant(kind.keyType) or _has_variant(kind.valueType)
    return isinstance(kind, VariantType) or (isinstance(kind, ArrayType) and _has_variant(kind.elementType))


def _check_arguments(df: object, processor: object, broadcast: object) -> None:
    if not isinstance(df, DataFrame):
        raise ConfigurationError(f"process takes a DataFrame, not {type(df).__name__}.")
    if not isinstance(processor, OperatorProcessor):
        raise ConfigurationError(
            f"processor must be an instance of statelog.OperatorProcessor, not {processor!r}.",
            hint="Pass an object, not a class. Processors of keyed operators go to statelog.key_by(...).",
        )
    if broadcast is None:
        return
    if not isinstance(broadcast, DataFrame):
        raise ConfigurationError(f"broadcast takes a DataFrame, not {type(broadcast).__name__}.")
    if broadcast.isStreaming != df.isStreaming:
        raise ConfigurationError(
            f"The DataFrame is a {_kind(df)} one, broadcast a {_kind(broadcast)} one.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="Spark cannot bring them together: read both as streams, or both at once.",
        )
    if type(processor).processBroadcast is OperatorProcessor.processBroadcast:
        raise ConfigurationError(
            f"{type(processor).__name__} has no processBroadcast method for the rows of broadcast.",
            hint="Write one, or leave broadcast out.",
        )


def _kind(df: DataFrame) -> str:
    return "streaming" if df.isStreaming else "batch"


def declare_operator_states(
    processor: bytes, uid: str, parallelism: int, parse: Parse = DataType.fromDDL
) -> list[OperatorStateDeclaration]:
    """Call ``init`` of a pickled processor, and return its states, sorted by name; otherwise as ``declare_states``."""
    handle = _DeclaringHandle(uid, parallelism, parse)
    call_init(pickle.loads(processor), handle, uid)
    return sorted(handle.states.values(), key=lambda state: state.name)


class _DeclaringHandle:
    """A handle that records the declared states and returns placeholders."""

    def __init__(self, uid: str, parallelism: int, parse: Parse) -> None:
        self.states: dict[str, OperatorStateDeclaration] = {}
        self.context = OperatorContext(-1, parallelism, -1, -1)
        self._uid = uid
        self._parse = parse

    def getListState(self, stateName: str, schema: Any) -> Any:
        return self._declare(stateName, OperatorStateMode.LIST, schema)

    def getUnionListState(self, stateName: str, schema: Any) -> Any:
        return self._declare(stateName, OperatorStateMode.UNION, schema)

    def getBroadcastState(self, stateName: str, keySchema: Any, valueSchema: Any) -> Any:
        return self._declare(stateName, OperatorStateMode.BROADCAST, valueSchema, keySchema)

    def _declare(self, name: str, mode: OperatorStateMode, value_schema: Any, entry_schema: Any = None) -> object:
        check_state_name(name, self._uid)
        is_map = mode is OperatorStateMode.BROADCAST
        entry = state_struct(entry_schema, name, self._uid, self._parse) if is_map else None
        value = state_struct(value_schema, name, self._uid, self._parse)
        declaration = OperatorStateDeclaration(name, mode, value, entry)
        if self.states.setdefault(name, declaration) != declaration:
            raise ConfigurationError(
                f"operator '{self._uid}': state '{name}' is declared twice in different ways.",
                hint="Give each state a name of its own.",
            )
        return DeclaredState(name, self._uid)
