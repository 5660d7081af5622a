"""Tools for people who operate queries.

- `cli`: the command ``statelog``.
- `pages`: the checkpoint page, served while a query runs, shown in a notebook or written to a file.
- `doctor`: checks whether queries can run in a session, a location and on its executors.
- `exporters`: metrics for Prometheus and OpenTelemetry.

No other package imports this one, and ``import statelog`` does not load it: each part is loaded on first use, and needs
the packages of its extra (``statelog[cli]``, ``[ui]``, ``[prometheus]``, ``[opentelemetry]``).

The tools do not affect a query: each reads it as any reader does, from its log and its state, or asks the driver of a
running query.

None of them takes part in a checkpoint.

May import all packages except `testing`.
"""
