"""The command line: ``python -m statelog COMMAND``; see :mod:`statelog.cli`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    try:
        from statelog.cli.main import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        print(
            f"statelog: the command line needs {error.name}, which is not installed: pip install 'statelog[cli]'",
            file=sys.stderr,
        )
        return 1
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
