"""Keyed operators: state per key, read in bulk, and one changeset per batch.

Python objects are made late and columns early. The rows of many keys are grouped and decoded together, the state of
these keys is read from the table at once, and their changes are encoded at once. Only the calls of the processor go
key by key. A budget of bytes and rows bounds all work that is done at once.

A batch of a subtask:

1. ``operator`` has the parts of a keyed operator and the contracts of its codecs; ``subtask`` runs the batch.
2. ``grouping`` groups the input rows by key and cuts the keys into chunks.
3. For each chunk, ``subtask`` moves the ``cursor`` from key to key and calls the processor.
4. The processor got its states from ``handle``: ``values``, ``collections`` and ``timers``. They read the table for the
   whole chunk, and buffer the processor's writes until the chunk ends.
5. ``outputs`` takes the processor's rows while they are yielded, and encodes them in chunks.
6. At the end of a chunk the states flush: ``changes`` collects their writes as columns, in the order of a run.
7. After the rows the due timers fire, in a phase of their own: first the changes so far become part of the table.
8. ``changes`` encodes all changes: in parts for the store, while the batch runs, and as one run for the local disk.

Words:

- key chunk: successive keys of a batch that are processed together. (A *window* in prose is always a user's window.)
- position: the index of a key in its chunk.
- entry: a list element, map entry or timer of a key, with an entry key that orders it within the key.
- large key: its entries are too many or too large to be fetched with those of other keys; they are read in pages.
- phase: initial state, rows, or timers of a batch. Each reads the changes of those before it.
- part: a run with some of a batch's changes. Parts are encoded before the batch ends, so that they can be uploaded.

May import ``tables``, ``runs`` and the core modules, and the modules of ``operators`` beside it, but not ``unkeyed``.
"""
