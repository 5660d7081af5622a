"""Writes the fixtures of the present version: ``python -m tests.compat.make v1``.

A fixture is frozen by the first release that has its version. The same code writes the same bytes: tokens are counted,
and time stands still.
"""

from __future__ import annotations

import itertools
import secrets
import shutil
import sys
import time
from unittest.mock import patch

from tests.compat import (
    test_aggregates,
    test_branches,
    test_claims,
    test_consumers,
    test_fixtures,
    test_kinds,
    test_operator_state,
    test_pins,
    test_queries,
    test_savepoints,
    test_window_results,
    test_windows,
)

KINDS = (
    test_aggregates,
    test_branches,
    test_claims,
    test_consumers,
    test_fixtures,
    test_kinds,
    test_operator_state,
    test_pins,
    test_queries,
    test_savepoints,
    test_window_results,
    test_windows,
)
_NOW_S = 1.7e9


def make(name: str) -> None:
    """Write the fixtures of this name anew."""
    for kind in KINDS:
        numbers = itertools.count(1)

        def token(size: int | None = None, numbers: itertools.count[int] = numbers) -> bytes:
            return next(numbers).to_bytes(size or 32)

        directory = kind.FIXTURES / name
        shutil.rmtree(directory, ignore_errors=True)
        with (
            patch.object(secrets, "token_bytes", token),
            patch.object(secrets, "token_hex", lambda size, token=token: token(size).hex()),
            patch.object(time, "time", lambda: _NOW_S),
        ):
            kind.write(directory)


if __name__ == "__main__":
    make(sys.argv[1])
