from __future__ import annotations

from pathlib import Path

import pytest

from statelog.storage import LocalStore, Store
from statelog.storage.faults import FaultPlan, FaultStore
from statelog.testing.store_contract import StoreContract


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "new" / "root")


class TestFaultStoreWithoutFaults(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return FaultStore(LocalStore(tmp_path), FaultPlan())
