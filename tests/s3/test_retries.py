"""Retries on a real server, behind a proxy that refuses requests, drops connections and loses answers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from statelog.clock import SystemClock
from statelog.metrics import Measurements, Metric
from statelog.storage import Store, open_store
from statelog.storage.retry import RetryingStore, RetryPolicy
from statelog.testing.contracts import StoreContract
from tests.s3.fault_proxy import FaultProxy, Rule, proxy_in_thread
from tests.s3.server import RadosGateway

pytest_plugins = ("tests.s3.plugin",)

FAULTS = [Rule("slow_down", share=0.1), Rule("reset", share=0.1), Rule("reset_after", share=0.1)]


@pytest.fixture
def proxy(s3_server: RadosGateway, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy that stores in this process go through; without rules."""
    with proxy_in_thread(FaultProxy(urlsplit(s3_server.address).port or 80, seed=11)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        yield proxy


def retrying(location: str, policy: RetryPolicy) -> tuple[RetryingStore, Measurements]:
    recorder = Measurements()
    return RetryingStore(open_store(location), policy, clock=SystemClock(), recorder=recorder), recorder


class TestRetryingStoreOnS3(StoreContract):
    @pytest.fixture
    def store(self, s3_location: str, proxy: FaultProxy) -> Store:
        proxy.rules = FAULTS
        return retrying(s3_location, RetryPolicy(attempts=12, timeout_s=None, delay_s=0.002, max_delay_s=0.02))[0]


def test_a_race_to_create_has_one_winner_whatever_is_lost(s3_location: str, proxy: FaultProxy) -> None:
    proxy.rules = [Rule("reset_after", method="PUT", share=0.4), *FAULTS]
    policy = RetryPolicy(attempts=20, timeout_s=0.02, delay_s=0.002, max_delay_s=0.02)
    writers = [retrying(s3_location, policy) for _ in range(8)]
    with ThreadPoolExecutor(len(writers)) as pool:
        for number in range(20):
            name = f"log/{number:020d}"
            tokens = [b"%d by %d" % (number, writer) for writer in range(len(writers))]
            won = list(pool.map(lambda one, token, name=name: one[0].put_if_absent(name, token), writers, tokens))
            assert won.count(True) == 1
            assert writers[0][0].read(name) == tokens[won.index(True)]
    assert sum(recorder.take().counts.get(Metric.UPLOAD_RETRIES, 0) for _, recorder in writers) > 50


def test_a_request_that_hangs_is_hedged(s3_location: str, proxy: FaultProxy) -> None:
    store, recorder = retrying(s3_location, RetryPolicy(timeout_s=0.05))
    proxy.rules = [Rule("hang", method="PUT", times=1)]

    store.put("x", b"content")

    assert store.read("x") == b"content"
    assert recorder.take().counts == {Metric.UPLOAD_REQUESTS: 1, Metric.UPLOAD_HEDGES: 1}


def test_a_lost_answer_is_read_back(s3_location: str, proxy: FaultProxy) -> None:
    store, _ = retrying(s3_location, RetryPolicy(delay_s=0.01))
    proxy.rules = [Rule("reset_after", method="PUT", times=1)]

    assert store.put_if_absent("log/1", b"ours")
    assert not store.put_if_absent("log/1", b"others'")

    assert store.read("log/1") == b"ours"
    assert proxy.counts == {"reset_after": 1, "passed": 4, "PUT": 3, "GET": 2}
