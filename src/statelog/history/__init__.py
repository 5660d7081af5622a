"""The content of a query's log: the checkpoints that count, what each needs, and what keeps it.

Readers, savepoints, tools and the coordinator all look at a log through this package. Nothing here writes an entry.

1. `query_history` reads the log and keeps the line of checkpoints that count, and the names of their operators.
2. `operator_history` has the sections of one operator on that line: its changesets, and for each range of key hashes
   the materialized state (`bases`).
3. `restore_plan` names the levels and changesets that a subtask, or a reader, must read for a state.
4. `footprint` says what a checkpoint needs. `pins` are the files that keep a footprint from being deleted, for users
   and readers, consumers and branches.
5. `settings` says which settings stored state depends on, and which may change at a restart.

Words of this package:

- line: the checkpoints that count; each follows the previous one.
- base map: the base that counts for each range of key hashes.
- extent: a byte range of an object that several subtasks read.

Imports only from log, storage, runs and the core modules.
"""
