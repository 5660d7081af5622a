"""The part of each query that runs in the driver: from acks to a durable log entry, and from it to the next views.

A checkpoint exists once the log has its entry. Tasks and the coordinator exchange the messages of package `rpc`.

1. `admission` decides whether a start may continue from the location, and which of its operators begin; the
   `coordinator` claims the log. Each operator of the start is an `active_operator`.
2. `views` describes to each subtask its state before the batch; `redistribution` assigns unkeyed state.
3. For each ack, `admission` refuses stale and misplaced tasks, and `batch` decides which attempt's ack counts.
4. Once all operators have all acks, `commit` makes their sections, and the `checkpoint_writer` appends them as one
   entry.
5. `garbage` finds the files that no checkpoint needs, and `deletion` has the gate that decides whether they may go.
   `standing_pins` keeps the checkpoints that pins and the option ``retained_s`` keep.

In addition, `materialization` and `grants` decide which subtask materializes when. `checkpoint_metrics` describes each
checkpoint, and `totals` sums them up for metrics.

Words of this package:

- ack: a subtask's message that it has processed all its rows, with its result.
- durable: the batch has its entry. Certain: a later batch has begun, so Spark cannot repeat this one.
- grant: the permission for one job to materialize a subtask's state and reference its objects.

Imports only from rpc, operators, tables, local, history, log, storage, runs and the core modules.
"""
