"""Which jars count as an installed HDFS."""

from __future__ import annotations

import re
from pathlib import Path

import pyspark
import pytest

from tests.hdfs import jars

POM = jars.CHECKSUMS.with_name("pom.xml").read_text()


def test_every_version_in_the_pom_is_in_the_list() -> None:
    listed = [line.split()[1] for line in jars.CHECKSUMS.read_text().splitlines()]
    wanted = re.findall(r"<artifactId>([^<]*)</artifactId>\s*<version>([^<]*)</version>", POM.split("<build>")[0])
    assert len(wanted) == 4, "the project itself, and what it depends on"
    for artifact, version in wanted[1:]:
        assert f"{artifact}-{version}.jar" in listed


@pytest.mark.skipif(not pyspark.__version__.startswith("4.3."), reason="another Spark than the project's")
def test_the_cluster_is_of_the_version_that_spark_s_client_has() -> None:
    [client] = Path(pyspark.__file__).parent.glob("jars/hadoop-client-api-*.jar")
    version = client.stem.removeprefix("hadoop-client-api-")
    assert f"<artifactId>hadoop-client-minicluster</artifactId>\n      <version>{version}</version>" in POM


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert jars.missing_jars(tmp_path / "nowhere") == "its jars are missing"
