"""Where checkpoints are kept: the store contract and the stores that fulfil it."""

from statelog.storage.local import LocalStore
from statelog.storage.open import open_store
from statelog.storage.store import ObjectInfo, Store

__all__ = ["LocalStore", "ObjectInfo", "Store", "open_store"]
