"""The conformance tests of a store, which the tests of an implementation subclass; they need pytest."""

from statelog.testing.store_contract import StoreContract

__all__ = ["StoreContract"]
