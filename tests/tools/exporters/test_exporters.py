"""What Prometheus and OpenTelemetry get of checkpoints: names, units, sums, and the end of an operator's series."""

from __future__ import annotations

import sys
import urllib.request
from typing import Any

import pytest

from statelog import (
    CheckpointMetrics,
    ConfigurationError,
    Metric,
    Observer,
    Recorded,
    StateMetrics,
    SubtaskMetrics,
    meanings,
)
from statelog.coordinator.totals import Counted, OperatorTotals, Totals, distributions, exported, process_totals
from statelog.tools.exporters.opentelemetry import export_to_opentelemetry
from statelog.tools.exporters.prometheus import prometheus_collector, serve_metrics

NO_TIME_MS = -(1 << 63)


def checkpoint(batch: int, **more: Any) -> CheckpointMetrics:
    numbers = {"input_rows": 3, "late_rows": 1, "changes": 2, "changed_bytes": 100, "objects": 1}
    times = {"commit_s": 0.25, "subtask_s": 0.5, "watermark_ms": NO_TIME_MS, "revision": 0, "parallelism": 2}
    return CheckpointMetrics("query", "op", batch, **{**numbers, **times, **more})


@pytest.fixture(name="totals")
def running_operator() -> Any:
    """The totals of an operator of this process that has had two checkpoints."""
    totals = process_totals().begin("query", "op")
    counted = Counted(Observer(), totals)
    samples = {"upload_latency_s": [0.005, 0.3, 90.0], "upload_size_bytes": [1024.0], "unknown": [1.0]}
    measured = Recorded({"upload_requests": 4, "unknown": 1}, samples)
    parts = {"states": {"count": StateMetrics(30, 300)}, "subtasks": [SubtaskMetrics(0, 2, 1, 10, processor_s=0.5)]}
    counted.checkpoint(checkpoint(7, base_bytes=1000, measured=measured, **parts))
    parts = {"states": {"count": StateMetrics(31, 310)}, "subtasks": [SubtaskMetrics(0, 1, 1, 5, processor_s=0.25)]}
    measured = Recorded({"upload_requests": 1}, {"upload_latency_s": [0.006]})
    counted.checkpoint(checkpoint(8, base_bytes=900, watermark_ms=5500, measured=measured, **parts))
    yield totals
    process_totals().end(totals)


def test_every_number_of_a_checkpoint_has_a_meaning() -> None:
    made = checkpoint(1)
    numbers = {name for name, value in vars(made).items() if isinstance(value, int | float)}
    assert set(meanings()) == numbers - {"batch"}
    assert made.numbers()["watermark_ms"] is None
    for name, meaning in {**meanings(), **exported()}.items():
        assert meaning.text.endswith("."), name
        assert name.endswith("_bytes") == (meaning.unit == "bytes"), name
        assert name.endswith("_s") == (meaning.unit == "seconds"), name
        assert name.endswith("_ms") == (meaning.unit == "milliseconds"), name
    for name, meaning in exported().items():
        assert meaning.per == next((per for per in ("state", "subtask") if name.startswith(f"per_{per}_")), ""), name
        assert meaning.adds_up or meaning.per != "subtask", name
        assert meaning.adds_up or name not in set(Metric), name
    assert {name: meaning.unit for name, meaning in distributions().items()} == {
        "upload_latency_s": "seconds", "upload_size_bytes": "bytes", "upload_queue_bytes": "bytes",
        "attempts_per_upload": "", "total_attempts_per_upload": "",
    }  # fmt: skip
    assert set(exported()) & set(Metric) == {
        "state_fetches", "materialization_uploads",
        "upload_requests", "upload_failures", "upload_retries", "upload_hedges", "slow_downs",
        "read_retries",
    }  # fmt: skip


def test_counters_add_up_and_gauges_are_replaced(totals: OperatorTotals) -> None:
    found = {name: value for (name, part), value in totals.read().items() if not part}
    assert (found["checkpoints"], found["batch"], found["input_rows"], found["commit_s"]) == (2, 8, 6, 0.5)
    assert (found["base_bytes"], found["watermark_ms"], found["upload_requests"]) == (900, 5500, 5)
    assert "unknown" not in found
    parts = {key: value for key, value in totals.read().items() if key[1]}
    assert parts[("per_state_rows", "count")] == 31
    assert (parts[("per_subtask_input_rows", "0")], parts[("per_subtask_processor_s", "0")]) == (3, 0.75)


def test_a_distribution_that_was_read_stays_as_it_was(totals: OperatorTotals) -> None:
    read = totals.read_distributions()["upload_latency_s"]
    totals.note(checkpoint(9, measured=Recorded({}, {"upload_latency_s": [1.0]})))
    assert sum(read.counts) == 4
    assert read.total == pytest.approx(90.311)
    assert sum(totals.read_distributions()["upload_latency_s"].counts) == 5


def test_a_newer_start_keeps_its_numbers_when_the_former_ends() -> None:
    totals = Totals()
    former, newer = totals.begin("query", "op"), totals.begin("query", "op")
    newer.note(checkpoint(3))
    totals.end(former)
    assert [reading.value for reading in totals.read()["batch"]] == [3]
    totals.end(newer)
    assert totals.read()["batch"] == []


def test_the_users_observer_still_sees_everything() -> None:
    seen: list[object] = []

    class Noting(Observer):
        def step(self, *arguments: object) -> None:
            seen.append(arguments)

        def checkpoint(self, metrics: object) -> None:
            seen.append(metrics)

        def restore(self, metrics: object) -> None:
            seen.append(metrics)

        def restoring(self, progress: object) -> None:
            seen.append(progress)

    counted: Any = Counted(Noting(), Totals().begin("query", "op"))
    made = checkpoint(1)
    counted.step("a", 1, 2)
    counted.checkpoint(made)
    counted.restore("b")
    counted.restoring("c")
    assert seen == [("a", 1, 2), made, "b", "c"]


def test_prometheus_reads_counters_and_gauges_in_base_units(totals: OperatorTotals) -> None:
    pytest.importorskip("prometheus_client", reason="statelog[prometheus] is not installed")
    with serve_metrics(port=0) as server:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        with pytest.raises(ConfigurationError, match=f"cannot be served on 127.0.0.1:{server.port}"):
            serve_metrics(server.port)
    labels = '{operator="op",query="query"}'
    for line in (
        f"statelog_checkpoints_total{labels} 2.0",
        f"statelog_changed_bytes_total{labels} 200.0",
        f"statelog_commit_seconds_total{labels} 0.5",
        f"statelog_base_bytes{labels} 900.0",
        f"statelog_watermark_timestamp_seconds{labels} 5.5",
        f"statelog_upload_requests_total{labels} 5.0",
        'statelog_per_state_rows{operator="op",query="query",state="count"} 31.0',
        'statelog_per_subtask_processor_seconds_total{operator="op",query="query",subtask="0"} 0.75',
        'statelog_upload_latency_seconds_bucket{le="0.005",operator="op",query="query"} 1.0',
        'statelog_upload_latency_seconds_bucket{le="0.01",operator="op",query="query"} 2.0',
        'statelog_upload_latency_seconds_bucket{le="60",operator="op",query="query"} 3.0',
        'statelog_upload_latency_seconds_bucket{le="+Inf",operator="op",query="query"} 4.0',
        f"statelog_upload_latency_seconds_sum{labels} 90.311",
        'statelog_upload_size_bytes_bucket{le="1024",operator="op",query="query"} 1.0',
        'statelog_upload_size_bytes_bucket{le="1048576",operator="op",query="query"} 1.0',
        "# TYPE statelog_log_bytes gauge",
        "# HELP statelog_late_rows_total Late rows read, dropped or returned in a `late_column`.",
    ):
        assert line in lines
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics")


def test_a_collector_for_a_registry_of_ones_own(totals: OperatorTotals) -> None:
    client = pytest.importorskip("prometheus_client", reason="statelog[prometheus] is not installed")
    registry = client.CollectorRegistry()
    registry.register(prometheus_collector())
    labels = {"operator": "op", "query": "query"}
    assert registry.get_sample_value("statelog_input_rows_total", labels) == 6
    process_totals().end(totals)
    assert registry.get_sample_value("statelog_input_rows_total", labels) is None


def test_opentelemetry_reads_instruments_with_units(totals: OperatorTotals) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.metrics", reason="the SDK of OpenTelemetry is not installed")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = sdk.MeterProvider([reader])
    export_to_opentelemetry(provider)
    data: Any = reader.get_metrics_data()
    provider.shutdown()
    [scope] = data.resource_metrics[0].scope_metrics
    found = {metric.name: metric for metric in scope.metrics}
    values = {name: metric.data.data_points[0].value for name, metric in found.items()}
    assert (values["statelog.changed.size"], found["statelog.changed.size"].unit) == (200, "By")
    assert (values["statelog.commit.duration"], found["statelog.commit.duration"].unit) == (0.5, "s")
    assert (values["statelog.watermark.time"], found["statelog.watermark.time"].unit) == (5500, "ms")
    assert values["statelog.checkpoints"] == 2
    assert found["statelog.input_rows"].data.is_monotonic
    assert not hasattr(found["statelog.base.size"].data, "is_monotonic")
    [of_state] = found["statelog.per_state_rows"].data.data_points
    assert (of_state.value, of_state.attributes["statelog.state"]) == (31, "count")
    point = found["statelog.base.size"].data.data_points[0]
    assert dict(point.attributes) == {"statelog.operator": "op", "statelog.query": "query"}


@pytest.mark.parametrize(
    ("function", "package", "extra"),
    [
        (serve_metrics, "prometheus_client.core", "prometheus"),
        (prometheus_collector, "prometheus_client.core", "prometheus"),
        (export_to_opentelemetry, "opentelemetry.metrics", "opentelemetry"),
    ],
)
def test_a_missing_library_is_named(function: Any, package: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match=rf"statelog\[{extra}\]"):
        function()
