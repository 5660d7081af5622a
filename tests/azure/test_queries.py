"""A query whose state is on Azurite."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.azure.server import Azurite
from tests.spark.long_life import live
from tests.spark.support import Job

pytest_plugins = ("tests.azure.plugin",)
pytestmark = [pytest.mark.spark, pytest.mark.extended]


def test_a_query_s_life_with_state_in_azure(
    spark: SparkSession, azurite: Azurite, azure_location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in azurite.environment.items():
        monkeypatch.setitem(spark.sparkContext.environment, name, value)
    job = Job(tmp_path, location=f"{azure_location}/state")
    live(spark, job, f"{azure_location}/other", f"{azure_location}/saved")
