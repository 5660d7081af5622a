"""Writes the page to a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from statelog.errors import ConfigurationError, ErrorKind
from statelog.files import removed_on_failure
from statelog.pages.extra import require_extra
from statelog.pages.live import watch
from statelog.pages.model import read_page
from statelog.pages.savepoint_list import SavepointFolders


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
    from statelog.pages.render import render

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
