"""Which jars count as an installed S3A."""

from __future__ import annotations

import re
from pathlib import Path

import pyspark
import pytest

from tests.s3a import jars

POM = jars.CHECKSUMS.with_name("pom.xml").read_text()


def test_every_version_in_the_pom_is_in_the_list() -> None:
    listed = [line.split()[1] for line in jars.CHECKSUMS.read_text().splitlines()]
    wanted = re.findall(r"<artifactId>([^<]*)</artifactId>\s*<version>([^<]*)</version>", POM.split("<build>")[0])
    assert len(wanted) == 5, "the project itself, and what it depends on"
    for artifact, version in wanted[1:]:
        assert f"{artifact}-{version}.jar" in listed


@pytest.mark.skipif(not pyspark.__version__.startswith("4.3."), reason="another Spark than the project's")
def test_s3a_is_of_the_version_that_spark_s_client_has() -> None:
    [client] = Path(pyspark.__file__).parent.glob("jars/hadoop-client-api-*.jar")
    version = client.stem.removeprefix("hadoop-client-api-")
    assert f"<artifactId>hadoop-aws</artifactId>\n      <version>{version}</version>" in POM


@pytest.mark.skipif(not pyspark.__version__.startswith("4.3."), reason="another Spark than the project's")
def test_what_spark_has_itself_is_in_no_second_version() -> None:
    """Two versions of a library in one JVM would be one too many."""
    own = {path.stem.rpartition("-")[0] for path in Path(pyspark.__file__).parent.glob("jars/*.jar")}
    listed = {Path(line.split()[1]).stem.rpartition("-")[0] for line in jars.CHECKSUMS.read_text().splitlines()}
    assert not own & listed


def test_a_missing_folder_and_another_spark_are_named(tmp_path: Path) -> None:
    assert jars.missing_jars(tmp_path / "nowhere", spark="4.3.0") == "its jars are missing"
    assert jars.missing_jars(tmp_path / "nowhere", spark="4.2.1") == "its jars are for Spark 4.3"
