"""Fixtures for tests on a real S3 server; a module that wants them says ``pytest_plugins = ("tests.s3.plugin",)``."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.s3.server import BUCKET, RadosGateway, missing_programs


@pytest.fixture(scope="session")
def s3_server() -> Iterator[RadosGateway]:
    """The server of this session, with a bucket; this process and its children find it by their environment.

    Tests that use it are skipped where it is not installed.
    """
    if missing := missing_programs():
        pytest.skip(f"no S3 server ({missing[0]} is missing); ./dev s3 installs one")
    with RadosGateway() as server, pytest.MonkeyPatch.context() as patch:
        server.create_bucket(BUCKET)
        for name in list(os.environ):
            if name.startswith("AWS_"):
                patch.delenv(name)
        for name, value in server.environment.items():
            patch.setenv(name, value)
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield server


@pytest.fixture
def s3_location(s3_server: RadosGateway, request: pytest.FixtureRequest) -> str:
    """An empty location, of this test only."""
    number = request.session.stash.get(_NUMBER, 0) + 1
    request.session.stash[_NUMBER] = number
    return f"s3://{BUCKET}/{number}"


_NUMBER = pytest.StashKey[int]()
