"""The command that measures stored state."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

import click
import msgspec

from statelog.cli.arguments import JSON, LOCATION, UID
from statelog.cli.progress import shown_progress
from statelog.cli.shown import cell_text, show_results, show_table
from statelog.reading import stats as measures
from statelog.reading.stats import OperatorStats, StateStats

_STORED: Final = {
    "state": "state",
    "kind": "kind",
    "stored_rows": "stored rows",
    "stored_bytes": "size",
    "uncompressed_bytes": "uncompressed",
}
_SCANNED: Final = {
    "rows": "rows",
    "keys": "keys",
    "most_rows": "most of a key",
    "key_bytes": "keys' size",
    "value_bytes": "values' size",
}


@click.command()
@LOCATION
@UID
@click.option("--scan", is_flag=True, help="Read all state: rows, keys, and the largest keys.")
@JSON
def stats(location: str, uid: str | None, scan: bool, as_json: bool) -> None:
    """Show the size of the state: per operator and state, by subtask and key group, and why its files stay."""
    with shown_progress():
        found = measures.stats(location, uid, scan=scan)
    if as_json:
        show_results(found, {}, as_json=True)
        return
    for one in found:
        _show(one, scan=scan)


def _show(one: OperatorStats, *, scan: bool) -> None:
    rows = [
        [field.name.replace("_", " "), cell_text(field.name, getattr(one, field.name))]
        for field in fields(one)
        if field.name != "states"
    ]
    show_table(["", ""], rows)
    show_results(one.states, _STORED | (_SCANNED if scan else {}), as_json=False)
    largest = [row for state in one.states for row in _largest(state)]
    if largest:
        show_table(["state", "largest keys", "rows", "size"], largest)


def _largest(state: StateStats) -> list[list[str]]:
    return [
        [state.state, _key_text(key.key), f"{key.rows:,}", cell_text("size_bytes", key.size_bytes)]
        for key in state.largest_keys or ()
    ]


def _key_text(key: tuple[Any, ...]) -> str:
    """A key as commands take it."""
    if len(key) == 1:
        return "null" if key[0] is None else str(key[0])
    return msgspec.json.encode(key, enc_hook=str).decode()
