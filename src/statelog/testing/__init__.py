"""For tests of stores, logs and tables: conformance classes that an implementation subclasses."""

from statelog.testing.log_contract import LogContract
from statelog.testing.store_contract import StoreContract
from statelog.testing.table_contract import TableContract

__all__ = ["LogContract", "StoreContract", "TableContract"]
