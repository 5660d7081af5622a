"""Checkpoints of a query: from the acks of its operators' subtasks to a durable log entry, and back to views.

Tasks and a coordinator exchange a few messages (`protocol`) per batch. A checkpoint exists once the log has its entry.

1. `admission` and `settings` decide whether a start may continue from the location, and which of its operators begin;
   the `coordinator` claims the log. Each operator of the start is an `active_operator`.
2. `views` tells each subtask its state before the batch; `redistribution` deals out unkeyed state.
3. In an `attempt`, `keyed_task` or `unkeyed_task` restores that state (`progress`) and processes the rows. Keyed tasks
   write their `changeset`. Each sends an ack: `admission` refuses stale and misplaced tasks, `batch` decides which
   attempt's ack counts.
4. Once all operators have all acks, `commit` makes their sections, and the coordinator appends them as one entry.
5. `query_history` keeps the line of checkpoints that count, `history` an operator's sections on it, `bases` the
   materialized state of each range of key hashes.
6. `garbage` finds the files that no checkpoint needs; `deletion` has the gate that lets them go; `pins` keep some.

Beside that, `materialization` and `grants` decide which subtask materializes when; `keyed_task` has it done.

Words of this package:

- ack: a subtask's message that it has processed all its rows, with its result.
- durable: the batch has its entry. Certain: a later batch has begun, so Spark cannot repeat this one.
- view: the state that a subtask starts a batch from. Permit: what a start adds to it, such as folders and limits.
- base map: the base that counts for each range of key hashes.
- grant: the permission for one job to materialize a subtask's state and reference its objects.

Imports only from operators, tables, local, log, storage, runs and the core modules; it knows nothing of Spark.
"""
