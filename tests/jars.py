"""Jars for tests, and JVMs outside Spark; ``python -m tests.jars NAME`` checks what ``./dev NAME`` has installed."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyspark


@dataclass(frozen=True)
class JarSet:
    """The jars that a command of ``./dev`` installs: those of a committed list of checksums, and no others."""

    name: str
    """Of the command, and of the folder of the pom and the list."""
    title: str
    sparks: tuple[str, ...] = ("",)
    """How the versions of Spark begin that can load the jars."""
    part: str = ""
    """The folder, within that of the set, of the jars that a Spark session loads."""

    @property
    def folder(self) -> Path:
        """Where the jars are."""
        return Path(os.environ.get(f"STATELOG_TEST_{self.name.upper()}", Path(sys.prefix, self.name)))

    @property
    def checksums(self) -> Path:
        """The list: checksum and path of each jar."""
        return Path(__file__).parent / self.name / "checksums.sha256"

    @property
    def pom(self) -> Path:
        """What Maven resolves."""
        return self.checksums.with_name("pom.xml")

    def missing(self, spark: str = pyspark.__version__) -> str:
        """Why tests cannot use the jars; empty if they can."""
        if not spark.startswith(self.sparks):
            return f"its jars are for Spark {' and '.join(version.rstrip('.') for version in self.sparks)}"
        return _difference(self.folder, self.checksums)


KAFKA: Final = JarSet("kafka", "Kafka", ("4.2.", "4.3."), "connector")
"""Spark's connector, which is of Spark 4.2, and in ``broker`` a broker."""
HDFS: Final = JarSet("hdfs", "HDFS")
"""Hadoop's mini cluster and its Kerberos."""
S3A: Final = JarSet("s3a", "S3A", ("4.3.",))
"""Hadoop's S3A, of the version of this Spark's Hadoop, and a file manager of Spark's."""
JAR_SETS: Final = {jars.name: jars for jars in (KAFKA, HDFS, S3A)}


def spark_jars(*sets: JarSet) -> dict[str, str]:
    """Settings by which a Spark session loads the jars of those sets that are installed."""
    paths = [str(path) for jars in sets if not jars.missing() for path in sorted((jars.folder / jars.part).iterdir())]
    return {"spark.jars": ",".join(paths)} if paths else {}


def missing_server(jars: JarSet) -> str:
    """Why a server of these jars cannot be started; empty if it can."""
    return jars.missing() or ", ".join(f"{name} is missing" for name in ("java", "setpriv") if _find(name) is None)


def java() -> str:
    """The program that starts a JVM: that of ``JAVA_HOME``, or on the path."""
    return str(_find("java"))


def jvm_environment() -> dict[str, str]:
    """This process's environment without the options of the tests' other JVMs, which have other classes."""
    return {name: value for name, value in os.environ.items() if name != "JDK_JAVA_OPTIONS"}


def _difference(folder: Path, checksums: Path) -> str:
    lines = [line.split() for line in checksums.read_text().splitlines()]
    expected = {name: checksum for checksum, name in lines}
    if not folder.is_dir():
        return "its jars are missing"
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if not path.is_dir()}
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} is in no list"
        if hashlib.sha256(found[name].read_bytes()).hexdigest() != expected[name]:
            return f"{name} has another checksum"
    return ""


def _find(name: str) -> str | None:
    homes = [str(Path(os.environ["JAVA_HOME"], "bin"))] if "JAVA_HOME" in os.environ else []
    return shutil.which(name, path=os.pathsep.join([*homes, os.environ.get("PATH", "")]))


if __name__ == "__main__":
    chosen = JAR_SETS[sys.argv[1]]
    if missing := chosen.missing():
        sys.exit(f"no {chosen.title}: {missing}")
