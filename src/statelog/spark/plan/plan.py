"""The part of planning that keyed and unkeyed operators share: arguments, registration, and how rows get to tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from statelog.convert.types import parse_output
from statelog.errors import ConfigurationError, ErrorKind
from statelog.options import Options
from statelog.runs.key_groups import GROUP_SHIFT, KEY_GROUPS
from statelog.runs.times import Watermark
from statelog.spark.driver import internals
from statelog.spark.driver.endpoint import Endpoint, require_endpoint
from statelog.spark.driver.interpreter import check_source_interpreter
from statelog.spark.plan.checks import (
    check_encryption,
    check_options,
    check_output_mode,
    check_session,
    checked_location,
    checked_parallelism,
    checked_uid,
    new_instance,
)
from statelog.spark.plan.operator_plan import OperatorPlan
from statelog.spark.plan.placement import make_placement
from statelog.spark.source.clock_source import CLOCK_SOURCE, clock_name, source_class
from statelog.spark.worker.worker import (
    TIME_COLUMN,
    DriverAddress,
    TaskSpec,
    observation_of,
    observed,
    pickled_processor,
    reported_schema,
    task_function,
)


@dataclass(frozen=True)
class StatelogArguments:
    """The arguments of :func:`statelog.key_by` for an operator; None for those not given."""

    uid: str | None
    parallelism: int | None
    location: str | None
    options: Options | None
    watermark: Watermark | None = None


def check_arguments(
    df: DataFrame, processor: object, output_type: StructType | str, output_mode: str, own: StatelogArguments
) -> tuple[OperatorPlan, StructType, bytes]:
    """Check the session and the arguments of an operator.

    Returns the plan of an operator without states and placement, its output type, and the pickled processor. Raises
    ConfigurationError if an argument is not supported, and ProcessorError if the processor cannot be pickled.
    """
    session = df.sparkSession
    check_output_mode(output_mode)
    check_session(session)
    options = Options() if own.options is None else own.options
    check_options(options)
    check_encryption(session, options)
    uid = checked_uid(own.uid)
    _require_new(uid, df)
    parallelism = checked_parallelism(own.parallelism, session)
    output = parse_output(output_type)
    pickled = pickled_processor(processor, uid)
    location = checked_location(own.location)
    return OperatorPlan(new_instance(), session, uid, parallelism, location, options), output, pickled


def _require_new(uid: str, df: DataFrame) -> None:
    """Refuse the name of an operator that the rows come from."""
    if df.isStreaming and observation_of(uid) in internals.observations_of(df):
        raise ConfigurationError(
            f"The rows come from another operator named '{uid}'.",
            kind=ErrorKind.UID_REQUIRED,
            hint="Give each operator a name of its own: key_by(..., uid='...').",
        )


def registered(df: DataFrame, plan: OperatorPlan) -> tuple[DataFrame, OperatorPlan, DriverAddress | None]:
    """Place a streaming operator, and make it known to the driver's endpoint.

    Returns the input, with the clock source if the operator needs batches without data, the plan with its placement,
    and the endpoint's address; None in a batch query.
    """
    if not df.isStreaming:
        return df, plan, None
    placement = make_placement(plan.session, plan.uid, plan.instance, plan.parallelism, plan.options)
    plan = replace(plan, placement=placement, in_front=frozenset(internals.observations_of(df)))
    host, endpoint = require_endpoint(plan.session)
    endpoint.register(plan)
    address = DriverAddress(host, endpoint.port, endpoint.secret, endpoint.certificate)
    return _with_clock(df, plan, endpoint), plan, address


def _with_clock(rows: DataFrame, plan: OperatorPlan, endpoint: Endpoint) -> DataFrame:
    """Add the clock source to a streaming input if the operator needs batches without data.

    Rows and columns stay the same. A batch without data must run all subtasks too, so the caller has to observe the
    rows: Spark may fold away a branch without rows, but not an observed one.
    """
    if not plan.no_data_rule.needs_clock or internals.reads_source(rows, CLOCK_SOURCE):
        return rows
    session = rows.sparkSession
    # Spark names all sources of a query or none, and refuses two with one name.
    name = clock_name(plan.uid) if internals.has_source_names(session) else ""
    if (session, name) not in endpoint.clock_frames:
        check_source_interpreter(session)
        endpoint.clock_frames[session, name] = _clock_frame(session, endpoint, name)
    clock = endpoint.clock_frames[session, name]
    nothing = [F.lit(None).cast(field.dataType).alias(field.name) for field in rows.schema]
    return rows.unionByName(clock.select(*nothing))


def _clock_frame(session: SparkSession, endpoint: Endpoint, name: str) -> DataFrame:
    # Spark refuses a name that its active session has registered, so that must be this session.
    with internals.active(session):
        own = (endpoint.local_host, endpoint.port, endpoint.secret, endpoint.certificate)
        session.dataSource.register(source_class(*own))
    # Adaptive execution plans each shuffle in a thread of its own. If several shuffles of a query read one Python
    # source, the threads call its process over one socket at the same time and take each other's answers: the query
    # fails or waits for ever (Spark 4.3.0). Behind an exchange, which all shuffles reuse, the source is planned once.
    reader = session.readStream.format(CLOCK_SOURCE)
    return (reader.name(name) if name else reader).load().repartition(1)


def key_hash(columns: Sequence[Column], kinds: Sequence[DataType]) -> Column:
    """Spark's ``xxhash64`` of the grouping columns.

    It treats ``-0.0`` as ``0.0`` and all NaNs as equal, nested ones too. Spark refuses to hash maps, because equal maps
    may list their entries in different orders. So a map is hashed as the array of its entries, sorted by key.
    """
    return F.xxhash64(*[_hashable(column, kind) for column, kind in zip(columns, kinds, strict=True)])


def _hashable(column: Column, kind: DataType) -> Column:
    if not _has_map(kind):
        return column
    if isinstance(kind, StructType):
        return F.struct(*[_hashable(column.getField(field.name), field.dataType) for field in kind])
    if isinstance(kind, ArrayType):
        element = kind.elementType
        return F.transform(column, lambda value: _hashable(value, element))
    assert isinstance(kind, MapType)
    of_key, of_value = kind.keyType, kind.valueType

    def entry(pair: Column) -> Column:
        return F.struct(_hashable(pair["key"], of_key), _hashable(pair["value"], of_value))

    return F.array_sort(F.transform(F.map_entries(column), entry))


def _has_map(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return any(_has_map(field.dataType) for field in kind)
    return isinstance(kind, MapType) or (isinstance(kind, ArrayType) and _has_map(kind.elementType))


def subtask_of(key_hash: Column, parallelism: int) -> Column:
    """The subtask of a key hash."""
    group = F.shiftrightunsigned(key_hash, GROUP_SHIFT)
    return F.floor(group * parallelism / KEY_GROUPS).cast("int")


def marked_rows(rows: DataFrame, plan: OperatorPlan) -> DataFrame:
    """The rows with their batch's time; in a stream also with the observation that marks the operator."""
    rows = rows.withColumn(TIME_COLUMN, _interpreted(F.unix_millis(F.current_timestamp())))
    if not rows.isStreaming:
        return rows
    # Spark folds away a branch that it can prove empty, and the batch would then miss an operator. It does not fold an
    # observed branch.
    return rows.observe(plan.observation, F.count(F.lit(1)).alias("rows"))


def mapped(rows: DataFrame, spec: TaskSpec) -> DataFrame:
    """The output of an operator, whose rows are at their subtasks; in a stream it also reports its metrics."""
    if not rows.isStreaming:
        return rows.mapInArrow(task_function(spec), spec.output_schema)
    return observed(rows.mapInArrow(task_function(spec), reported_schema(spec.output_schema)), spec.uid)


def _interpreted(value: Column) -> Column:
    """The same value, left out of generated code.

    Spark writes a batch's time into the code as a number, so it would compile the code anew for every batch. It does
    not generate code for ``zip_with``, which makes an array of one value here.
    """
    one = F.array(F.lit(0))
    return F.get(F.zip_with(one, one, lambda left, right: value), F.lit(0))
