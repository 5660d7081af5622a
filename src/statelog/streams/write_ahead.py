"""Output that a sink gets again, unchanged, when its batch is repeated: ``write_ahead``."""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import DataFrame
from pyspark.sql.streaming.readwriter import DataStreamWriter

from statelog.errors import ConfigurationError
from statelog.options import Options
from statelog.spark.plan.plan import StatelogArguments
from statelog.spark.plan.unkeyed_plan import options_in_front, store_output


def write_ahead(
    df: DataFrame,
    sink: Callable[[DataFrame, int], None],
    *,
    uid: str = "output",
    parallelism: int | None = None,
    location: str | None = None,
    options: Options | None = None,
) -> DataStreamWriter:
    """Store each batch's output in the checkpoint before a sink gets it.

    Spark repeats a batch if the query ends before the batch is committed. The sink then gets the stored rows, and the
    operators keep their checkpoints of the batch. So a sink that recognizes a repeated batch by its id is exact,
    whatever the processors do: use random numbers, call other services, or return rows in any order. The parallelism
    may have changed meanwhile.

    Parameters
    ----------
    df : DataFrame
        The query's output, a streaming DataFrame. Its stateful operators are statelog's; Spark's own are refused.
    sink : function
        Takes a DataFrame with the stored rows and the batch id, like the function of Spark's ``foreachBatch``. It may
        evaluate the DataFrame as often as it likes, or not at all, but not after it has returned.
    uid : str
        Name of the operator that stores the rows.
    parallelism, location, options
        As in :func:`statelog.key_by`. By default, the options are those of an operator that `df` comes from.
        The rows of `retained_checkpoints` batches are kept.

    Returns
    -------
    DataStreamWriter
        Spark's writer for the query: set its options and ``start()`` it.

    Raises
    ------
    ConfigurationError
        If an argument or a setting of the session is not supported, or if `df` has stateful operators of Spark.

    Examples
    --------
    >>> writer = statelog.write_ahead(counts, save)  # doctest: +SKIP
    >>> query = writer.option("checkpointLocation", "/data/checkpoints/counts").start()  # doctest: +SKIP
    """
    if not isinstance(df, DataFrame) or not df.isStreaming:
        kind = "a batch DataFrame" if isinstance(df, DataFrame) else type(df).__name__
        raise ConfigurationError(
            f"write_ahead takes a streaming DataFrame, not {kind}.", hint="Write a batch DataFrame with df.write."
        )
    if not callable(sink):
        raise ConfigurationError(
            f"sink is {sink!r:.80}.", hint="Pass a function of a DataFrame and a batch id, as for foreachBatch."
        )
    own = StatelogArguments(uid, parallelism, location, options_in_front(df) if options is None else options)
    output, deliver = store_output(df, sink, own)
    return output.writeStream.foreachBatch(deliver)
