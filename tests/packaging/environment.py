"""Environments that hold exactly what some requirements declare: links to the distributions installed here."""

from __future__ import annotations

import re
import sys
import tomllib
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement

REPOSITORY: Final = Path(__file__).parents[2]
PROJECT: Final[dict[str, Any]] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
EXTRAS: Final[dict[str, list[str]]] = PROJECT["project"]["optional-dependencies"]


class Environment:
    """A virtual environment without pip.

    Parameters
    ----------
    directory : Path
        Where it is made.
    """

    def __init__(self, directory: Path) -> None:
        venv.create(directory, with_pip=False, symlinks=True)
        self.bin = directory / "bin"
        self.python = str(self.bin / "python")
        [self._packages] = directory.glob("lib/python*/site-packages")
        self._linked: set[str] = set()

    def link(self, requirements: Iterable[str]) -> set[str]:
        """Let it have the distributions of some requirements, without copying them; their names are returned."""
        names = needed(requirements)
        for name in sorted(names - self._linked):
            distribution = metadata.distribution(name)
            tops = {file.parts[0] for file in distribution.files or () if not file.parts[0].startswith((".", "_"))}
            for top in tops - {"bin"}:
                (self._packages / top).symlink_to(str(distribution.locate_file(top)))
        self._linked |= names
        return names

    def install(self, wheel: Path) -> list[str]:
        """The command that installs a wheel alone."""
        pip = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check"]
        return [*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)]


def name_of(requirement: str) -> str:
    """The name of a requirement's distribution, as pins and links have it."""
    return re.sub(r"[-_.]+", "-", Requirement(requirement).name).lower()


def pinned(file: str) -> dict[str, str]:
    """The version of each distribution that a file of ``requirements`` pins."""
    pins = (REPOSITORY / "requirements" / file).read_text()
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", pins, re.MULTILINE))


def needed(requirements: Iterable[str]) -> set[str]:
    """The distributions of some requirements, and those that they declare, without extras."""
    found: set[str] = set()
    declared = [Requirement(line) for line in requirements]
    while declared:
        requirement = declared.pop()
        name = name_of(str(requirement))
        if name in found or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        declared += [Requirement(line) for line in metadata.distribution(name).requires or ()]
    return found
