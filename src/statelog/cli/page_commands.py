"""Commands that make the checkpoint page."""

from __future__ import annotations

from pathlib import Path

import click

from statelog.cli.arguments import LOCATION
from statelog.pages.report import report as write_report
from statelog.pages.ui import ui as serve_page


@click.command()
@LOCATION
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The HTML file to write."
)
def report(location: str, output: Path) -> None:
    """Write a page about the checkpoints, as one HTML file."""
    write_report(location, output)
    click.echo(f"{output} written")


@click.command()
@LOCATION
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to serve at.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The port; by default a free one.")
@click.option("--redact-keys", is_flag=True, help="Show dots in place of keys.")
def ui(location: str, host: str, port: int, redact_keys: bool) -> None:
    """Serve the page about the checkpoints, with a look into the state, until Ctrl-C."""
    with serve_page(location, host=host, port=port, redact_keys=redact_keys) as page:
        click.echo(f"Serving {page.url}\nStop it with Ctrl-C.")
        try:
            page.wait()
        except KeyboardInterrupt:
            click.echo("Stopped.", err=True)
