"""The command that runs a batch again for one key."""

from __future__ import annotations

import importlib
import os
import sys
from difflib import SequenceMatcher
from typing import Any

import click
import pyarrow as pa

from statelog.cli.arguments import JSON, LOCATION, UID
from statelog.cli.compare_command import DIFFERENT
from statelog.cli.rows import show_rows
from statelog.cli.shown import show_table, write_json
from statelog.errors import ConfigurationError, ErrorKind
from statelog.reading.key_text import keys_of
from statelog.reading.source import open_source
from statelog.runs.schema import decode_schema
from statelog.streams import replay as replaying
from statelog.texts import time_text


@click.command()
@LOCATION
@click.option("--batch", type=int, required=True, help="The batch.")
@click.option("--key", required=True, help="The key, as in get.")
@click.option(
    "--processor", "name", required=True, metavar="MODULE:NAME", help="The processor's class, or an instance."
)
@UID
@click.option("--pdb", is_flag=True, help="Stop in the debugger before each call of the processor.")
@JSON
def replay(location: str, batch: int, key: str, name: str, uid: str | None, pdb: bool, as_json: bool) -> None:
    """Run a batch again for one key, on its state and the stored sample of its rows.

    The exit code is 4 if the changes are not those of the log.
    """
    processor = _processor(name)
    source = open_source(location, uid, batch)
    [row] = keys_of((key,), decode_schema(source.key_schema)).to_pylist() if source.key_schema else [{}]
    done = replaying.replay(location, batch, row, processor, uid=uid, breakpoint=pdb)
    if as_json:
        write_json(_as_json(done))
    else:
        _show(done)
    if not done.is_equal:
        click.get_current_context().exit(DIFFERENT)


def _processor(name: str) -> Any:
    """The processor of a name, MODULE:NAME; modules of the working directory are found too."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
        return found() if isinstance(found, type) else found
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"--processor {name}: {type(error).__name__}: {error}.",
            kind=ErrorKind.VALUE_MISMATCH,
            hint="Name it as MODULE:NAME: a class that takes no arguments, or an instance of one that does.",
        ) from error


def _as_json(done: replaying.Replay) -> dict[str, Any]:
    fields = {name: value for name, value in vars(done).items() if not isinstance(value, (pa.Table, dict))}
    return {
        **fields,
        "key": done.key,
        "rows": done.rows.to_pylist(),
        "output": done.output.to_pylist(),
        "changes": {state: rows.to_pylist() for state, rows in done.changes.items()},
        "logged": {state: rows.to_pylist() for state, rows in done.logged.items()},
        "different_states": done.different_states,
    }


def _show(done: replaying.Replay) -> None:
    timers = ", ".join(map(time_text, done.timers_ms)) or "none"
    print(f"operator {done.uid}, batch {done.batch}, key {', '.join(map(str, done.key.values()))}")
    print(f"time {time_text(done.batch_time_ms)}, watermark {time_text(done.watermark_ms)}, due timers: {timers}")
    print("\nrows, in the order of the query" if done.is_order_known else "\nrows")
    show_rows(done.rows.to_reader(), as_json=False)
    print("output")
    show_rows(done.output.to_reader(), as_json=False)
    print("changes")
    show_table(
        ["state", "", "replayed", "in the log"], [line for state in done.changes for line in _lines(done, state)]
    )
    different = ", ".join(done.different_states)
    print(f"The changes are not those of the log: {different}" if different else "The changes are those of the log.")


def _lines(done: replaying.Replay, state: str) -> list[list[str]]:
    """The changes of a state, equal ones side by side."""
    made, logged = ([_text(row) for row in rows[state].to_pylist()] for rows in (done.changes, done.logged))
    lines: list[list[str]] = []
    for tag, first, last, first_logged, last_logged in SequenceMatcher(
        None, made, logged, autojunk=False
    ).get_opcodes():
        count = max(last - first, last_logged - first_logged)
        sides = (side + [""] * (count - len(side)) for side in (made[first:last], logged[first_logged:last_logged]))
        lines += [[state, "" if tag == "equal" else "!", *pair] for pair in zip(*sides, strict=True)]
    return lines


def _text(row: dict[str, Any]) -> str:
    operation = row["operation"]
    fields = [(name, value) for name, value in row.items() if name != "operation"]
    return " ".join(
        [operation, *(f"{name}={value!r}" for name, value in fields if value is not None or operation == "put")]
    )
