"""Conversion between Arrow's columns and the Python objects that processors know from Spark.

Below this package, state and rows are Arrow columns; a processor written for Spark expects Spark's rows, pandas frames,
keys and times. Two rules hold. A processor gets the same objects as from Spark's own operator, with the few exceptions
in ``docs/coming-from-spark.md``. And a value from a processor is stored without loss, or refused with an error that
names its field, its declared type and the reason; ``docs/conversions.md`` has the table of values and types.

The path of a value:

1. `types` chooses the storage type for each of Spark's types, and makes the codecs of states and keys.
2. `codecs` says for a kind of processor (rows or frames) which codecs read its input and its output.
3. `input` makes the processor's keys and rows, or frames, from the columns of a key chunk. `times` makes the
   objects that give it the time.
4. `python_values` converts each value that the processor writes to a state, or returns, to one that Arrow stores
   unchanged; ``held_columns`` and `local_times` make columns of timestamps and structs, ``stored_values`` reads them.
5. `output` makes columns of the declared output type from the rows or frames that the processor returns.

An ``ArrowProcessor`` gets and returns columns; `arrow` names them, and checks those that it returns or writes.
`ddl` parses schemas where there is no session.

Words:

- storage type: the Arrow type of a field in runs, snapshots and output; timestamps are UTC microseconds, for instance.
- exact type: a Python class whose values need no conversion.
- missing value: None, or pandas' NaT and NA. NaN is one too, but in floating-point and text fields only in frames.
- misfit: a value that its field cannot hold.
- held value: a checked value that waits for its column, and can no longer be changed.

May import `operators`, `tables`, `local`, `log`, `storage`, `runs` and the core modules, but not
``checkpoint``, which stands beside it. It names Spark's types and touches no Spark session.
"""
