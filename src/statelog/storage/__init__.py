"""The store contract and its stores: named, immutable objects under one root.

Everything durable goes through a store: log entries, changesets, materialized runs, savepoints. A store knows nothing
of their content. It promises two things: a write that has returned survives a crash, and of several writers that create
the same name exactly one wins. With these two the log always has a single owner.

The life of a store:

1. A user writes a location. `location` parses it, and `open` makes its store: one of those below, or one that a
   user has registered. `open` also says which locations name the same place.
2. `local` keeps objects as files, `objects` keeps them in a bucket, `hdfs` in HDFS. Each makes a request once. `s3a`
   and `hadoop` have the settings and credentials that Hadoop's own clients would use.
3. `retry` wraps the store of a bucket: it attempts a request until it succeeds or its policy ends it. `hedging` decides
   when a slow write gets a second attempt, and runs both. `links` wraps the store of a branch, which reads the objects
   of its parent, too. `store` has the base of such wrappers.
4. `open` checks, before anything depends on the store, that it honours the contract and that hosts see the same place.
5. The store is pickled to the executors. Each process connects at its first request and disconnects with ``close``.

Words:

- location: a directory or a folder in a bucket, as users write it.
- object: bytes with a name; a name is used once. `names` makes names from users' texts.
- attempt (at a request): one try. After a transient failure another attempt makes sense.
- hedge: an attempt that starts while a slow one is in progress; the first to succeed counts.

Imports only from the core modules.
"""

from statelog.storage.local import LocalStore
from statelog.storage.open import open_store, register_store
from statelog.storage.store import ObjectInfo, Store

__all__ = ["LocalStore", "ObjectInfo", "Store", "open_store", "register_store"]
