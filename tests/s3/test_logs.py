from __future__ import annotations

from collections.abc import Callable

import pytest

from statelog.log.numbered import NumberedLog
from statelog.storage import Store, open_store
from statelog.testing.query import ManualClock
from tests.contract.log_contract import PREFIX, LogContract

pytest_plugins = ("tests.s3.plugin",)


class TestLogOfObjects(LogContract):
    @pytest.fixture
    def open_store(self, s3_location: str) -> Callable[[], Store]:
        return lambda: open_store(s3_location)

    def make_log(self, store: Store) -> NumberedLog:
        return NumberedLog(store, PREFIX, ManualClock(), appends=False)
