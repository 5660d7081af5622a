"""The part that runs in a Python worker: one attempt of a subtask at a batch.

A task talks to the coordinator with the messages of package `rpc`, and does not depend on Spark.

1. An `attempt` begins with a call that returns the view of the subtask: the state before the batch. It measures and
   reports a long restore.
2. `keyed_task` and `unkeyed_task` restore that state with package `local` and give it to the operator, which processes
   the rows. `output_task` has no state: it stores the query's output.
3. The changes become a `changeset`: in the ack itself if they are small, otherwise as an object in the store.
4. The ack carries the result. A keyed task then merges its local runs and, if it has a grant, materializes a slice.

An attempt may be repeated, may run twice at once, and may die anywhere: only the coordinator decides which ack counts.

Words of this package:

- view: the state that a subtask starts a batch from. Permit: what a start adds to it, such as folders and limits.
- changeset: all changes of one subtask in one batch.

Imports only from rpc, operators, tables, local, history, log, storage, runs and the core modules.
"""
