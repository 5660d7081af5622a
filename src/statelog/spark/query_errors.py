"""Finds the error of statelog in Spark's report of a failed query."""

from __future__ import annotations

from pyspark.sql.streaming.query import StreamingQuery

from statelog.errors import ConfigurationError, StatelogError, error_in_text
from statelog.spark.endpoint import known_endpoint


def error_of(failed: StreamingQuery | BaseException) -> StatelogError | None:
    """Find the error of statelog that made a query fail.

    Spark reports a failure as one text with the traces of Spark, Java and Python, and the error somewhere in it.

    Parameters
    ----------
    failed : StreamingQuery or exception
        A query of this process, or the exception that ``awaitTermination()`` or an action of a batch query has raised.

    Returns
    -------
    StatelogError or None
        The error, with its class, `message`, `kind` and `hint`. Its ``__cause__`` has, as text, the traceback of the
        cause, for example of an exception in the processor, with its line; or else that of the error itself. The error
        is found even if a function given to ``foreachBatch`` has caught it and raised another one ``from`` it. None if
        the query runs, ended well, or failed with an error that is not statelog's.

        A query may end without an error although its last batch, which Spark has committed, has no checkpoint, because
        an action did not read the whole batch. The result is then a :class:`StateMissingError`, which the query's next
        start raises too.

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
    failure, endpoint = failed.exception(), known_endpoint()
    if failure is not None:
        return error_in_text(str(failure))
    return None if endpoint is None or failed.isActive else endpoint.incomplete_end(failed)
