"""Serves the page of a query or a location."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from statelog.pages.extra import require_extra
from statelog.pages.live import watch

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from statelog.pages.server import PageServer


def ui(
    query: StreamingQuery | str | Path, *, host: str = "127.0.0.1", port: int = 0, redact_keys: bool = False
) -> PageServer:
    """Serve a page about a query's checkpoints, with a look into its state; nothing can be changed there.

    Parameters
    ----------
    query : StreamingQuery, str or Path
        A query that runs in this process, whose page also has the durations of its checkpoints; or a location, as in
        :func:`report`.
    host : str
        The address to serve at. The default is this host alone: all its users can open the page. At any other address
        the page asks for a token, which is part of the printed address; there is no encryption.
    port : int
        The port; 0 for a free one.
    redact_keys : bool
        Whether keys are replaced by dots.

    Returns
    -------
    PageServer
        The served page; its `url` is the address.

    Raises
    ------
    ConfigurationError
        If the address cannot be used, the extra is not installed, or the location has no operator.
    StateMissingError
        If an operator of the query has not begun a batch yet.

    Examples
    --------
    >>> page = statelog.ui(query)  # doctest: +SKIP
    >>> page.url  # doctest: +SKIP
    'http://127.0.0.1:40123/'
    """
    require_extra()
    from statelog.pages.server import serve

    watched = watch(query)
    return serve(watched.locations, watched.metrics, host=host, port=port, redact_keys=redact_keys)
