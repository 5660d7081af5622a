"""The tables against their contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from statelog.local.policy import MERGE_POLICY, MergePolicy
from statelog.tables.memory import MemoryTable
from statelog.tables.rocksdb import RocksTable
from statelog.tables.runs import RunsTable
from statelog.tables.table import StateTable
from tests.contract.table_contract import TableContract


class TestRunsTable(TableContract):
    @pytest.fixture
    def table(self) -> StateTable:
        return RunsTable()


class TestMemoryTable(TableContract):
    @pytest.fixture
    def table(self) -> StateTable:
        return MemoryTable()


class TestRocksTable(TableContract):
    policy = MERGE_POLICY

    @pytest.fixture
    def table(self, tmp_path: Path) -> Iterator[StateTable]:
        table = RocksTable.open(tmp_path, self.policy)
        assert table is not None
        yield table
        table.close()


class TestRocksTableThatTakesOverSortedFiles(TestRocksTable):
    """The first run that it is given becomes files of RocksDB."""

    policy = MergePolicy(table_batch_bytes=1)
