"""What the tests of :mod:`tests.tables.test_rocksdb_table` and others share."""

from __future__ import annotations

from typing import Any

from statelog.runs.reader import Run
from statelog.runs.schema import Operation
from tests.contract.table_contract import VALUE, make_run


def large_run(text: str) -> Run:
    changes: list[Any] = [(number, b"%d" % number, b"", Operation.PUT, text) for number in range(1000)]
    return make_run(VALUE, changes)
