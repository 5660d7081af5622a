"""The command line: ``statelog COMMAND``, or ``python -m statelog COMMAND``.

A command calls a public function and shows its result: as a table for people, or with ``--json`` as JSON with the
fields of the function's result. So a program can do whatever a command does.

- `main`: the group of all commands, and the handling of errors.
- `state_commands`: what is there, and its rows: ``ls``, ``show``, ``get``, ``scan``, ``changes``, ``history``,
  ``diff``, ``export``, ``compare``, ``stats``.
- `query_commands`: whole queries: ``doctor``, ``verify``, ``report``, ``ui``, ``pin``, ``savepoint``, ``restore``,
  ``branch``, ``rewind``, ``fall-back``, ``gc`` and the others.
- `arguments`: the arguments that commands have in common, and their conversion from text.
- `shown`: tables and JSON of results and rows, sizes and times for people, and the progress of a long command.

Results go to standard output, everything else to standard error. The exit code is 0 if a command has succeeded, 1 if it
has failed with a message, and 2 if its arguments are wrong.

Needs ``pip install statelog[cli]``. May import all packages except `testing`.
"""
