"""The command that checks whether stateful queries can run here."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from statelog.cli.arguments import JSON, LOCATION
from statelog.cli.shown import show_table, write_json
from statelog.diagnosis import doctor as diagnosis
from statelog.diagnosis.finding import Finding

ERRORS = 1
"""The exit code if there is a finding of the level error."""
_LEVELS = ("ok", "warning", "error")


class ConfType(click.ParamType):  # type: ignore[type-arg]  # older versions of click have no parameter
    """A setting of Spark, KEY=VALUE."""

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
@click.option("--conf", multiple=True, type=ConfType(), help="A setting of Spark; may be repeated.")
@click.option(
    "--timeout-s", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True, help="Of each check."
)
@JSON
def doctor(
    location: str, master: str | None, conf: tuple[tuple[str, str], ...], timeout_s: float, as_json: bool
) -> None:
    """Check that stateful queries can run with state at LOCATION: on this driver, and on all executors.

    Starts a Spark session. The exit code is 1 if something is an error.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was written is removed
    click.echo("Starting Spark, and asking every executor ...", err=True)
    found = diagnosis.doctor_in_own_session(location, master=master, conf=dict(conf), timeout_s=timeout_s)
    if as_json:
        write_json([asdict(one) for one in found])
    else:
        _show(found)
    if any(one.level == "error" for one in found):
        click.get_current_context().exit(ERRORS)


def _show(found: Sequence[Finding]) -> None:
    """Show the findings, errors last, with equal ones of several executors as one."""
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
