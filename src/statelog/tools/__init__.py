"""What people look at and run beside their queries.

- `cli`: the command ``statelog``.
- `pages`: the checkpoint page, served while a query runs, shown in a notebook or written to a file.
- `doctor`: checks whether queries can run in a session, a location and on its executors.
- `exporters`: metrics for Prometheus and OpenTelemetry.

No other package imports this one, and ``import statelog`` does not load it: each part is loaded when it is used first,
and needs the packages of its extra (``statelog[cli]``, ``[ui]``, ``[prometheus]``, ``[opentelemetry]``).

A query does not notice them: each part reads a query as any reader does, from its log and its state,
or asks the driver of a running one.

None of them takes part in a checkpoint.

May import all packages but testing.
"""
