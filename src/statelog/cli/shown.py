"""Shows results: as tables for people, or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from statelog.shown import plain_json, plain_text
from statelog.texts import size_text, time_text

_WIDTH: Final = 10_000
"""Of tables that go to a file or a pipe, where lines are not broken."""

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
    """A field of a result for people; the end of its name is its unit."""
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
