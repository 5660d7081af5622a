"""Which jars count as an installed Kafka."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.kafka import jars


@pytest.fixture(name="folder")
def make_folder(tmp_path: Path) -> Path:
    """A folder with two jars, beside the list of them."""
    folder, listed = tmp_path / "kafka", []
    for name in ("broker/one.jar", "connector/two.jar"):
        path = folder / name
        path.parent.mkdir(parents=True)
        path.write_bytes(name.encode())
        listed.append(f"{hashlib.sha256(name.encode()).hexdigest()}  {name}\n")
    (tmp_path / "checksums.sha256").write_text("".join(listed))
    return folder


def missing(folder: Path, spark: str = "4.3.0") -> str:
    return jars.missing_jars(folder, folder.parent / "checksums.sha256", spark)


def test_nothing_is_missing_if_the_listed_jars_are_there(folder: Path) -> None:
    assert missing(folder) == ""
    assert missing(folder, "4.2.1") == ""


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("broker/one.jar", None, "broker/one.jar is missing"),
        ("broker/one.jar", b"broker/one.jaR", "broker/one.jar has another checksum"),
        ("connector/three.jar", b"", "connector/three.jar is in no list"),
    ],
)
def test_a_jar_too_few_too_many_or_changed_is_named(
    folder: Path, name: str, content: bytes | None, reason: str
) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    assert missing(folder) == reason


def test_without_a_folder_or_with_an_older_spark_there_is_none(folder: Path) -> None:
    assert missing(folder, "4.1.4") == "the connector needs Spark 4.2"
    assert missing(folder.with_name("nowhere")) == "its jars are missing"


def test_every_version_in_the_list_is_in_the_pom_or_comes_with_it() -> None:
    """The list names the versions that the pom asks for."""
    pom = jars.CHECKSUMS.with_name("pom.xml").read_text()
    listed = jars.CHECKSUMS.read_text()
    for artifact in ("kafka_2.13", "slf4j-simple", "spark-sql-kafka-0-10_2.13", "kafka-clients", "commons-pool2"):
        version = pom.split(f"<artifactId>{artifact}</artifactId>")[1].split("<version>")[1].split("<")[0]
        assert f"/{artifact}-{version}.jar\n" in listed
