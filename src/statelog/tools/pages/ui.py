"""The three ways to the page: ``ui`` serves it, ``report`` writes it to a file, ``show`` puts it into a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

from statelog.errors import ConfigurationError, ErrorKind
from statelog.files import removed_on_failure
from statelog.shown import plain_text, size_text, time_text
from statelog.tools.pages.live import watch
from statelog.tools.pages.model import PageModel, read_page
from statelog.tools.pages.savepoint_list import SavepointFolders

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from statelog.tools.pages.server import PageServer

_HEIGHT: Final = 640


def require_extra() -> None:
    """Raise ConfigurationError if a package of the page is not installed."""
    try:
        import jinja2  # noqa: F401 -- only whether it is there
        import waitress  # noqa: F401 -- likewise
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"The checkpoint page needs {error.name}, which is not installed.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="pip install 'statelog[ui]'",
        ) from error


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
    from statelog.tools.pages.server import serve

    folders = SavepointFolders([str(folder) for folder in savepoints])
    look = watch(query)
    return serve(look, folders, host=host, port=port, redact_keys=redact_keys or look().redacts_keys)


def report(location: str | Path, target: str | Path, *, savepoints: Sequence[str | Path] = ()) -> None:
    """Write a page about a query's checkpoints: one HTML file that needs nothing else.

    The log of each operator, its pins and a listing of its objects are read, and no state; nothing is written to the
    location. What is damaged is on the page, with all that can still be read.

    Parameters
    ----------
    location : str or Path
        The query's checkpointLocation, or the location that its operators were given; or a savepoint.
    target : str or Path
        The file; one that exists is replaced.
    savepoints : sequence of str or Path
        Savepoints, or folders with savepoints directly below, of which those of the query are listed; in addition to
        the folder ``savepoints`` in the location.

    Raises
    ------
    ConfigurationError
        If there is no operator, the file cannot be written, or the extra is not installed.
    StorageError
        If the store fails.

    Examples
    --------
    >>> statelog.report("/data/checkpoints/flights", "flights.html")  # doctest: +SKIP
    """
    require_extra()
    from statelog.tools.pages.render import render

    html = render(read_page(watch(location)(), SavepointFolders([str(folder) for folder in savepoints])))
    place = Path(target)
    unfinished = place.with_name(f".{place.name}.unfinished")
    try:
        with removed_on_failure(unfinished):
            unfinished.write_text(html, encoding="utf-8")
            unfinished.replace(place)
    except OSError as error:
        raise ConfigurationError(
            f"{place} cannot be written: {error.strerror}.",
            kind=ErrorKind.VALUE_MISMATCH,
            hint="Name a file in a directory that exists and can be written to.",
        ) from error


class Summary:
    """The checkpoints of a query at the time of the call, made by :func:`show`: notebooks display it as the page."""

    def __init__(self, page: PageModel, *, redacts: bool) -> None:
        self._page = page
        self._redacts = redacts

    def _repr_html_(self) -> str:
        return self.html

    @property
    def html(self) -> str:
        """The page in a frame, as notebooks display it."""
        from statelog.tools.pages.render import render

        # A frame keeps the page's style out of the notebook; in its sandbox nothing can run.
        text = escape(render(self._page, redacts=self._redacts), quote=True)
        return f'<iframe sandbox srcdoc="{text}" width="100%" height="{_HEIGHT}" frameborder="0"></iframe>'

    def __repr__(self) -> str:
        lines = [self._page.location]
        for one in self._page.operators:
            newest = one.newest
            restoring = None if one.live is None else one.live.restoring
            if restoring is not None:
                read, known = size_text(restoring.read_bytes), size_text(restoring.known_bytes)
                lines.append(f"{one.uid}: restores its state for batch {restoring.batch}, {read} of {known} are read")
            state_bytes = newest.sizes.state_bytes
            size = "unknown" if state_bytes is None else size_text(state_bytes)
            lines.append(f"{one.uid}: checkpoint {newest.batch} of {time_text(newest.time_ms)} UTC, state {size}")
            lines += [f"{one.uid}: {problem}" for problem in one.problems]
        lines += [f"{one.uid}: it has not begun a batch yet" for one in self._page.waiting]
        lines += [f"{place}: {problem}" for place, problem in self._page.unread]
        if len(lines) == 1:
            lines.append("no checkpoint yet")
        return "\n".join(map(plain_text, lines))


def show(
    query: StreamingQuery | str | Path, *, redact_keys: bool = False, savepoints: Sequence[str | Path] = ()
) -> Summary:
    """Show a query's checkpoints in a notebook: the page of :func:`report`, as of now.

    Parameters
    ----------
    query : StreamingQuery, str or Path
        A query of this process, or a location, as in :func:`ui`.
    redact_keys : bool
        Whether keys are replaced by dots, as in :func:`ui`.
    savepoints : sequence of str or Path
        Folders with savepoints, as in :func:`report`.

    Returns
    -------
    Summary
        To be the last value of a cell; elsewhere it prints a line for each operator.

    Raises
    ------
    ConfigurationError
        If the location has no operator, or the extra is not installed.

    Examples
    --------
    >>> statelog.show("/data/checkpoints/flights")  # doctest: +SKIP
    """
    require_extra()
    watched = watch(query)()
    page = read_page(watched, SavepointFolders([str(folder) for folder in savepoints]))
    return Summary(page, redacts=redact_keys or watched.redacts_keys)
