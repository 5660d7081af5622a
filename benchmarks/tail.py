"""How long the slowest writes to an object store take, with hedges and without."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import click

from benchmarks import machine
from benchmarks.child import run_in_child
from benchmarks.distribution import MIN_SAMPLES, Distribution
from benchmarks.fault_proxy import ProxyProcess, Rule
from benchmarks.frame import Benchmark, Result, Target, scratch
from benchmarks.latency_table import latency_of, latency_s
from benchmarks.tail_side import HEDGED, SINGLE, object_name
from statelog.metrics import Metric

__all__ = ["BENCHMARK", "measure", "run"]

_QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
_MIN_SAMPLES: Final = {"p50": 1, "p90": 30, "p95": 60, **MIN_SAMPLES}
_TIMEOUT_S: Final = 1.0
_SEED: Final = 158
_ATTEMPTS: Final = (Metric.UPLOAD_REQUESTS, Metric.UPLOAD_HEDGES, Metric.UPLOAD_RETRIES)
_BUCKET: Final = "tail"


def run(*, store: str, directory: Path | None, **size: Any) -> Result:
    """Measure; the parameters are the options of the command."""
    # Not at the top: the other benchmarks do without the server.
    from tests.s3.server import RadosGateway, missing_programs

    if missing := missing_programs():
        raise click.ClickException(f"{', '.join(missing)} not found; ./dev s3 installs an S3 server")
    with scratch(directory) as place, RadosGateway() as server:
        server.create_bucket(_BUCKET)
        return measure(f"{store}://{_BUCKET}/bench", server.environment, place, **size)


def measure(
    location: str,
    environment: dict[str, str],
    directory: Path,
    *,
    requests: int,
    warm_up: int,
    block: int,
    scale: float,
    concurrency: int,
    object_bytes: int,
) -> Result:
    """Measure with a server that runs already.

    Parameters
    ----------
    location : str
        A folder there, as statelog takes it.
    environment : dict of str to str
        What the store takes from the environment; the server's address as ``AWS_ENDPOINT_URL``.
    directory : Path
        For files of the client's process.
    requests, warm_up, block, scale, concurrency, object_bytes
        The options of the command.

    Raises
    ------
    click.ClickException
        If the proxy saw other requests than the client says it made.
    """
    server_before_s = machine.children_cpu_s()
    rule = Rule("latency", method="PUT", path=f"/(?:{SINGLE}|{HEDGED})/([^/?]+)", scale=scale)
    with ProxyProcess(urlsplit(environment["AWS_ENDPOINT_URL"]).port or 80, [rule], seed=_SEED) as proxy:
        measured = run_in_child(
            "benchmarks.tail_side:run",
            {
                "location": location,
                "environment": {**environment, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"},
                "requests": requests,
                "warm_up": warm_up,
                "block": block,
                "concurrency": concurrency,
                "object_bytes": object_bytes,
                "timeout_s": _TIMEOUT_S * scale,
            },
            directory,
        )
        # The last losers may still be on their way.
        time.sleep(scale * latency_s(1.0))
        proxied = proxy.report()
    server_cpu_s = machine.children_cpu_s() - server_before_s
    sides = {name: _figures(side, scale) for name, side in measured.pop("sides").items()}
    attempts = sum(side["attempts"] for side in sides.values())
    if proxied["counts"]["PUT"] != attempts:
        raise click.ClickException(f"the client made {attempts} attempts, and the proxy saw {proxied['counts']['PUT']}")
    figures = {
        "sides": sides,
        "p99.9_lower_percent": _lower_percent(sides),
        **measured,
        "proxy_cpu_s": proxied["cpu_s"],
        "server_cpu_s": server_cpu_s,
        "proxy_late_ms": _quantiles_ms(proxied["late_s"]),
        "server_ms": _quantiles_ms(proxied["upstream_s"]),
    }
    return Result(
        figures=figures,
        targets=[
            Target("p99.9 with hedges lower by, %", figures["p99.9_lower_percent"], 40, "at_least"),
            Target("requests more with hedges, %", sides[HEDGED]["extra_requests_percent"], 5, "at_most"),
        ],
        header=["side", *(f"{name} ms" for name in _QUANTILES), "max ms", "hedges", "retries", "more requests"],
        rows=[_row(name, side) for name, side in sides.items()],
        remarks=_remarks(figures, scale, concurrency, object_bytes),
    )


def _figures(measured: dict[str, Any], scale: float) -> dict[str, Any]:
    """Figures of a side."""
    latencies_s, counts, warm_up = measured["latencies_s"], measured["counts"], measured["warm_up_counts"]
    extra = counts.get(Metric.UPLOAD_HEDGES, 0) + counts.get(Metric.UPLOAD_RETRIES, 0)
    injected_s = [scale * latency_of(_SEED, object_name(number), 1) for number in range(len(latencies_s))]
    return {
        "requests": len(latencies_s),
        "latency_ms": _quantiles_ms(latencies_s),
        "injected_ms": _quantiles_ms(injected_s),
        "added_ms": _quantiles_ms(took - injected for took, injected in zip(latencies_s, injected_s, strict=True)),
        "counts": counts,
        "attempts": sum(each.get(metric, 0) for each in (counts, warm_up) for metric in _ATTEMPTS),
        "extra_requests_percent": 100 * extra / len(latencies_s),
    }


def _quantiles_ms(samples_s: Iterable[float]) -> dict[str, Any]:
    """The quantiles for which there are enough samples, and the maximum."""
    distribution = Distribution.of(1000 * each for each in samples_s)
    count = len(distribution.samples)
    allowed = {name: share for name, share in _QUANTILES.items() if count >= _MIN_SAMPLES[name]}
    return {
        "samples": count,
        **{name: distribution.quantile(share) for name, share in allowed.items()},
        "max": distribution.maximum,
    }


def _lower_percent(sides: dict[str, dict[str, Any]]) -> float | None:
    """By how much hedging lowers the 99.9th percentile; None if there are too few samples."""
    single, hedged = (sides[name]["latency_ms"].get("p99.9") for name in (SINGLE, HEDGED))
    return None if single is None or hedged is None else 100 * (1 - hedged / single)


def _row(name: str, side: dict[str, Any]) -> list[str]:
    latency, counts = side["latency_ms"], side["counts"]
    return [
        name,
        *(f"{latency[quantile]:.0f}" if quantile in latency else "" for quantile in _QUANTILES),
        f"{latency['max']:.0f}",
        f"{counts.get(Metric.UPLOAD_HEDGES, 0):,}",
        f"{counts.get(Metric.UPLOAD_RETRIES, 0):,}",
        f"{side['extra_requests_percent']:.2f}%",
    ]


def _remarks(figures: dict[str, Any], scale: float, concurrency: int, object_bytes: int) -> list[str]:
    single = figures["sides"][SINGLE]
    cores = os.cpu_count() or 1
    parts = ("client", "proxy", "server", "machine")
    share = {name: 100 * figures[f"{name}_cpu_s"] / figures["took_s"] for name in parts}
    others = 2 * share["machine"] - sum(share.values())
    return [
        f"{single['requests']:,} objects of {object_bytes:,} bytes per side in turn, {concurrency} at a time, in"
        f" {figures['took_s']:.0f} s. Latencies of FLIP-158 times {scale:g}, equal for the same object on both sides.",
        f"Injected: {_shown(single['injected_ms'])} ms. Client, proxy and server add, without hedges:"
        f" {_shown(single['added_ms'])} ms.",
        f"The server took {_shown(figures['server_ms'])} ms; the proxy was late by"
        f" {_shown(figures['proxy_late_ms'])} ms.",
        f"Processor time, 100% is one of {cores} cores: client {share['client']:.0f}%, proxy {share['proxy']:.0f}%,"
        f" server {share['server']:.0f}%, other processes {max(others, 0):.0f}%.",
    ]


def _shown(quantiles: dict[str, Any]) -> str:
    return ", ".join(f"{name} {quantiles[name]:.1f}" for name in ("p50", "p99", "p99.9", "max") if name in quantiles)


BENCHMARK: Final = Benchmark(
    name="tail",
    description="Write objects to a store whose latencies have a long tail, with hedges and without.",
    options=[
        click.Option(["--store"], type=click.Choice(["s3"]), default="s3", help="Kind of store."),
        click.Option(["--requests"], type=click.IntRange(min=1), default=20_000, help="Of each side."),
        click.Option(["--warm-up"], type=click.IntRange(min=0), default=500, help="Requests of each side left out."),
        click.Option(["--block"], type=click.IntRange(min=1), default=4_000, help="Requests until the sides change."),
        click.Option(
            ["--scale"], type=click.FloatRange(0, min_open=True), default=1.0, help="Factor of FLIP-158's latencies."
        ),
        click.Option(["--concurrency"], type=click.IntRange(min=1), default=128, help="Objects written at a time."),
        click.Option(["--object-bytes"], type=click.IntRange(min=1), default=1_000, help="Of every object."),
        click.Option(
            ["--directory"],
            type=click.Path(file_okay=False, path_type=Path),
            help="For files of the client; by default one in the repository.",
        ),
    ],
    run=run,
)
