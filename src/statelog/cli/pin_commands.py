"""Commands about pins, which keep checkpoints."""

from __future__ import annotations

import getpass

import click

from statelog.cli.arguments import AT, JSON, LOCATION, UID
from statelog.cli.shown import show_result, show_results
from statelog.reading import pinning
from statelog.reading.source import At


@click.command()
@LOCATION
@click.option("--uid", help="The operator; by default all of the query.")
@AT
@click.option("--lasts-s", type=float, help="Seconds until the pin expires; without it the pin stays.")
@click.option("--owner", default=lambda: getpass.getuser(), show_default="your user", help="Who makes it, what for.")
@JSON
def pin(location: str, uid: str | None, at: At | None, lasts_s: float | None, owner: str, as_json: bool) -> None:
    """Keep a checkpoint readable."""
    show_result(pinning.pin(location, uid, at=at, lasts_s=lasts_s, owner=owner), as_json=as_json)


@click.command()
@LOCATION
@UID
@JSON
def pins(location: str, uid: str | None, as_json: bool) -> None:
    """List the pins."""
    columns = {
        "uids": "operators",
        "batch": "batch",
        "batch_time_ms": "time (UTC)",
        "owner": "owner",
        "expires_ms": "expires (UTC)",
        "state_bytes": "size",
        "is_on_line": "on the line",
        "name": "name",
    }
    show_results(pinning.list_pins(location, uid), columns, as_json=as_json)


@click.command()
@LOCATION
@click.argument("name")
def unpin(location: str, name: str) -> None:
    """Remove the pin NAME, as listed by pins."""
    pinning.unpin(location, name)
