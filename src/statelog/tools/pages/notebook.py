"""Shows the page in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

from statelog.shown import plain_text, size_text, time_text
from statelog.tools.pages.extra import require_extra
from statelog.tools.pages.live import watch
from statelog.tools.pages.model import PageModel, read_page
from statelog.tools.pages.savepoint_list import SavepointFolders

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

_HEIGHT: Final = 640


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
