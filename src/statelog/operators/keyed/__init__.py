"""Keyed operators: state per key, read in bulk, and one changeset per batch.

Python objects are made late and columns early. The state of many keys is read from the table at once, and their
changes are encoded at once; only a processor of rows or frames is called key by key. A budget bounds all work.

A batch of a subtask:

1. `operator` has the parts of a keyed operator and the contracts of its codecs; `subtask` runs the batch's phases.
2. A `caller` calls the processor on one key chunk after the other. `row_caller` calls it key by key, on the rows
   that `grouping` has sorted by key; `column_caller` once per chunk, with the key index that `indexing` finds.
3. The processor got its states from `handle`. Key by key they are `values`, `collections` and `timers`, and the
   `cursor` has the current key; in columns they are `columns`. They read the table for the whole chunk. Windows use
   map states by time: `time_columns`, which read large keys in pages with `time_reader`.
4. `outputs` takes rows while a processor yields them, and encodes them in chunks.
5. At the end of a chunk the states flush: `changes` collects their writes as columns, in the order of a run.
6. After the rows the due timers fire, in a phase of their own: first the changes so far become part of the table.
7. `changes` encodes all changes: in parts for the store, while the batch runs, and as one run for the local disk.

Words:

- key chunk: successive keys of a batch that are processed together. (A *window* in prose is always a user's window.)
- position: the index of a key in its chunk. The key index of rows has the position of each row's key.
- entry: a list element, map entry or timer of a key, with an entry key that orders it within the key.
- large key: its entries are too many or too large to be fetched with those of other keys; they are read in pages.
- phase: initial state, rows, or timers of a batch. Each reads the changes of those before it.
- part: a run with some of a batch's changes. Parts are encoded before the batch ends, so that they can be uploaded.

May import `tables`, `runs` and the core modules, and the other modules of `operators`, but not ``unkeyed``.
"""
