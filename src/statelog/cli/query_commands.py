"""Commands that copy, restore and repair stopped queries, and that delete what no query needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import click

from statelog.cli.arguments import JSON
from statelog.cli.progress import shown_progress
from statelog.cli.shown import show_result, show_results
from statelog.cli.verify_command import DAMAGE_COLUMNS
from statelog.streams import branch as branch_module
from statelog.streams import fall_back as fall_back_module
from statelog.streams import forget as forget_module
from statelog.streams import migrate as migrate_module
from statelog.streams import orphans, repair, save_restore
from statelog.streams import rename as rename_module
from statelog.texts import size_text

_PLACE: Final = click.option("--location", help="Where the operators' state is, if they are given a location.")


@click.command()
@click.argument("query", metavar="CHECKPOINT")
@click.argument("target", metavar="SAVEPOINT")
@click.option("--batch", type=int, help="A retained checkpoint other than the newest.")
@_PLACE
@JSON
def savepoint(query: str, target: str, batch: int | None, location: str | None, as_json: bool) -> None:
    """Copy all state of a stopped query, with its source offsets, from its CHECKPOINT location to a SAVEPOINT."""
    with shown_progress():
        made = save_restore.savepoint(query, target, location=location, batch=batch)
    show_result(made, as_json=as_json)


@click.command()
@click.argument("source", metavar="SAVEPOINT")
@click.argument("checkpoint_location", metavar="CHECKPOINT")
@click.option("--claim", is_flag=True, help="Remove the savepoint when all is restored.")
@_PLACE
@JSON
def restore(source: str, checkpoint_location: str, claim: bool, location: str | None, as_json: bool) -> None:
    """Write a CHECKPOINT location from which a query continues after a SAVEPOINT."""
    with shown_progress():
        made = save_restore.restore(source, checkpoint_location, location=location, claim=claim)
    show_result(made, as_json=as_json)


@click.command()
@click.argument("checkpoint_location", metavar="CHECKPOINT")
@click.argument("new_checkpoint", metavar="NEW_CHECKPOINT")
@click.option("--at", type=int, help="The batch to go on after; by default the newest that Spark has committed.")
@_PLACE
@click.option("--new-location", help="Where the new operators' state goes, if they are given a location.")
@JSON
def branch(
    checkpoint_location: str,
    new_checkpoint: str,
    at: int | None,
    location: str | None,
    new_location: str | None,
    as_json: bool,
) -> None:
    """Write a NEW_CHECKPOINT location: a query that goes on from the state of another one, without copying it."""
    with shown_progress():
        made = branch_module.branch(
            checkpoint_location, new_checkpoint, at=at, location=location, new_location=new_location
        )
    show_result(made, as_json=as_json)


@click.command()
@click.argument("old_checkpoint", metavar="CHECKPOINT")
@click.argument("new_checkpoint", metavar="NEW_CHECKPOINT")
@click.option("--uid", help="The name that the operator will have, if it is given one.")
@click.option("--location", help="Where the operator's state goes, if it is given a location.")
@JSON
def migrate(old_checkpoint: str, new_checkpoint: str, uid: str | None, location: str | None, as_json: bool) -> None:
    """Write a NEW_CHECKPOINT location: a query of Spark's transformWithState that goes on with statelog.

    Spark reads the state, so this begins a session; SPARK_CONF_DIR and PYSPARK_SUBMIT_ARGS configure it.
    """
    made = migrate_module.migrate(old_checkpoint, new_checkpoint, uid=uid, location=location)
    show_result(made, as_json=as_json)


@click.command()
@click.argument("checkpoint_location", metavar="CHECKPOINT")
@click.option("--dry-run", is_flag=True, help="Only report the repair; change nothing.")
@click.option("--to", type=int, help="The batch to go back to; by default the newest that Spark has committed.")
@_PLACE
@JSON
def rewind(
    checkpoint_location: str,
    dry_run: bool,
    to: int | None,
    location: str | None,
    as_json: bool,
) -> None:
    """Have Spark repeat batches of a stopped query whose state is missing, or all after a batch."""
    show_result(repair.rewind(checkpoint_location, location=location, to=to, dry_run=dry_run), as_json=as_json)


@click.command(name="fall-back")
@click.argument("checkpoint_location", metavar="CHECKPOINT")
@click.option("--dry-run", is_flag=True, help="Only report damage and changes; change nothing.")
@_PLACE
@JSON
def fall_back(checkpoint_location: str, dry_run: bool, location: str | None, as_json: bool) -> None:
    """Set a stopped query with damaged state back to its newest checkpoint without damage."""
    with shown_progress():
        done = fall_back_module.fall_back(checkpoint_location, location=location, dry_run=dry_run)
    if as_json:
        show_result(done, as_json=True)
        return
    show_results(done.damages, DAMAGE_COLUMNS, as_json=False)
    show_result(replace(done, damages=()), as_json=False)


@click.command()
@click.argument("checkpoint_location", metavar="CHECKPOINT")
@click.argument("uid")
@click.option("--dry-run", is_flag=True, help="Only report the state; give up nothing.")
@_PLACE
@JSON
def forget(checkpoint_location: str, uid: str, dry_run: bool, location: str | None, as_json: bool) -> None:
    """Give up the state of operator UID of a stopped query, which then goes on without it, or with it empty."""
    show_result(forget_module.forget(checkpoint_location, uid, location=location, dry_run=dry_run), as_json=as_json)


@click.command()
@click.argument("checkpoint_location", metavar="CHECKPOINT")
@click.argument("uid")
@click.argument("new_uid")
@_PLACE
@JSON
def rename(checkpoint_location: str, uid: str, new_uid: str, location: str | None, as_json: bool) -> None:
    """Give operator UID of a stopped query the uid NEW_UID; its state stays."""
    show_result(rename_module.rename(checkpoint_location, uid, new_uid, location=location), as_json=as_json)


@click.command()
@click.argument("location")
@click.option("--delete", is_flag=True, help="Delete the objects; without it they are only listed.")
@click.option("--min-age-s", type=float, default=3600.0, show_default=True, help="Leave younger objects alone.")
@click.option("--release", is_flag=True, help="Also the pins of branches that are gone; all must be within reach.")
@JSON
def gc(location: str, delete: bool, min_age_s: float, release: bool, as_json: bool) -> None:
    """List, or delete, the objects of a LOCATION that no checkpoint or pin needs. The query may run meanwhile."""
    with shown_progress():
        found = orphans.delete_orphans(location, min_age_s=min_age_s, release=release, dry_run=not delete)
    show_results(found, {"name": "name", "size_bytes": "size", "modified_s": "modified (Unix s)"}, as_json=as_json)
    if not as_json:
        total = size_text(sum(info.size_bytes for info in found))
        hint = "" if delete or not found else " Add --delete to delete them."
        click.echo(f"{'Deleted' if delete else 'Found'} {len(found)} objects, {total}.{hint}", err=True)
