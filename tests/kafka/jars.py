"""The jars of ``./dev kafka``: a broker, and Spark's connector; ``python -m tests.kafka.jars`` checks them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

import pyspark

from tests import jars

CHECKSUMS: Final = Path(__file__).with_name("checksums.sha256")
FOLDER: Final = Path(os.environ.get("STATELOG_TEST_KAFKA", Path(sys.prefix, "kafka")))
_OLDEST_SPARK: Final = (4, 2)
"""The connector is of this version, and a newer Spark can load it."""


def missing_jars(folder: Path = FOLDER, checksums: Path = CHECKSUMS, spark: str = pyspark.__version__) -> str:
    """Why there is no Kafka for tests; empty if every jar is there, with its checksum, and no other."""
    if tuple(map(int, spark.split(".")[:2])) < _OLDEST_SPARK:
        return "the connector needs Spark 4.2"
    return jars.missing_jars(folder, checksums)


def broker_class_path() -> str:
    """The class path of a broker."""
    return str(FOLDER / "broker" / "*")


def connector_settings() -> dict[str, str]:
    """Settings by which a Spark session has the connector, and Kafka's clients; empty if they are not installed."""
    if missing_jars():
        return {}
    return {"spark.jars": ",".join(str(path) for path in sorted((FOLDER / "connector").iterdir()))}


if __name__ == "__main__":
    if missing := missing_jars():
        sys.exit(f"no Kafka: {missing}")
