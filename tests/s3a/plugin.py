"""Fixtures for tests on S3A; a module that wants them names this plugin, and ``tests.s3.plugin``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from pyspark.sql import SparkSession

from tests.jars import S3A
from tests.s3.server import RadosGateway
from tests.s3a.settings import s3a_settings


@pytest.fixture(scope="session")
def s3a_is_installed() -> None:
    """Tests that use it are skipped where S3A is not installed."""
    if missing := S3A.missing():
        pytest.skip(f"no S3A ({missing}); ./dev s3a installs it")


@pytest.fixture
def s3a_location(s3a_is_installed: None, s3_location: str) -> str:
    """An empty location, of this test only, as Spark names it."""
    return s3_location.replace("s3:", "s3a:")


@pytest.fixture
def configure_s3a(
    s3a_is_installed: None, s3_server: RadosGateway, configured: Callable[[str, str], None], spark: SparkSession
) -> Callable[[Mapping[str, str]], SparkSession]:
    """Gives the session its settings for S3A, and more, until the end of a test."""

    def configure(more: Mapping[str, str]) -> SparkSession:
        for name, value in {**s3a_settings(s3_server), **more}.items():
            configured(name, value)
        return spark

    return configure
