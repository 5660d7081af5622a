"""Unkeyed operators: ``process``."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from statelog.errors import ConfigurationError, ErrorKind
from statelog.operators.unkeyed.processor import OperatorProcessor
from statelog.options import Options
from statelog.spark.plan.checks import require_classic
from statelog.spark.plan.plan import StatelogArguments
from statelog.spark.plan.unkeyed_plan import apply_unkeyed, require_broadcast_method


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
        A streaming or batch DataFrame. In a batch query, state starts empty and is discarded afterwards. Which subtask
        gets a row has no meaning, but equal rows go to the same subtask.
    processor : OperatorProcessor
        The processor, an instance of a subclass.
    outputStructType : StructType or str
        Type of the output rows.
    outputMode : {"append", "update", "complete"}
        One of Spark's output modes. It has no effect on the processor.
    uid, parallelism, location, options
        As in :func:`statelog.key_by`.
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
    own = StatelogArguments(uid, parallelism, location, options)
    return apply_unkeyed(df, processor, outputStructType, outputMode, own, broadcast)


def _check_arguments(df: object, processor: object, broadcast: object) -> None:
    if not isinstance(df, DataFrame):
        raise ConfigurationError(f"process takes a DataFrame, not {type(df).__name__}.")
    require_classic(df.sparkSession)
    if not isinstance(processor, OperatorProcessor):
        raise ConfigurationError(
            f"processor must be an instance of statelog.OperatorProcessor, not {processor!r}.",
            hint="Pass an object, not a class. Pass processors of keyed operators to a method of statelog.key_by(...).",
        )
    if broadcast is None:
        return
    if not isinstance(broadcast, DataFrame):
        raise ConfigurationError(f"broadcast takes a DataFrame, not {type(broadcast).__name__}.")
    if broadcast.isStreaming != df.isStreaming:
        raise ConfigurationError(
            f"df is a {_kind(df)} DataFrame, but broadcast is a {_kind(broadcast)} DataFrame.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="Read both as streams, or both as batches: Spark cannot combine them otherwise.",
        )
    require_broadcast_method(processor)


def _kind(df: DataFrame) -> str:
    return "streaming" if df.isStreaming else "batch"
