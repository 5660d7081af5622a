"""A host's copies of state: one directory per subtask, shared by the host's Python workers.

Correctness never depends on them. A local file that is missing or damaged is read from the store again, and a file of a
failed attempt or another history is ignored, because files are found by chain digests.

The life of a local run:

1. `use` names the subtask's directory, and locks it while a batch runs there.
2. `restore` looks for a chain of local runs (`runs`) from the empty state to the state before the batch. If there
   is none, it asks the coordinator for a restore plan (`history.restore_plan`), reads the missing levels and
   changesets from the store (`stored_reader`) and writes them as local runs. Bytes that several subtasks need are
   read once per host.
3. The runs of the chain are mapped into memory, and recognized by their stamps without being read again. Files
   of earlier batches that are not in the chain are swept.
4. The batch adds its changeset as one more local run.
5. After the batch, adjacent small runs are merged into one that replaces them. `materializer` does the large merges,
   and stores the state of the subtask, a slice after each batch.
6. When the subtask has moved to another host, `use` removes its directory. `owners` removes those of executors that
   were killed.

`policy` says how much is merged and stored at once. Unkeyed subtasks have snapshots instead of runs.

Words: *local run* (a file with the changes between two chain digests), *chain* (local runs that follow each other),
*restore plan* (the levels and changesets that a subtask lacks), *extent* (a byte range of an object that several
subtasks read), *grant* (the coordinator's permission to materialize a subtask's state once), *job* (the work under a
grant, or a large merge, which continues in *slices* after several batches).

The package may import only `history`, `log`, `storage`, `runs` and the core modules.
"""
