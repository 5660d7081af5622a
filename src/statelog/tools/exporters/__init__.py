"""The checkpoints' metrics of all operators of this driver, for other systems.

The driver records every durable checkpoint of an operator in its `coordinator.totals`: what adds up over checkpoints
is added up, the rest is replaced. An exporter reads all totals on request: `prometheus` and `opentelemetry` each give
them the names that are usual there. Both libraries are optional.

Meanings and units come from :func:`statelog.metrics.meanings`.

Words of this package:

- reading: a number of one operator at the time of a request.

There is one series per metric and operator, and an operator's series end with its query; so their number is bounded.

Imports only `coordinator.totals` and the core modules.
"""
