"""What a look-up costs on a real server: requests, counted by a proxy in front of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import statelog
from statelog.history.restore_plan import SHARED_BYTES
from statelog.reading.open import open_logged
from statelog.storage import open_store
from tests.reading.large_state import LEVELS, PARALLELISM, LargeState, changes_since, key_of, levels_of, subtask_of
from tests.s3.fault_proxy import FaultProxy, proxy_in_thread
from tests.s3.server import RadosGateway

pytest_plugins = ("tests.s3.plugin",)


@pytest.fixture
def proxy(s3_server: RadosGateway, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy that stores in this process go through."""
    with proxy_in_thread(FaultProxy(urlsplit(s3_server.address).port or 80)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        yield proxy


def test_requests_of_look_ups_with_an_open_reader(proxy: FaultProxy, s3_location: str, tmp_path: Path) -> None:
    query = LargeState(tmp_path, open_store=lambda location: open_store(s3_location))
    for number in range(5):
        query.run_keys([key_of(number)])
    history = open_logged(s3_location, None, None).history
    for subtask in range(PARALLELISM):
        levels = levels_of(history, subtask)
        assert len(levels) == len(LEVELS)
        assert min(run.length for runs in levels for run in runs) > SHARED_BYTES
    seen: set[int] = set()
    with statelog.open_state(s3_location) as reader:
        for number in (7, 4011, 8, 12, 7):
            subtask = subtask_of(key_of(number))
            first = 2 * len(LEVELS) + len(changes_since(history, subtask))
            most = len(LEVELS) if subtask in seen else first
            seen.add(subtask)
            proxy.counts.clear()
            [value] = reader.read("value", keys=[key_of(number)]).read_all()["value_field"].to_pylist()
            assert value == query.models[-1].keys[key_of(number)][0]
            assert proxy.counts["GET"] <= most
            assert proxy.counts["GET"] == proxy.counts.total() - proxy.counts["passed"], "no other requests"
