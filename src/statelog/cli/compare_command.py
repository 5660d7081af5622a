"""The command that compares two queries."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

import click

from statelog.cli.arguments import AT, JSON, LOCATION, UID, AtType
from statelog.cli.progress import shown_progress
from statelog.cli.shown import show_table, write_json
from statelog.reading import compare as comparison
from statelog.reading.source import At

DIFFERENT: Final = 4
"""The exit code if a state is different."""
_SHOWN_GROUPS: Final = 5


@click.command()
@LOCATION
@click.argument("other")
@UID
@click.option("--other-uid", help="The other query's operator, if it has another name.")
@AT
@click.option("--other-at", type=AtType(), help="The other query's checkpoint, if it is another one.")
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
    """Compare all states of an operator with those of an OTHER query. The exit code is 4 if one is different."""
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
