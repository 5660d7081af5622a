"""The command line: ``python -m statelog COMMAND``; see :mod:`statelog.tools.cli`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from statelog.needed_pyspark import pyspark_problem

_EXTRAS: Final = {"click": "cli", "rich": "cli"}
"""The extra that installs each package that a bare installation lacks."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    try:
        from statelog.tools.cli.main import main as run
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package in _EXTRAS:
            problem = f"{package}, which is not installed: pip install 'statelog[{_EXTRAS[package]}]'"
        elif (problem := pyspark_problem(error) or "") == "":
            raise
        print(f"statelog: the command line needs {problem}", file=sys.stderr)
        return 1
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
