"""Commands about whole queries: copy, restore, repair, verify, pins, the checkpoint page and the doctor."""

from __future__ import annotations

import getpass
import os
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import click

from statelog.queries import branch as branch_module
from statelog.queries import migrate as migrate_module
from statelog.queries import orphans, save_restore
from statelog.queries import rename as rename_module
from statelog.queries import rewind as repair
from statelog.reading import pins as pinning
from statelog.reading import verify as checks
from statelog.reading.point import At
from statelog.shown import plain_text, size_text
from statelog.tools.cli.arguments import AT, JSON, LOCATION, UID
from statelog.tools.cli.shown import show_result, show_results, show_table, shown_progress, write_json
from statelog.tools.doctor import doctor as diagnosis
from statelog.tools.doctor.finding import Finding
from statelog.tools.pages.ui import report as write_report
from statelog.tools.pages.ui import ui as serve_page

_PLACE: Final = click.option("--location", help="The location of the operators' state, if they are given one.")


@click.command()
@click.argument("query", metavar="CHECKPOINT")
@click.argument("target", metavar="SAVEPOINT")
@click.option("--batch", type=int, help="The retained checkpoint to save, instead of the newest one.")
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
@click.option("--claim", is_flag=True, help="Remove the savepoint once everything is restored.")
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
@click.option("--at", type=int, help="The batch to continue after; by default the newest one that Spark has committed.")
@_PLACE
@click.option("--new-location", help="The location for the new operators' state, if they are given one.")
@JSON
def branch(
    checkpoint_location: str,
    new_checkpoint: str,
    at: int | None,
    location: str | None,
    new_location: str | None,
    as_json: bool,
) -> None:
    """Write a NEW_CHECKPOINT location: a query that continues from another query's state, without copying it."""
    with shown_progress():
        made = branch_module.branch(
            checkpoint_location, new_checkpoint, at=at, location=location, new_location=new_location
        )
    show_result(made, as_json=as_json)


@click.command()
@click.argument("old_checkpoint", metavar="CHECKPOINT")
@click.argument("new_checkpoint", metavar="NEW_CHECKPOINT")
@click.option("--uid", help="The name that the operator will have, if it is given one.")
@click.option("--location", help="The location for the operator's state, if it is given one.")
@JSON
def migrate(old_checkpoint: str, new_checkpoint: str, uid: str | None, location: str | None, as_json: bool) -> None:
    """Write a NEW_CHECKPOINT location: a query with Spark's transformWithState that continues with statelog.

    Spark reads the state, so this starts a Spark session; SPARK_CONF_DIR and PYSPARK_SUBMIT_ARGS configure it.
    """
    made = migrate_module.migrate(old_checkpoint, new_checkpoint, uid=uid, location=location)
    show_result(made, as_json=as_json)


@click.command()
@click.argument("checkpoint_location", metavar="CHECKPOINT")
@click.option("--dry-run", is_flag=True, help="Only report the repair; change nothing.")
@click.option("--to", type=int, help="The batch to go back to; by default the newest one that Spark has committed.")
@_PLACE
@JSON
def rewind(
    checkpoint_location: str,
    dry_run: bool,
    to: int | None,
    location: str | None,
    as_json: bool,
) -> None:
    """Make Spark repeat the batches of a stopped query whose state is missing, or all batches after a batch."""
    show_result(repair.rewind(checkpoint_location, location=location, to=to, dry_run=dry_run), as_json=as_json)


@click.command(name="fall-back")
@click.argument("checkpoint_location", metavar="CHECKPOINT")
@click.option("--dry-run", is_flag=True, help="Only report the damage and the changes; change nothing.")
@_PLACE
@JSON
def fall_back(checkpoint_location: str, dry_run: bool, location: str | None, as_json: bool) -> None:
    """Set a stopped query with damaged state back to its newest undamaged checkpoint."""
    with shown_progress():
        done = repair.fall_back(checkpoint_location, location=location, dry_run=dry_run)
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
    """Give up the state of operator UID of a stopped query. The operator then starts empty, or may be removed."""
    show_result(rename_module.forget(checkpoint_location, uid, location=location, dry_run=dry_run), as_json=as_json)


@click.command()
@click.argument("checkpoint_location", metavar="CHECKPOINT")
@click.argument("uid")
@click.argument("new_uid")
@_PLACE
@JSON
def rename(checkpoint_location: str, uid: str, new_uid: str, location: str | None, as_json: bool) -> None:
    """Give operator UID of a stopped query the uid NEW_UID; the operator keeps its state."""
    show_result(rename_module.rename(checkpoint_location, uid, new_uid, location=location), as_json=as_json)


@click.command()
@click.argument("location")
@click.option("--delete", is_flag=True, help="Delete the objects; without it they are only listed.")
@click.option("--min-age-s", type=float, default=3600.0, show_default=True, help="Skip objects that are younger.")
@click.option("--release", is_flag=True, help="Include pins of branches that are gone; all branches must be reachable.")
@JSON
def gc(location: str, delete: bool, min_age_s: float, release: bool, as_json: bool) -> None:
    """List, or delete, the objects of a LOCATION that no checkpoint or pin needs. The query may be running."""
    with shown_progress():
        found = orphans.delete_orphans(location, min_age_s=min_age_s, release=release, dry_run=not delete)
    show_results(found, {"name": "name", "size_bytes": "size", "modified_s": "modified (Unix s)"}, as_json=as_json)
    if not as_json:
        total = size_text(sum(info.size_bytes for info in found))
        hint = "" if delete or not found else " Add --delete to delete them."
        click.echo(f"{'Deleted' if delete else 'Found'} {len(found)} objects, {total}.{hint}", err=True)


# ---- Verify ----


DAMAGED = 3
"""The exit code if something is damaged."""
DAMAGE_COLUMNS: Final = {
    "uid": "operator",
    "kind": "kind",
    "batches": "checkpoints",
    "pins": "pins",
    "problem": "problem",
}
"""The fields of a damage that are shown to people, with their headings."""


@click.command()
@LOCATION
@UID
@JSON
def verify(location: str, uid: str | None, as_json: bool) -> None:
    """Read and verify everything that is stored. The exit code is 3 if something is damaged."""
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
            f" newest undamaged: {whole}"
        )
    if done.damages:
        click.get_current_context().exit(DAMAGED)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())  # it has no name, as in many containers


@click.command()
@LOCATION
@click.option("--uid", help="The operator; by default all operators of the query.")
@AT
@click.option("--lasts-s", type=float, help="Seconds until the pin expires; without it the pin stays.")
@click.option("--owner", default=lambda: _user(), show_default="your user", help="Who pins it, and why.")
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


# ---- The checkpoint page ----


_SAVEPOINTS: Final = click.option(
    "--savepoints",
    multiple=True,
    metavar="FOLDER",
    help="Also list the query's savepoints in this folder, besides those in LOCATION/savepoints; may be repeated.",
)


@click.command()
@LOCATION
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The HTML file to write."
)
@_SAVEPOINTS
def report(location: str, output: Path, savepoints: tuple[str, ...]) -> None:
    """Write a page about the checkpoints, as one HTML file."""
    write_report(location, output, savepoints=savepoints)
    click.echo(f"{output} written")


@click.command()
@LOCATION
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The port; by default a free one.")
@click.option("--redact-keys", is_flag=True, help="Show dots in place of keys and values.")
@_SAVEPOINTS
def ui(location: str, host: str, port: int, redact_keys: bool, savepoints: tuple[str, ...]) -> None:
    """Serve the page about the checkpoints, with a form to look up state, until Ctrl-C."""
    with serve_page(location, host=host, port=port, redact_keys=redact_keys, savepoints=savepoints) as page:
        click.echo(f"Serving {page.url}\nStop it with Ctrl-C.")
        try:
            page.wait()
        except KeyboardInterrupt:
            click.echo("Stopped.", err=True)


# ---- The doctor ----


ERRORS = 1
"""The exit code if there is a finding of the level error."""
_LEVELS = ("ok", "warning", "error")


class ConfType(click.ParamType):  # type: ignore[type-arg]  # older versions of click have no parameter
    """A Spark setting, KEY=VALUE."""

    name = "key=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        key, equals, given = value.partition("=")
        if not key or not equals:
            self.fail(f"{value!r} is not of the form KEY=VALUE.", param, ctx)
        return key, given


@click.command()
@LOCATION
@click.option("--master", help="Spark's master; by default that of Spark's configuration, or local[*].")
@click.option("--conf", multiple=True, type=ConfType(), help="A Spark setting; may be repeated.")
@click.option("--kafka", metavar="HOST:PORT,...", help="The Kafka brokers of queries, to check them as well.")
@click.option(
    "--kafka-option",
    "kafka_options",
    multiple=True,
    type=ConfType(),
    help="An option of Spark's Kafka source or sink, such as subscribe=TOPIC; may be repeated.",
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Time limit of each check, in seconds.",
)
@JSON
def doctor(
    location: str,
    master: str | None,
    conf: tuple[tuple[str, str], ...],
    kafka: str | None,
    kafka_options: tuple[tuple[str, str], ...],
    timeout_s: float,
    as_json: bool,
) -> None:
    """Check that stateful queries can run with state at LOCATION: on this driver, and on all executors.

    Starts a Spark session. The exit code is 1 if a finding is an error.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was written is removed
    click.echo("Starting Spark, and asking every executor ...", err=True)
    options = dict(kafka_options) | ({} if kafka is None else {"kafka.bootstrap.servers": kafka})
    found = diagnosis.doctor_in_own_session(
        location, master=master, conf=dict(conf), kafka=options or None, timeout_s=timeout_s
    )
    if as_json:
        write_json([asdict(one) for one in found])
    else:
        _show(found)
    if any(one.level == "error" for one in found):
        click.get_current_context().exit(ERRORS)


def _show(found: Sequence[Finding]) -> None:
    """Show the findings, errors last; equal findings of several executors are shown as one."""
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for one in sorted(found, key=lambda one: _LEVELS.index(one.level)):
        rows.setdefault((one.level, one.check, one.found, one.remedy), []).append(f"{one.where} ({one.host})")
    show_table(
        ["", "check", "where", "found"],
        [
            [level, check, ", ".join(dict.fromkeys(where)), f"{told}\n-> {remedy}" if remedy else told]
            for (level, check, told, remedy), where in rows.items()
        ],
    )
    counts = Counter(one.level for one in found)
    print(", ".join([_count(counts["error"], "error"), _count(counts["warning"], "warning"), f"{counts['ok']} ok"]))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
