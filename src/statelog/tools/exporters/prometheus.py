"""The checkpoints' metrics for Prometheus: a collector for a registry, and a separate HTTP server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import accumulate
from types import ModuleType
from typing import Any, Final

from statelog.coordinator.totals import Distribution, Totals, distributions, exported, optional_library, process_totals
from statelog.errors import ConfigurationError
from statelog.metrics import Meaning

_LABELS: Final = ("operator", "query")
_JOIN_S: Final = 5.0


class MetricsServer:
    """An HTTP server for Prometheus, which :func:`statelog.serve_metrics` has started.

    It ends with :meth:`close`, at the end of a ``with`` block, or with the driver.
    """

    def __init__(self, server: Any, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop serving, and release the port. A second call does nothing."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_S)

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_metrics(port: int = 9464, host: str = "127.0.0.1") -> MetricsServer:
    """Serve the metrics of all operators of this driver for Prometheus, at ``http://host:port/metrics``.

    Parameters
    ----------
    port : int
        The port; 0 chooses a free one, see :attr:`MetricsServer.port`.
    host : str
        The address to listen on; by default, only this machine can reach it. The server has no authentication: anyone
        who can reach it can read the names of operators and queries, and the numbers.

    Returns
    -------
    MetricsServer
        The running server.

    Raises
    ------
    ConfigurationError
        If the address cannot be used, or ``statelog[prometheus]`` is not installed.
    """
    client = _library("serve_metrics")
    registry = client.CollectorRegistry()
    registry.register(_collector(client, process_totals()))
    try:
        server, thread = client.start_http_server(port, host, registry)
    except (OSError, OverflowError, TypeError) as error:
        raise ConfigurationError(
            f"The metrics cannot be served on {host}:{port}: {error}.",
            hint="Pass a free port and an address of this machine to serve_metrics.",
        ) from error
    return MetricsServer(server, thread)


def prometheus_collector() -> Any:
    """Create a collector of the metrics of all operators of this driver, for your own registry.

    Register it once: ``prometheus_client.REGISTRY.register(statelog.prometheus_collector())``.

    Returns
    -------
    prometheus_client.registry.Collector
        The collector.

    Raises
    ------
    ConfigurationError
        If ``statelog[prometheus]`` is not installed.
    """
    return _collector(_library("prometheus_collector"), process_totals())


def prometheus_name(name: str, meaning: Meaning) -> str:
    """The name of a metric in Prometheus, in its base units; a counter's without the suffix ``_total``."""
    stem, _, unit = name.rpartition("_")
    match unit:
        case "s":
            return f"statelog_{stem}_seconds"
        case "ms":
            return f"statelog_{stem}_timestamp_seconds"
        case _:
            return f"statelog_{name}"


def _library(function: str) -> ModuleType:
    def load() -> ModuleType:
        import prometheus_client.core

        return prometheus_client

    return optional_library(load, function, "prometheus")


def _collector(client: ModuleType, totals: Totals) -> Any:
    class Collector(client.registry.Collector):  # type: ignore[name-defined,misc]  # the package is optional
        """Reads the totals for every scrape."""

        def collect(self) -> Iterator[Any]:
            for name, readings in totals.read().items():
                meaning = exported()[name]
                kind = client.core.CounterMetricFamily if meaning.adds_up else client.core.GaugeMetricFamily
                labels = [*_LABELS, meaning.per] if meaning.per else _LABELS
                family = kind(prometheus_name(name, meaning), meaning.text, labels=labels)
                for reading in readings:
                    value = reading.value / 1000 if meaning.unit == "milliseconds" else reading.value
                    part = [reading.part] if meaning.per else []
                    family.add_metric([reading.uid, reading.query_id, *part], value)
                yield family
            for name, found in totals.read_distributions().items():
                meaning = distributions()[name]
                histogram = client.core.HistogramMetricFamily
                family = histogram(prometheus_name(name, meaning), meaning.text, labels=_LABELS)
                for one in found:
                    buckets = _buckets(one.distribution)
                    family.add_metric([one.uid, one.query_id], buckets, one.distribution.total)
                yield family

    return Collector()


def _buckets(distribution: Distribution) -> list[tuple[str, int]]:
    """The bound of each bucket, and the number of samples up to it."""
    bounds = [f"{bound:.15g}" for bound in distribution.bounds] + ["+Inf"]
    return list(zip(bounds, accumulate(distribution.counts), strict=True))
