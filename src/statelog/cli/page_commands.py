"""Commands that make the checkpoint page."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from statelog.cli.arguments import LOCATION
from statelog.pages.report import report as write_report
from statelog.pages.ui import ui as serve_page

_SAVEPOINTS: Final = click.option(
    "--savepoints",
    multiple=True,
    metavar="FOLDER",
    help="List the query's savepoints in this folder too, besides those in LOCATION/savepoints; may be repeated.",
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
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to serve at.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The port; by default a free one.")
@click.option("--redact-keys", is_flag=True, help="Show dots in place of keys and values.")
@_SAVEPOINTS
def ui(location: str, host: str, port: int, redact_keys: bool, savepoints: tuple[str, ...]) -> None:
    """Serve the page about the checkpoints, with a look into the state, until Ctrl-C."""
    with serve_page(location, host=host, port=port, redact_keys=redact_keys, savepoints=savepoints) as page:
        click.echo(f"Serving {page.url}\nStop it with Ctrl-C.")
        try:
            page.wait()
        except KeyboardInterrupt:
            click.echo("Stopped.", err=True)
