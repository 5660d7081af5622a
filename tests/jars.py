"""Jars that the test servers need: what is installed is what a committed list of checksums names, and no more."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path


def missing_jars(folder: Path, checksums: Path) -> str:
    """Why a folder does not have the jars of a list; empty if each is there, with its checksum, and no other file."""
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


def missing_programs() -> list[str]:
    """What must be installed before a server in a JVM can be started, besides its jars."""
    return [name for name in ("java", "setpriv") if _find(name) is None]


def java() -> str:
    """The program that starts a JVM: that of ``JAVA_HOME``, or on the path."""
    return str(_find("java"))


def jvm_environment() -> dict[str, str]:
    """This process's environment without the options of the tests' other JVMs, which have other classes."""
    return {name: value for name, value in os.environ.items() if name != "JDK_JAVA_OPTIONS"}


def _find(name: str) -> str | None:
    homes = [str(Path(os.environ["JAVA_HOME"], "bin"))] if "JAVA_HOME" in os.environ else []
    return shutil.which(name, path=os.pathsep.join([*homes, os.environ.get("PATH", "")]))
