"""The jars of ``./dev s3a``: Hadoop's S3A, and a file manager of Spark's; ``python -m tests.s3a.jars`` checks them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

import pyspark

from tests import jars

CHECKSUMS: Final = Path(__file__).with_name("checksums.sha256")
FOLDER: Final = Path(os.environ.get("STATELOG_TEST_S3A", Path(sys.prefix, "s3a")))
_SPARK: Final = "4.3."
"""S3A is of the version of this Spark's Hadoop, and fits no other one."""


def missing_jars(folder: Path = FOLDER, checksums: Path = CHECKSUMS, spark: str = pyspark.__version__) -> str:
    """Why there is no S3A for tests; empty if every jar is there, with its checksum, and no other."""
    if not spark.startswith(_SPARK):
        return "its jars are for Spark 4.3"
    return jars.missing_jars(folder, checksums)


def session_jars() -> list[str]:
    """The jars that a Spark session needs for ``s3a:``; none if they are not installed."""
    return [] if missing_jars() else [str(path) for path in sorted(FOLDER.iterdir())]


if __name__ == "__main__":
    if missing := missing_jars():
        sys.exit(f"no S3A: {missing}")
