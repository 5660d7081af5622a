"""Operators: how one subtask runs a user's processor over one batch, and which changes of state come out.

An operator here is a plain value: a processor, its declared states, and codecs that turn columns into the processor's
objects and back. A subtask gets an operator, the state before the batch and the batch's rows. It yields output rows
and holds the new state; ``checkpoint`` stores it. A subtask uses no files and no Spark, and it gets all times with the
batch. So a repeated batch gives the same result, and tests run operators in memory.

Two packages, one for each kind of operator:

- `keyed`: state belongs to a key, and the processor is called for each key. A batch gives a changeset.
- `unkeyed`: state belongs to a subtask, and the processor is called once per batch. A batch gives a snapshot.

Two modules here deal with time. `event_time` reads the event time of rows, and separates late rows from others.
``watermark`` computes an operator's own watermark from the largest event times of all subtasks; the coordinator uses it
after each batch.

Words:

- subtask: one of the parallel instances of an operator; here, its work in one batch.
- processor: the user's object with the operator's logic.
- handle: the object through which a processor declares states (``init`` gets it), or reads and writes one of them.
- late: said of a row whose event time is not after the watermark of the batch before.

May import `tables`, `local`, `log`, `storage`, `runs` and the core modules; it needs `tables`, `runs` and
the core only. It does not know Spark: `convert` has the codecs for Spark's rows, frames and types.
"""
