"""The log of a query in HDFS."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from statelog.log.numbered import NumberedLog
from statelog.storage import Store, open_store
from statelog.testing.query import ManualClock
from tests.contract.log_contract import PREFIX, LogContract

pytest_plugins = ("tests.hdfs.plugin",)


class TestLogInHdfs(LogContract):
    @pytest.fixture
    def open_store(self, hdfs_location: str) -> Callable[[], Store]:
        return lambda: open_store(hdfs_location)

    def make_log(self, store: Store) -> NumberedLog:
        return NumberedLog(store, PREFIX, ManualClock(), appends=False)
