"""The numbered log of a query: which checkpoints exist, and where their state is stored.

A location has one log. An object of the store that no entry of the log names does not exist. A checkpoint is durable as
soon as the log has its entry, with a section for each operator.

The life of a log:

1. `open` makes the store of a location, and its log (`numbered`).
2. A start of the query *claims* the log: it opens the next epoch and gets all valid entries. Older writers are now
   fenced: their next append fails. A *fence* notes where their files ended.
3. After each micro-batch the start *appends* a checkpoint (`entry`). Its references (`references`) say where the
   changesets, snapshots and materialized runs are; small ones travel inside the entry, as its payload.
4. A reader goes through the files, newest first, back to the newest checkpoint's ``log_start``. The
   remains of the last append after a crash of the machine (`torn`) do not count.
5. A tool that changes a stopped query appends a claim with *news*: new names, operators that end, a way back.
6. Files before ``log_start`` may be removed, once no older writer needs to find them.

Words: *entry* (a claim, fence or checkpoint), *section* (an operator's part of a checkpoint), *frame* (the bytes of an
entry: header, index, payload), *epoch* (a start's claim on a location), *segment* (where a changeset or snapshot is),
*stored run*, *level* (merged changes of successive batches, cut by key hash into stored runs), *base* (the levels of a
subtask: its materialized state) and *base range* (the key hashes for which a base counts).

The package may import only `storage`, `runs` and the core modules. The bytes are specified in ``docs/format.md``,
the protocol in ``docs/design/0001-commit-protocol.md``, the query's log in ``docs/design/0024-one-log-per-query.md``.
"""
