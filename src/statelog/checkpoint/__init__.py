"""Checkpoints of one operator: from the acks of its subtasks to a durable log entry, and back to a view.

Tasks and a coordinator exchange a few messages (`protocol`) per batch. A checkpoint exists once the log has its entry.

The life of a checkpoint:

1. `admission` and `settings` decide whether a start may continue from the location; the `coordinator` claims it.
   `views` makes the checkpoint of state that exists before batch 0.
2. `views` tells each subtask its state before the batch; `redistribution` deals out unkeyed state.
3. In an `attempt`, `keyed_task` or `unkeyed_task` restores that state (`progress`) and processes the rows. Keyed tasks
   write their `changeset`. Each sends an ack: `admission` refuses stale and misplaced tasks, `batch` decides which
   attempt's ack counts.
4. After the last ack, `commit` builds the entry and its metrics, and the coordinator appends it to the log.
5. `history` keeps the checkpoints that can be restored, `bases` the materialized state of each range of key hashes.
6. `garbage` finds the files that no checkpoint needs; `deletion` has the gate that lets them go.

Beside that, `materialization` and `grants` decide which subtask materializes when; `keyed_task` has it done.
`query_operators` and `rewind_target` read the logs of all operators of a query.

Words of this package:

- ack: a subtask's message that it has processed all its rows, with its result.
- durable: the batch has its entry. Certain: a later batch has begun, so Spark cannot repeat this one.
- view: the state that a subtask starts a batch from.
- base map: the base that counts for each range of key hashes.
- grant: the permission for one job to materialize a subtask's state and reference its objects.

Imports only from operators, tables, local, log, storage, runs and the core modules; it knows nothing of Spark.
"""
