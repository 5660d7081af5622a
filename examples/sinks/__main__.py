"""Kill queries with sinks as often as asked, and check that every target has every row once."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from pathlib import Path

import click

from examples.processes import JobFailedError
from examples.sinks.kills import Death, survive
from examples.sinks.targets import TARGETS


@click.command()
@click.argument("sinks", nargs=-1, required=True, type=click.Choice(sorted(TARGETS)))
@click.option("--kills", type=click.IntRange(0), default=100, show_default=True, help="How often all are killed.")
@click.option("--seed", type=int, default=1, show_default=True, help="Varies the moments of the kills.")
@click.option("--keep", is_flag=True, help="Do not remove the directory of the queries at the end.")
def main(sinks: tuple[str, ...], kills: int, seed: int, keep: bool) -> None:
    """Kill a process with a query for each of SINKS; the exit code is 0 if every row is there exactly once."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # children are ended on the way out
    directory = Path(tempfile.mkdtemp(prefix="statelog-sinks-")).resolve()

    def on_kill(death: Death) -> None:
        click.echo(f"killed {death}", err=True)

    try:
        outcome = survive(list(dict.fromkeys(sinks)), directory, kills, seed, on_kill)
    except JobFailedError as error:
        lines = (directory / "job.log").read_text(errors="replace").splitlines()[-30:]
        click.echo("\n".join([f"{error} The end of its log:", *lines]), err=True)
        sys.exit(1)
    finally:
        if keep:
            click.echo(f"kept: {directory}", err=True)
        else:
            shutil.rmtree(directory, ignore_errors=True)
    for death, times in sorted(outcome.kills.items()):
        click.echo(f"killed {times:>3} times {death}")
    for sink, found in outcome.sinks.items():
        click.echo(
            f"{sink}: {outcome.rows:,} rows in {found.batches:,} batches; was ahead of Spark {found.ahead} times"
        )
        click.echo("\n".join(found.differences) or "each row is there exactly once")
    sys.exit(1 if any(found.differences for found in outcome.sinks.values()) else 0)


if __name__ == "__main__":
    main()
