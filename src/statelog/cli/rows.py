"""Shows rows: as one table, or as JSON while they are read."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import msgspec
import pyarrow as pa

from statelog.cli.progress import shown_progress
from statelog.cli.shown import show_table
from statelog.shown import plain_json, plain_text


def show_rows(rows: pa.RecordBatchReader, *, limit: int = 0, as_json: bool) -> None:
    """Show rows: as one table, or as a JSON object per line; with `limit` the first ones, and a note if there are more.

    The progress is shown while nothing is written to a terminal: for JSON only if the output goes elsewhere.
    """
    batches = _first(rows, limit) if limit else rows
    if as_json:
        with nullcontext() if sys.stdout.isatty() else shown_progress():
            for batch in batches:
                for row in batch.to_pylist():
                    line = plain_json(msgspec.json.encode(row, enc_hook=str).decode())
                    sys.stdout.buffer.write(line.encode() + b"\n")
        sys.stdout.buffer.flush()
        return
    cells: list[list[str]] = []
    with shown_progress():
        for batch in batches:
            cells += [[_text(value) for value in row.values()] for row in batch.to_pylist()]
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
