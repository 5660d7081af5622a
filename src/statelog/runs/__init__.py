"""Runs: sorted, immutable files of keyed state changes, which can be searched in place.

Changesets, local runs and the levels of a base are all stored as runs, so one writer, one reader and one merge serve
them. Within a state rows are sorted by key hash: at any parallelism the keys of a subtask lie in one stretch.

The life of a run:

1. `values` turns users' tuples into columns, `keys` makes the bytes of keys, and `key_groups` assigns each key hash to
   a subtask.
2. `writer` writes the changes of a batch, state by state, in blocks and with a footer. `schema` describes states.
3. `digests` adds the checksum of a changeset to the history of a subtask.
4. `reader` opens a run and finds rows by bisection, `key_rows` finds all rows of one key. `evolution` converts
   values to a newer schema as they are read.
5. `merge` makes one run of several, without superseded, expired (`times`) and deleted rows. Then the inputs may go.

In all steps `byte_slices` bounds the memory, however large rows are.

Words:

- key hash: Spark's xxhash64 of the key. Its top bits are the key group, which decides the subtask.
- entry: the name of a row within its key: number of a list element, map key, or time of a timer; empty for a value.
- operation: the effect of a row on its entry: put or delete; or clear, for all older entries of the key.
- section: the changes of one state in a run.
- block: a part of a section, read and checked as a whole.
- generation: how often a state was deleted; rows of earlier generations do not count.
- digest: a hash of the whole history of a subtask. The genesis is the digest of the empty state.

Imports only from the core modules.
"""
