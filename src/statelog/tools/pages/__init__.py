"""The checkpoint page: a query's checkpoints as one HTML page, written to a file or served while the query runs.

The page is made in three steps, each without the next: the *model* has all numbers, *charts* place some of them in a
drawing, and a template shows both. The model comes from the log's entries, a listing of the objects and the pins; no
state is read, so its cost grows with the entries of the log and not with the state.

- `model`: the page; `operator_model`: one operator of it; `checkpoint_sizes`: the bytes and files of each checkpoint.
- `savepoint_list`: the savepoints in some folders.
- `charts`: axes, bars and lanes; `operator_charts`: those of an operator.
- `render`: the templates. `server`: the page, served while a query runs; `live`: what its driver adds; `browse`: the
  look-up of keys.
- `ui`: the public functions ``ui``, ``report`` and ``show``.

Values are escaped by the template, and the page may load nothing and run nothing: its content policy allows its own
style only.

Needs ``pip install statelog[ui]``. May import all packages but testing.
"""
