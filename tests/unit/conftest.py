"""What the tests of calls share."""

from __future__ import annotations

import pytest

from statelog.rpc.tls import TlsIdentity, new_identity


@pytest.fixture(scope="session")
def tls_identity() -> TlsIdentity:
    return new_identity()


@pytest.fixture(params=["clear", "tls"])
def identity(request: pytest.FixtureRequest) -> TlsIdentity | None:
    """The server's for TLS: each test runs without and with it."""
    return None if request.param == "clear" else request.getfixturevalue("tls_identity")
