"""The command that checks all that is stored."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

import click

from statelog.cli.arguments import JSON, LOCATION, UID
from statelog.cli.progress import shown_progress
from statelog.cli.shown import show_results, write_json
from statelog.reading import verify as checks
from statelog.shown import plain_text
from statelog.texts import size_text

DAMAGED = 3
"""The exit code if something is damaged."""
DAMAGE_COLUMNS: Final = {
    "uid": "operator",
    "kind": "kind",
    "batches": "checkpoints",
    "pins": "pins",
    "problem": "problem",
}
"""The fields of a damage that people see, with their headings."""


@click.command()
@LOCATION
@UID
@JSON
def verify(location: str, uid: str | None, as_json: bool) -> None:
    """Read and check all that is stored. The exit code is 3 if something is damaged."""
    with shown_progress():
        done = checks.verify(location, uid)
    if as_json:
        write_json(asdict(done))
    else:
        if done.damages:
            show_results(done.damages, DAMAGE_COLUMNS, as_json=False)
        whole = ", ".join(f"{one}: {'none' if batch is None else batch}" for one, batch in done.whole.items()) or "none"
        whole = plain_text(whole)
        print(
            f"{done.checkpoints} checkpoints, {done.stored_parts:,} stored parts, {size_text(done.stored_bytes)};"
            f" newest without damage: {whole}"
        )
    if done.damages:
        click.get_current_context().exit(DAMAGED)
