"""What the tests of :mod:`tests.coordinator.test_inventory` and others share."""

from __future__ import annotations

from statelog import StorageError
from statelog.storage.store import StoreWrapper


class PinsRefused(StoreWrapper):
    """Takes no pins for a while."""

    refuses = True

    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        if name.startswith("pins/") and self.refuses:
            raise StorageError("put failed: no.")
        return super().put_if_absent(name, data)
