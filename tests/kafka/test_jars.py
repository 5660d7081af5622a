"""Which jars count as an installed Kafka."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.kafka import jars


@pytest.fixture(name="folder")
def make_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the two jars that are listed."""
    folder, listed = tmp_path / "kafka", []
    for name in ("broker/one.jar", "connector/two.jar"):
        path = folder / name
        path.parent.mkdir(parents=True)
        path.write_bytes(name.encode())
        listed.append(f"{hashlib.sha256(name.encode()).hexdigest()}  {name}\n")
    checksums = tmp_path / "checksums.sha256"
    checksums.write_text("".join(listed))
    monkeypatch.setattr(jars, "CHECKSUMS", checksums)
    monkeypatch.setattr(jars, "FOLDER", folder)
    monkeypatch.setattr("pyspark.__version__", "4.3.0")
    return folder


def test_jars_that_are_all_there_are_the_session_s(folder: Path) -> None:
    assert jars.missing_jars() == ""
    assert jars.connector_settings() == {"spark.jars": str(folder / "connector" / "two.jar")}


@pytest.mark.parametrize(
    ("name", "content", "missing"),
    [
        ("broker/one.jar", None, "broker/one.jar is missing"),
        ("broker/one.jar", b"broker/one.jaR", "broker/one.jar has another checksum"),
        ("connector/three.jar", b"", "connector/three.jar is in no list"),
    ],
)
def test_a_jar_too_few_too_many_or_changed_is_named(
    folder: Path, name: str, content: bytes | None, missing: str
) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    assert jars.missing_jars() == missing
    assert jars.connector_settings() == {}


def test_without_a_folder_or_with_an_older_spark_there_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.__version__", "4.1.4")
    assert jars.missing_jars() == "the connector needs Spark 4.2"
    monkeypatch.setattr("pyspark.__version__", "4.2.1")
    monkeypatch.setattr(jars, "FOLDER", folder / "nowhere")
    assert jars.missing_jars() == "its jars are missing"


def test_every_version_in_the_list_is_in_the_pom_or_comes_with_it() -> None:
    """The list names the versions that the pom asks for."""
    pom = jars.CHECKSUMS.with_name("pom.xml").read_text()
    listed = jars.CHECKSUMS.read_text()
    for artifact in ("kafka_2.13", "slf4j-simple", "spark-sql-kafka-0-10_2.13", "kafka-clients", "commons-pool2"):
        version = pom.split(f"<artifactId>{artifact}</artifactId>")[1].split("<version>")[1].split("<")[0]
        assert f"/{artifact}-{version}.jar\n" in listed
