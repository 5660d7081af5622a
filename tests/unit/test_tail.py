"""The benchmark of tail latencies, with a server that knows just enough of S3."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click
import pytest

from benchmarks import tail
from benchmarks.latency_table import latency_of
from benchmarks.tail_side import HEDGED, SINGLE, object_name


class Bucket(BaseHTTPRequestHandler):
    """Objects in a dictionary."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    objects: dict[str, bytes]

    def do_PUT(self) -> None:
        self.objects[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, b"")

    def do_GET(self) -> None:
        data = self.objects.get(self.path)
        self._answer(200 if data is not None else 404, data or b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Sat, 21 Nov 2026 12:00:00 GMT")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def objects() -> dict[str, bytes]:
    return {}


@pytest.fixture
def environment(objects: dict[str, bytes]) -> Iterator[dict[str, str]]:
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Bucket,), {"objects": objects})) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
            "AWS_ALLOW_HTTP": "true",
        }
        server.shutdown()
        thread.join()


SIZE: dict[str, Any] = {
    "requests": 60,
    "warm_up": 5,
    "block": 25,
    "scale": 0.05,
    "concurrency": 4,
    "object_bytes": 100,
}


def test_both_sides_write_the_same_objects_with_the_same_latencies(
    objects: dict[str, bytes], environment: dict[str, str], tmp_path: Path
) -> None:
    result = tail.measure("s3://bucket/bench", environment, tmp_path, **SIZE)

    names = [object_name(number) for number in range(-5, 60)]
    for side in (SINGLE, HEDGED):
        assert sorted(path for path in objects if f"/{side}/" in path) == sorted(
            f"/bucket/bench/{side}/{name}" for name in names
        )
    single, hedged = (result.figures["sides"][side] for side in (SINGLE, HEDGED))
    longest_ms = max(1000 * 0.05 * latency_of(158, object_name(number), 1) for number in range(60))
    assert single["injected_ms"]["max"] == hedged["injected_ms"]["max"] == pytest.approx(longest_ms)
    assert single["latency_ms"]["max"] >= longest_ms
    assert single["attempts"] == 65
    assert single["extra_requests_percent"] == 0
    assert hedged["counts"].get("upload_hedges", 0) <= 3
    assert [key for key in single["latency_ms"] if key.startswith("p")] == ["p50", "p90", "p95"]
    # Too few requests for the first target.
    assert [target.value is None for target in result.targets] == [True, False]
    assert result.figures["server_ms"]["samples"] == hedged["attempts"] + 65 + 60 + 60


def test_what_was_not_written_is_an_error(
    monkeypatch: pytest.MonkeyPatch, objects: dict[str, bytes], environment: dict[str, str], tmp_path: Path
) -> None:
    monkeypatch.setattr(Bucket, "do_PUT", lambda self: (self.rfile.read(100), self._answer(200, b"")))

    with pytest.raises(click.ClickException, match="404"):
        tail.measure("s3://bucket/bench", environment, tmp_path, **SIZE)


class TestFigures:
    def measure(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hedges: int, puts: int) -> Any:
        """With a client and a proxy that only say what they measured: 10,000 requests of 1 to 10,000 ms."""

        class Proxy:
            port = 1

            def __init__(self, *_: Any, **__: Any) -> None:
                pass

            def __enter__(self) -> Proxy:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def report(self) -> dict[str, Any]:
                return {"counts": {"PUT": puts}, "cpu_s": 1.0, "late_s": [0.001], "upstream_s": [0.002]}

        def side(factor: float, hedges: int) -> dict[str, Any]:
            counts = {"upload_requests": 10_000, "upload_hedges": hedges}
            latencies_s = [factor * (number + 1) / 1000 for number in range(10_000)]
            return {"latencies_s": latencies_s, "counts": counts, "warm_up_counts": {"upload_requests": 10}}

        def child(function: str, arguments: dict[str, Any], _: Path) -> dict[str, Any]:
            sides = {SINGLE: side(1, 0), HEDGED: side(0.5, hedges)}
            return {"took_s": 10.0, "client_cpu_s": 1.0, "machine_cpu_s": 5.0, "sides": sides}

        monkeypatch.setattr(tail, "ProxyProcess", Proxy)
        monkeypatch.setattr(tail, "run_in_child", child)
        size = {**SIZE, "scale": 0.001}
        return tail.measure("s3://bucket/bench", {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, tmp_path, **size)

    def test_quantiles_and_targets(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        result = self.measure(monkeypatch, tmp_path, hedges=300, puts=20_320)

        assert result.figures["sides"][SINGLE]["latency_ms"] == {
            "samples": 10_000,
            "p50": pytest.approx(5_000),
            "p90": pytest.approx(9_000),
            "p95": pytest.approx(9_500),
            "p99": pytest.approx(9_900),
            "p99.9": pytest.approx(9_990),
            "max": pytest.approx(10_000),
        }
        assert [(target.value, target.met) for target in result.targets] == [
            (pytest.approx(50), True),
            (pytest.approx(3), True),
        ]

    def test_too_many_hedges_miss_the_target(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        result = self.measure(monkeypatch, tmp_path, hedges=501, puts=20_521)

        assert [target.met for target in result.targets] == [True, False]

    def test_requests_that_the_client_does_not_know_of_are_an_error(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        with pytest.raises(click.ClickException, match="made 20320 attempts, and the proxy saw 20321"):
            self.measure(monkeypatch, tmp_path, hedges=300, puts=20_321)
