"""The group of all commands, and the handling of errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import click

from statelog.errors import StatelogError
from statelog.tools.cli import query_commands, state_commands


class _Commands(click.Group):
    """Succeeds if the reader of the output closes the pipe, which is a failure for click and rich."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except (BrokenPipeError, SystemExit):
            with suppress(OSError):  # what is still buffered has no reader
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        return result


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
def commands() -> None:
    """Inspect, copy, restore and repair the state of PySpark streaming queries."""


for _command in (
    query_commands.doctor,
    state_commands.ls,
    state_commands.show,
    state_commands.get,
    state_commands.scan,
    state_commands.changes,
    state_commands.history,
    state_commands.diff,
    state_commands.export,
    state_commands.stats,
    query_commands.verify,
    state_commands.compare,
    query_commands.report,
    query_commands.ui,
    query_commands.pin,
    query_commands.pins,
    query_commands.unpin,
    query_commands.savepoint,
    query_commands.restore,
    query_commands.branch,
    query_commands.migrate,
    query_commands.rewind,
    query_commands.fall_back,
    query_commands.forget,
    query_commands.rename,
    query_commands.gc,
):
    commands.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns 0 if it succeeded, 1 if it failed with a message, 2 if its arguments are wrong."""
    try:
        code = commands.main(args=arguments, prog_name="statelog", standalone_mode=False)
    except StatelogError as error:
        print(f"statelog: {error}", file=sys.stderr)
        return 1
    except click.exceptions.Abort:
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code
    return code or 0
