"""Which jars count as installed, and that the lists of jars are what the poms ask for."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pyspark
import pytest

from tests.jars import HDFS, JAR_SETS, KAFKA, S3A, JarSet, spark_jars

NAMES = ("broker/one.jar", "connector/two.jar")
SPARK_JARS = Path(pyspark.__file__).parent / "jars"

all_sets = pytest.mark.parametrize("jars", JAR_SETS.values(), ids=list(JAR_SETS))
project_s_spark = pytest.mark.skipif(not pyspark.__version__.startswith("4.3."), reason="for the project's Spark only")


@pytest.fixture(name="installed")
def make_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JarSet:
    """A set of two jars, of which one is for Spark."""
    for name in NAMES:
        path = tmp_path / "kafka" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(name.encode())
    listed = [f"{hashlib.sha256(name.encode()).hexdigest()}  {name}\n" for name in NAMES]
    (tmp_path / "checksums.sha256").write_text("".join(listed))
    monkeypatch.setattr(JarSet, "folder", tmp_path / "kafka")
    monkeypatch.setattr(JarSet, "checksums", tmp_path / "checksums.sha256")
    return JarSet("kafka", "Kafka", ("4.2.", "4.3."), "connector")


def test_nothing_is_missing_if_the_listed_jars_are_there(installed: JarSet) -> None:
    assert installed.missing("4.3.0") == ""
    assert installed.missing("4.2.1") == ""
    assert installed.missing("4.1.4") == "its jars are for Spark 4.2 and 4.3"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("broker/one.jar", None, "broker/one.jar is missing"),
        ("broker/one.jar", b"broker/one.jaR", "broker/one.jar has another checksum"),
        ("connector/three.jar", b"", "connector/three.jar is in no list"),
    ],
)
def test_a_jar_too_few_too_many_or_changed_is_named(
    installed: JarSet, name: str, content: bytes | None, reason: str
) -> None:
    if content is None:
        (installed.folder / name).unlink()
    else:
        (installed.folder / name).write_bytes(content)
    assert installed.missing("4.3.0") == reason


def test_a_session_loads_the_jars_for_spark_of_what_is_installed(
    installed: JarSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JarSet, "missing", lambda self: "" if self is installed else "its jars are missing")
    assert spark_jars(installed, S3A) == {"spark.jars": str(installed.folder / NAMES[1])}
    assert spark_jars(S3A) == {}


@all_sets
def test_without_a_folder_a_set_is_missing(jars: JarSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"STATELOG_TEST_{jars.name.upper()}", str(tmp_path / "nowhere"))
    assert jars.missing("4.3.0") == "its jars are missing"


@all_sets
def test_every_version_in_the_pom_is_in_the_list(jars: JarSet) -> None:
    listed = {Path(line.split()[1]).name for line in jars.checksums.read_text().splitlines()}
    dependencies = "".join(re.findall(r"<dependencies>.*?</dependencies>", jars.pom.read_text(), re.DOTALL))
    wanted = re.findall(r"<artifactId>([^<*]+)</artifactId>\s*<version>([^<]+)</version>", dependencies)
    assert len(wanted) >= 3
    assert {f"{artifact}-{version}.jar" for artifact, version in wanted} <= listed


@project_s_spark
@pytest.mark.parametrize(("jars", "artifact"), [(HDFS, "hadoop-client-minicluster"), (S3A, "hadoop-aws")])
def test_hadoop_is_of_the_version_that_spark_s_client_has(jars: JarSet, artifact: str) -> None:
    [client] = SPARK_JARS.glob("hadoop-client-api-*.jar")
    version = client.stem.removeprefix("hadoop-client-api-")
    assert re.search(rf"<artifactId>{artifact}</artifactId>\s*<version>{version}</version>", jars.pom.read_text())


@project_s_spark
@pytest.mark.parametrize("jars", [KAFKA, S3A], ids=["kafka", "s3a"])
def test_what_spark_has_itself_is_in_no_second_version(jars: JarSet) -> None:
    """Two versions of a library in one JVM would be one too many."""
    own = {path.stem.rpartition("-")[0] for path in SPARK_JARS.glob("*.jar")}
    paths = [Path(line.split()[1]) for line in jars.checksums.read_text().splitlines()]
    assert not own & {path.stem.rpartition("-")[0] for path in paths if path.parent.name == jars.part}
