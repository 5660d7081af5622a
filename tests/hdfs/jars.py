"""The jars of ``./dev hdfs``: Hadoop's mini cluster and its Kerberos; ``python -m tests.hdfs.jars`` checks them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

import pyspark

from tests import jars

CHECKSUMS: Final = Path(__file__).with_name("checksums.sha256")
FOLDER: Final = Path(os.environ.get("STATELOG_TEST_HDFS", Path(sys.prefix, "hdfs")))


def missing_jars(folder: Path = FOLDER, checksums: Path = CHECKSUMS) -> str:
    """Why there is no HDFS for tests; empty if every jar is there, with its checksum, and no other."""
    return jars.missing_jars(folder, checksums)


def cluster_class_path() -> str:
    """The class path of a cluster, and of Py4J, by which a test directs it."""
    [py4j] = Path(pyspark.__file__).parent.glob("jars/py4j-*.jar")
    return os.pathsep.join([str(FOLDER / "*"), str(py4j)])


if __name__ == "__main__":
    if missing := missing_jars():
        sys.exit(f"no HDFS: {missing}")
