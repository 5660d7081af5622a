"""The command line: ``python -m statelog COMMAND``. A command calls a public function and prints its result as JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from statelog.errors import StatelogError
from statelog.streams.orphans import list_orphans
from statelog.streams.repair import rewind
from statelog.streams.save_restore import restore, savepoint


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns 0 if it worked, 1 if it failed with a message. Wrong arguments exit with 2."""
    given = vars(_parser().parse_args(arguments))
    command = given.pop("command")
    try:
        result = command(**given)
    except StatelogError as error:
        print(f"statelog: {error}", file=sys.stderr)
        return 1
    shown: Any = [asdict(one) for one in result] if isinstance(result, list) else asdict(result)
    print(msgspec.json.format(msgspec.json.encode(shown)).decode())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="statelog", description="Savepoints and repairs.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    one = commands.add_parser("savepoint", help="copy all state of a stopped query, with its source offsets")
    one.add_argument("query", metavar="CHECKPOINT", help="the query's checkpointLocation")
    one.add_argument("target", metavar="SAVEPOINT", help="an empty directory, or a folder in an object store")
    one.add_argument("--batch", type=int, help="a retained checkpoint other than the newest")
    _add_location(one)
    one.set_defaults(command=savepoint)

    one = commands.add_parser("restore", help="write a checkpoint from which a query continues after a savepoint")
    one.add_argument("source", metavar="SAVEPOINT", help="the savepoint")
    one.add_argument("checkpoint_location", metavar="CHECKPOINT", help="the new query's checkpointLocation; empty")
    one.add_argument("--claim", action="store_true", help="remove the savepoint when all is restored")
    _add_location(one)
    one.set_defaults(command=restore)

    one = commands.add_parser("rewind", help="have Spark repeat batches whose state is missing")
    one.add_argument("checkpoint_location", metavar="CHECKPOINT", help="the stopped query's checkpointLocation")
    one.add_argument("--dry-run", action="store_true", help="only report the repair; change nothing")
    one.add_argument(
        "--operators", nargs="+", metavar="UID", help="all operators of the query, if the logs do not tell"
    )
    _add_location(one)
    one.set_defaults(command=rewind)

    one = commands.add_parser("orphans", help="list orphans: objects that crashed starts have left")
    one.add_argument("location", metavar="LOCATION", help="the operators' location")
    one.add_argument("--min-age-s", type=float, default=3600.0, help="leave out younger objects (default: 3600)")
    one.set_defaults(command=list_orphans)
    return parser


def _add_location(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--location", help="where the operators' state is, if they are given a location")


if __name__ == "__main__":
    sys.exit(main())
