"""Serves the page of a query or a location."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from statelog.pages.extra import require_extra
from statelog.pages.live import watch
from statelog.pages.savepoint_list import SavepointFolders

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from statelog.pages.server import PageServer


def ui(
    query: StreamingQuery | str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    redact_keys: bool = False,
    savepoints: Sequence[str | Path] = (),
) -> PageServer:
    """Serve a page about a query's checkpoints, with a look into its state; nothing can be changed there.

    Parameters
    ----------
    query : StreamingQuery, str or Path
        A query of this process, whose page also has the durations of its checkpoints and the progress of a restore; it
        may just have been started. Or a location, as in :func:`report`.
    host : str
        The address to serve at. The default is this host alone: all its users can open the page. At any other address
        the page asks for a token, which is part of the printed address; there is no encryption.
    port : int
        The port; 0 for a free one.
    redact_keys : bool
        Whether keys and values are replaced by dots; they are in any case if an operator of the query has the option of
        that name.
    savepoints : sequence of str or Path
        Folders with savepoints, as in :func:`report`.

    Returns
    -------
    PageServer
        The served page; its `url` is the address.

    Raises
    ------
    ConfigurationError
        If the address cannot be used, the extra is not installed, or the location has no operator.

    Examples
    --------
    >>> page = statelog.ui(query)  # doctest: +SKIP
    >>> page.url  # doctest: +SKIP
    'http://127.0.0.1:40123/'
    """
    require_extra()
    from statelog.pages.server import serve

    folders = SavepointFolders([str(folder) for folder in savepoints])
    look = watch(query)
    return serve(look, folders, host=host, port=port, redact_keys=redact_keys or look().redacts_keys)
