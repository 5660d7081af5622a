"""Conformance tests for implementations of a store, a log or a table, whose tests subclass them; they need pytest."""

from statelog.testing.log_contract import LogContract
from statelog.testing.store_contract import StoreContract
from statelog.testing.table_contract import TableContract

__all__ = ["LogContract", "StoreContract", "TableContract"]
