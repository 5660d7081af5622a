"""Fixtures for tests on Azurite; a module that wants them says ``pytest_plugins = ("tests.azure.plugin",)``."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.azure.server import CONTAINER, Azurite, missing_programs


@pytest.fixture(scope="session")
def azurite() -> Iterator[Azurite]:
    """The server of this session, with a container; this process and its children find it by their environment.

    Tests that use it are skipped where it is not installed.
    """
    if missing := missing_programs():
        pytest.skip(f"no server of Azure's blobs ({missing[0]} is missing); ./dev azure installs one")
    with Azurite() as server, pytest.MonkeyPatch.context() as patch:
        server.create_container(CONTAINER)
        for name in list(os.environ):
            if name.startswith("AZURE_"):
                patch.delenv(name)
        for name, value in server.environment.items():
            patch.setenv(name, value)
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield server


@pytest.fixture
def azure_location(azurite: Azurite, request: pytest.FixtureRequest) -> str:
    """An empty location, of this test only."""
    number = request.session.stash.get(_NUMBER, 0) + 1
    request.session.stash[_NUMBER] = number
    return f"az://{CONTAINER}/{number}"


_NUMBER = pytest.StashKey[int]()
