"""Shows results and rows, as tables for people or as JSON, and the progress of a long command."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Final

import msgspec
import pyarrow as pa
from rich import box
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from statelog.clock import SystemClock
from statelog.progress import Progress, watching
from statelog.shown import plain_json, plain_text, python_rows, size_text, time_text

_WIDTH: Final = 10_000
"""The width of tables that go to a file or a pipe, where lines are not broken."""

_MADE_BY_SUFFIX: Final[dict[str, Callable[[Any], str]]] = {
    "_bytes": size_text,
    "_ms": time_text,
}


def show_results(results: Sequence[Any], columns: Mapping[str, str], *, as_json: bool) -> None:
    """Show dataclass instances: some of their fields, with headings, or all as a JSON array."""
    rows = [asdict(one) for one in results]
    if as_json:
        write_json(rows)
        return
    show_table(list(columns.values()), [[cell_text(name, row[name]) for name in columns] for row in rows])


def show_result(result: Any, *, as_json: bool) -> None:
    """Show a dataclass instance, a line per field, or as a JSON object."""
    fields = asdict(result)
    if as_json:
        write_json(fields)
        return
    show_table(["", ""], [[name.replace("_", " "), cell_text(name, value)] for name, value in fields.items()])


def write_json(value: Any) -> None:
    """Write a value as indented JSON."""
    print(plain_json(msgspec.json.format(msgspec.json.encode(value, enc_hook=str)).decode()))


def show_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table."""
    if not rows:
        print("none")
        return
    table = Table(*map(plain_text, headings), box=box.SIMPLE, show_header=any(headings), pad_edge=False)
    for row in rows:
        table.add_row(*(plain_text(cell, "\n") for cell in row))
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, markup=False, highlight=False, emoji=False)
    console.print(table)


def cell_text(name: str, value: Any) -> str:
    """A field of a result for people; the suffix of its name is its unit."""
    if value is None:
        return "-"
    for suffix, text in _MADE_BY_SUFFIX.items():
        if name.endswith(suffix):
            return text(value)
    if isinstance(value, (tuple, list)):
        return plain_text(", ".join(map(str, value)))
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if type(value) is int and name.endswith(("rows", "keys")) else plain_text(str(value))


def show_rows(rows: pa.RecordBatchReader, *, limit: int = 0, as_json: bool) -> None:
    """Show rows: as one table, or as a JSON object per line; with `limit` the first ones, and a note if there are more.

    The progress is shown while nothing is written to a terminal: for JSON, only if the output goes elsewhere.
    """
    batches = _first(rows, limit) if limit else rows
    if as_json:
        with nullcontext() if sys.stdout.isatty() else shown_progress():
            for batch in batches:
                for row in python_rows(batch):
                    line = plain_json(msgspec.json.encode(row, enc_hook=str).decode())
                    sys.stdout.buffer.write(line.encode() + b"\n")
        sys.stdout.buffer.flush()
        return
    cells: list[list[str]] = []
    with shown_progress():
        for batch in batches:
            cells += [[_text(value) for value in row.values()] for row in python_rows(batch)]
    show_table(rows.schema.names, cells)


def _first(rows: Iterable[pa.RecordBatch], limit: int) -> Iterator[pa.RecordBatch]:
    """The first rows, and a note if there are more."""
    left = limit
    for batch in rows:
        yield batch.slice(0, left)
        left -= batch.num_rows
        if left < 0:
            print(f"Only the first {limit:,} rows are shown; --limit 0 shows all.", file=sys.stderr)
            return


def _text(value: Any) -> str:
    return "null" if value is None else plain_text(str(value))


# ---- Progress, on a terminal ----


_AFTER_S: Final = 1.0
"""Shorter commands show nothing."""
_BAR_WIDTH: Final = 40


@contextmanager
def shown_progress(console: Console | None = None, after_s: float = _AFTER_S) -> Iterator[None]:
    """Show the progress of the calls in the block on the standard error, if that is a terminal.

    The block may write to a terminal only through `sys.stderr`.
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
