"""What a failed query failed with, out of what Spark says about it."""

from __future__ import annotations

from pyspark.sql.streaming.query import StreamingQuery

from statelog.errors import ConfigurationError, StatelogError, error_in_text
from statelog.spark.checks import incomplete_end


def error_of(failed: StreamingQuery | BaseException) -> StatelogError | None:
    """Find the error of statelog that a query failed with.

    Spark reports a failure as a text of Spark's, Java's and Python's traces, with the error somewhere in it.

    Parameters
    ----------
    failed : StreamingQuery or exception
        A query of this process, or what ``awaitTermination()``, or an action of a batch query, has raised.

    Returns
    -------
    StatelogError or None
        The error: its class, `message`, `kind` and `hint`. Its ``__cause__`` has as text the traceback of what caused
        it, for example an exception of the processor with its line, or that of the error itself. None if the query
        runs, ended well, or failed with an error that is not statelog's. It is the error of statelog also if a
        function given to ``foreachBatch`` has caught it and raised another one ``from`` it.

        A query that ended without an error may be one that Spark has committed a batch of whose checkpoint does not
        exist, because an action did not read it all. That is a :class:`StateMissingError`, as at the query's next
        start.

    Examples
    --------
    >>> try:  # doctest: +SKIP
    ...     query.awaitTermination()
    ... except StreamingQueryException as failure:
    ...     error = statelog.error_of(failure)
    ...     print(error or failure)
    """
    if isinstance(failed, StatelogError):
        return failed
    if isinstance(failed, BaseException):
        return error_in_text(str(failed))
    if not isinstance(failed, StreamingQuery):
        raise ConfigurationError(
            f"error_of takes a query or an exception, not {type(failed).__name__}.",
            hint="Pass what start() has returned, or the exception that awaitTermination() has raised.",
        )
    failure = failed.exception()
    return incomplete_end(failed) if failure is None else error_in_text(str(failure))
