"""The Spark that the tests run on: that of .venv, or the one that ``./dev test --spark`` asks for."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re

import pyspark
import pytest
from pyspark.sql import SparkSession

import statelog
from tests.spark.support import REPOSITORY

pytestmark = [pytest.mark.spark, pytest.mark.smoke]


def test_driver_workers_and_jvm_are_of_the_version_asked_for(spark: SparkSession) -> None:
    asked = os.environ.get("STATELOG_TEST_SPARK")
    pins = REPOSITORY / "requirements" / (f"spark-{asked}.txt" if asked else "dev.txt")
    [version] = re.findall(r"^pyspark==(\S+)", pins.read_text(), re.MULTILINE)
    [workers] = spark.sparkContext.parallelize([0], 1).map(lambda _: pyspark.__version__).collect()

    assert asked is None or f"{version}.".startswith(f"{asked}.")
    assert {"driver": pyspark.__version__, "workers": workers, "JVM": spark.version} == dict.fromkeys(
        ("driver", "workers", "JVM"), version
    )


def test_every_module_can_be_imported() -> None:
    """Many are imported when one of their names is used first."""
    for module in pkgutil.walk_packages(statelog.__path__, "statelog."):
        importlib.import_module(module.name)
