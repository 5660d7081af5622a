"""Commands that show what is stored, its rows and its size, and compare two queries."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

import click
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from statelog.errors import ConfigurationError, ErrorKind
from statelog.reading import compare as comparison
from statelog.reading import stats as measures
from statelog.reading.changes import read_changes
from statelog.reading.diff import read_diff
from statelog.reading.history import read_history
from statelog.reading.keys import keys_of
from statelog.reading.listing import list_checkpoints, list_operators, list_states
from statelog.reading.open import find_savepoint, open_point
from statelog.reading.point import At
from statelog.reading.read import read_state
from statelog.reading.stats import OperatorStats, StateStats
from statelog.runs.schema import decode_schema
from statelog.tools.cli.arguments import AT, COLUMNS, JSON, KEYS, LIMIT, LOCATION, STATE, UID, AtType, names_of
from statelog.tools.cli.shown import cell_text, show_results, show_rows, show_table, shown_progress, write_json


@click.command()
@LOCATION
@JSON
def ls(location: str, as_json: bool) -> None:
    """List the operators of a query."""
    columns = {
        "uid": "operator",
        "key": "key",
        "states": "states",
        "parallelism": "subtasks",
        "batch": "batch",
        "batch_time_ms": "time (UTC)",
        "state_bytes": "size",
    }
    show_results(list_operators(location), columns, as_json=as_json)


@click.command()
@LOCATION
@UID
@JSON
def show(location: str, uid: str | None, as_json: bool) -> None:
    """Show the states and the checkpoints of operators."""
    uids, is_saved = [one.uid for one in list_operators(location)], find_savepoint(location) is not None
    if uid is not None:
        # An operator whose state was given up may have pinned checkpoints.
        uids = [uid] if is_saved or uid in uids else []
    states = [state for one in uids for state in list_states(location, one)]
    checkpoints = [] if is_saved else list_checkpoints(location, uid)
    if as_json:
        write_json({"states": states, "checkpoints": checkpoints})
        return
    show_results(states, {"uid": "operator", "state": "state", "kind": "kind", "columns": "columns"}, as_json=False)
    columns = {
        "uid": "operator",
        "batch": "batch",
        "batch_time_ms": "time (UTC)",
        "kept_by": "kept by",
        "kept_until_ms": "until (UTC)",
        "state_bytes": "size",
        "own_bytes": "of its own",
        "is_on_line": "on the line",
    }
    show_results(checkpoints, columns, as_json=False)


@click.command()
@LOCATION
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@UID
@STATE
@AT
@COLUMNS
@JSON
def get(
    location: str,
    keys: tuple[str, ...],
    uid: str | None,
    state: str | None,
    at: At | None,
    columns: str | None,
    as_json: bool,
) -> None:
    """Show the state of some keys.

    Write a KEY with one field as it is, and a KEY with several fields as a JSON array.
    """
    table = _keys(location, uid, at, keys)
    show_rows(read_state(location, uid, state, at=at, keys=table, columns=names_of(columns)), as_json=as_json)


@click.command()
@LOCATION
@UID
@STATE
@AT
@COLUMNS
@LIMIT
@JSON
def scan(
    location: str,
    uid: str | None,
    state: str | None,
    at: At | None,
    columns: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """Show the rows of a state."""
    rows = read_state(location, uid, state, at=at, columns=names_of(columns))
    show_rows(rows, limit=limit, as_json=as_json)


@click.command()
@LOCATION
@UID
@STATE
@KEYS
@click.option("--after", type=int, help="Only later batches.")
@click.option("--up-to", type=int, help="The last batch; by default the newest one.")
@COLUMNS
@LIMIT
@JSON
def changes(
    location: str,
    uid: str | None,
    state: str | None,
    keys: tuple[str, ...],
    after: int | None,
    up_to: int | None,
    columns: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """Show what each batch has changed in a state."""
    table = _keys(location, uid, up_to, keys) if keys else None
    rows = read_changes(location, uid, state, after=after, up_to=up_to, keys=table, columns=names_of(columns))
    show_rows(rows, limit=limit, as_json=as_json)


@click.command()
@LOCATION
@click.argument("key")
@UID
@STATE
@COLUMNS
@JSON
def history(location: str, key: str, uid: str | None, state: str | None, columns: str | None, as_json: bool) -> None:
    """Show what happened to one key, batch by batch."""
    [row] = _keys(location, uid, None, (key,)).to_pylist()
    show_rows(read_history(location, row, uid, state, columns=names_of(columns)), as_json=as_json)


@click.command()
@LOCATION
@click.argument("before", type=AtType())
@click.argument("after", type=AtType(), required=False)
@UID
@STATE
@COLUMNS
@LIMIT
@JSON
def diff(
    location: str,
    before: At,
    after: At | None,
    uid: str | None,
    state: str | None,
    columns: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """Show the differences in a state between the checkpoints BEFORE and AFTER, by default the newest one."""
    rows = read_diff(location, before, after, uid, state, columns=names_of(columns))
    show_rows(rows, limit=limit, as_json=as_json)


@click.command()
@LOCATION
@click.argument("target", type=click.Path(path_type=Path, dir_okay=False))
@UID
@STATE
@AT
@COLUMNS
@JSON
def export(
    location: str,
    target: Path,
    uid: str | None,
    state: str | None,
    at: At | None,
    columns: str | None,
    as_json: bool,
) -> None:
    """Write the rows of a state to a Parquet file TARGET, which must not exist."""
    if target.exists():
        raise ConfigurationError(f"{target} already exists.", kind=ErrorKind.VALUE_MISMATCH, hint="Name another file.")
    rows = read_state(location, uid, state, at=at, columns=names_of(columns))
    count = 0
    unfinished = target.with_name(f".{target.name}.unfinished")
    try:
        with shown_progress(), pq.ParquetWriter(unfinished, rows.schema) as writer:
            for batch in rows:
                writer.write_batch(batch)
                count += batch.num_rows
        unfinished.rename(target)
    except OSError as error:
        del rows  # its pin goes now, although the error's traceback has this frame
        raise ConfigurationError(
            f"{target} cannot be written: {error}.", kind=ErrorKind.VALUE_MISMATCH, hint="Name a writable file."
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)
    if as_json:
        write_json({"target": str(target), "rows": count})
    else:
        print(f"{count:,} rows written to {target}")


def _keys(location: str, uid: str | None, at: At | None, texts: tuple[str, ...]) -> pa.Table:
    point = open_point(location, uid, at)
    if not point.key_schema:
        raise ConfigurationError(f"{point.name} has no keys.", hint="Show its rows with scan.")
    return keys_of(texts, decode_schema(point.key_schema))


DIFFERENT: Final = 4
"""The exit code if a state differs."""
_SHOWN_GROUPS: Final = 5


@click.command()
@LOCATION
@click.argument("other")
@UID
@click.option("--other-uid", help="The other query's operator, if it has another name.")
@AT
@click.option("--other-at", type=AtType(), help="The other query's checkpoint, if it differs.")
@click.option("--ignore", multiple=True, help="A column that may differ, such as expires_ms.")
@JSON
def compare(
    location: str,
    other: str,
    uid: str | None,
    other_uid: str | None,
    at: At | None,
    other_at: At | None,
    ignore: tuple[str, ...],
    as_json: bool,
) -> None:
    """Compare all states of an operator with those of an OTHER query. The exit code is 4 if a state differs."""
    with shown_progress():
        found = comparison.compare(location, other, uid, other_uid=other_uid, at=at, other_at=other_at, ignore=ignore)
    if as_json:
        write_json([asdict(one) for one in found])
    else:
        rows = [[one.state, f"{one.rows:,}", f"{one.other_rows:,}", _groups(one.different_groups)] for one in found]
        show_table(["state", "rows", "other rows", "different key groups"], rows)
    if not all(one.is_equal for one in found):
        click.get_current_context().exit(DIFFERENT)


def _groups(groups: tuple[int, ...]) -> str:
    if not groups:
        return "none"
    shown = ", ".join(map(str, groups[:_SHOWN_GROUPS]))
    return f"{len(groups):,}: {shown}{', ...' if len(groups) > _SHOWN_GROUPS else ''}"


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
    """Show the size of the state: per operator and state, by subtask and key group, and why its files are kept."""
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


def _key_text(key: tuple[Any, ...] | None) -> str:
    """A key as commands take it."""
    if key is None:
        return "a value that Python lacks"
    if len(key) == 1:
        return "null" if key[0] is None else str(key[0])
    return msgspec.json.encode(key, enc_hook=str).decode()
