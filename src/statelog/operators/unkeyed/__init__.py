"""Unkeyed operators: state per subtask, stored as a whole, and dealt out again when the parallelism changes.

This is Flink's operator state. It suits processors that read from outside (partitions and offsets), write to the
outside (open transactions), or apply rules that arrive as a stream of their own. Such state is small, so a batch that
changes it writes all of it, and no changes have to be merged.

A batch of a subtask:

1. The user writes an ``OperatorProcessor``, which declares its states through a handle (both in `processor`).
2. ``checkpoint`` reads the snapshots of the batch before; `snapshot` decodes them to elements of states.
3. `subtask` gives the elements to the state handles in `states`, and calls the processor's methods in order.
   `states` refuses any use of a state that the running method does not allow.
4. The output rows go through `operators.keyed.outputs`, as those of keyed operators do.
5. If a state was changed, or dealt out anew, `subtask` encodes all states, with those that the processor no longer
   declares, and `snapshot` makes one file of them. ``checkpoint`` stores it.

Words:

- element: a row of an unkeyed state: an item of a list, or an entry of a broadcast state's map. Dealing elements out
  needs their number only, not their meaning.
- list state: each subtask has elements of its own; a new parallelism deals them out evenly.
- union list state: a restart gives every subtask the elements of all subtasks.
- broadcast state: a map that is the same at every subtask, because only the broadcast input may change it.
- snapshot: the elements of all states of one subtask, in sections, one per state. ``docs/format.md`` has the bytes.

May import `runs`, the core modules and, of `operators.keyed`, only ``outputs`` and its codec contract. It does not
decide which subtask gets which elements: ``checkpoint.redistribution`` does.
"""
