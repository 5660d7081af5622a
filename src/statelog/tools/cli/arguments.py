"""The arguments that commands have in common."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import click

from statelog.errors import ConfigurationError
from statelog.reading.point import At, parse_at


class AtType(click.ParamType):  # type: ignore[type-arg]  # older versions of click have no parameter
    """A batch, a time in ISO 8601 (in UTC if it has no zone), or a pin's name."""

    name = "batch, time or pin"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> At:
        if isinstance(value, int | datetime):
            return value
        try:
            return parse_at(value)
        except ConfigurationError as error:
            self.fail(str(error), param, ctx)


LOCATION: Final = click.argument("location")
UID: Final = click.option("--uid", help="The operator; required if there are several.")
STATE: Final = click.option("--state", help="The state; required if there are several.")
AT: Final = click.option(
    "--at", type=AtType(), help="A batch; a time, for the newest checkpoint that is not later; or a pin's name."
)
JSON: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
LIMIT: Final = click.option(
    "--limit", type=click.IntRange(min=0), default=100, show_default=True, help="The most rows to show; 0 for all."
)
COLUMNS: Final = click.option("--columns", help="The columns, separated by commas.")
KEYS: Final = click.option("--key", "keys", multiple=True, help="Only this key, as in get; may be repeated.")


def names_of(columns: str | None) -> list[str] | None:
    """The columns that a user has named."""
    return None if columns is None else [name.strip() for name in columns.split(",")]
