"""The command line: ``statelog COMMAND``, or ``python -m statelog COMMAND``.

A command calls a public function and shows its result: as a table for people, or with ``--json`` as JSON with the
fields of the function's result. So whatever a command does, a program can do without it.

- `main`: the group of all commands, and what becomes of errors.
- `doctor_command`: ``doctor`` checks that queries can run here.
- `state_commands`: what is there, and its rows: ``ls``, ``show``, ``get``, ``scan``, ``changes``, ``history``,
  ``diff``, ``export``.
- `stats_command`: ``stats`` measures what is stored.
- `verify_command`: ``verify`` reads and checks all that is stored.
- `compare_command`: ``compare`` compares two queries.
- `page_commands`: ``report`` and ``ui``, the checkpoint page.
- `pin_commands`: ``pin``, ``pins``, ``unpin``.
- `query_commands`: stopped queries: ``savepoint``, ``restore``, ``rewind``, ``fall-back``; also ``branch``, ``gc``.
- `arguments`: the arguments that commands have in common, and how text becomes keys and times.
- `shown`: tables, JSON, and sizes and times for people; `rows`: the same for rows.
- `progress`: how far a long command is, on a terminal.

Results go to the standard output, all else to the standard error. The exit code is 0 if a command has worked, 1 if it
has failed with a message, and 2 if its arguments are wrong.

Needs ``pip install statelog[cli]``. May import all packages but testing.
"""
