"""The command line: ``python -m statelog COMMAND``; see :mod:`statelog.cli`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

_EXTRAS: Final = {"click": "cli", "rich": "cli", "pyspark": "spark"}
"""What brings the packages that a bare installation lacks."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    try:
        from statelog.cli.main import main as run
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        print(
            f"statelog: the command line needs {package}, which is not installed:"
            f" pip install 'statelog[{_EXTRAS[package]}]'",
            file=sys.stderr,
        )
        return 1
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
