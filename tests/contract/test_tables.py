"""The tables against their contract."""

from __future__ import annotations

import pytest

from statelog.state.memory_table import MemoryTable
from statelog.state.runs_table import RunsTable
from statelog.state.table import StateTable
from statelog.testing.table_contract import TableContract


class TestRunsTable(TableContract):
    @pytest.fixture
    def table(self) -> StateTable:
        return RunsTable()


class TestMemoryTable(TableContract):
    @pytest.fixture
    def table(self) -> StateTable:
        return MemoryTable()
