"""What the tests of :mod:`tests.reading.test_savepoints` and others share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

import statelog


def same(location: str | Path, savepoint: Path, **arguments: Any) -> pa.Table:
    """The rows that a checkpoint and a savepoint have."""
    of_checkpoint = statelog.read_state(location, **arguments).read_all()
    of_savepoint = statelog.read_state(savepoint, **arguments).read_all()
    assert of_savepoint.schema == of_checkpoint.schema
    assert of_savepoint.num_rows == of_checkpoint.num_rows
    assert of_savepoint.to_pylist() == of_checkpoint.to_pylist()
    return of_savepoint
