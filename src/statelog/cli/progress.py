"""Shows on a terminal how far a command is, if it takes longer."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from statelog.clock import SystemClock
from statelog.progress import Progress, watching
from statelog.texts import size_text

_AFTER_S: Final = 1.0
"""Shorter commands show nothing."""
_BAR_WIDTH: Final = 40


@contextmanager
def shown_progress(console: Console | None = None, after_s: float = _AFTER_S) -> Iterator[None]:
    """Show the progress of the calls in the block on the standard error, if that is a terminal.

    Nothing must be written to a terminal in the block but by way of `sys.stderr`.
    """
    if console is None:
        console = Console(stderr=True, force_terminal=sys.stderr.isatty())
    if not console.is_terminal or console.is_dumb_terminal:
        yield
        return
    clock = SystemClock()
    begun_s = clock.monotonic_s()
    with watching() as watched:
        live = Live(
            get_renderable=lambda: _line(watched, clock.monotonic_s() - begun_s),
            console=console,
            transient=True,
            redirect_stdout=False,
            refresh_per_second=10,
        )
        timer = threading.Timer(after_s, live.start, [True])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            live.stop()


def _line(watched: Progress, elapsed_s: float) -> Table:
    done, known = watched.done_bytes, watched.known_bytes
    line = Table.grid(padding=(0, 1))
    line.add_row(
        ProgressBar(total=known or None, completed=done, width=_BAR_WIDTH),
        f"{size_text(done)} of {size_text(known)}" if known else "",
        str(timedelta(seconds=int(elapsed_s))),
    )
    return line
