"""What is published: the wheel, the source distribution, and a library that works with no more than it declares."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[2]
TEMPLATES = REPOSITORY / "src" / "statelog" / "pages" / "templates"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())

USE = """
import sys
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor
from statelog.testing import Harness

class Count(StatefulProcessor):
    def init(self, handle):
        self.seen = handle.getValueState("seen", "count long")

    def handleInputRows(self, key, rows, timerValues):
        count = (self.seen.get() or (0,))[0] + sum(1 for _ in rows)
        self.seen.update((count,))
        yield Row(user=key[0], count=count)

    def close(self):
        pass

with Harness(Count(), input="user string", keys=["user"], output="user string, count long") as harness:
    harness.push([("ann",), ("ann",), ("bob",)])
    harness.restart(parallelism=3)
    assert harness.push([("ann",)]) == [Row(user="ann", count=3)]
print(*sorted(name for name in ("pytest", "rocksdict", "datasketches", "hypothesis", "rich") if name in sys.modules))
"""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution."""
    target = tmp_path_factory.mktemp("distributions")
    _run(sys.executable, "-m", "hatchling", "build", "-d", str(target), cwd=REPOSITORY)
    return target


def test_the_wheel_holds_the_package_and_its_types_alone(distributions: Path) -> None:
    [wheel] = distributions.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    files = {path.relative_to(REPOSITORY / "src").as_posix() for path in (REPOSITORY / "src/statelog").rglob("*.py")}
    files |= {path.relative_to(REPOSITORY / "src").as_posix() for path in TEMPLATES.iterdir()}
    types = {"statelog/__init__.pyi", "statelog/py.typed"}
    assert {name for name in names if ".dist-info/" not in name} == files | types


def test_the_source_distribution_builds_the_same_wheel(distributions: Path, tmp_path: Path) -> None:
    [archive] = distributions.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        source.extraction_filter = getattr(tarfile, "data_filter", None)  # new in Python 3.11.4
        source.extractall(tmp_path)
    [unpacked] = tmp_path.iterdir()
    assert {"README.md", "CHANGELOG.md", "LICENSE", "docs", "examples", "tests"} <= {
        path.name for path in unpacked.iterdir()
    }
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "wheel"), cwd=unpacked)
    [again], [wheel] = (tmp_path / "wheel").glob("*.whl"), distributions.glob("*.whl")
    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()


def test_the_wheel_works_with_what_it_declares_alone(distributions: Path, tmp_path: Path) -> None:
    [wheel] = distributions.glob("*.whl")
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    bin_ = environment / "bin"
    [packages] = environment.glob("lib/python*/site-packages")
    extras = PROJECT["project"]["optional-dependencies"]
    needed = _needed(PROJECT["project"]["dependencies"])
    for distribution in needed:
        _link(metadata.distribution(distribution), packages)
    pip = [sys.executable, "-m", "pip", "--python", str(bin_ / "python"), "--disable-pip-version-check"]
    _run(*pip, "install", "--no-index", "--no-deps", str(wheel))

    python = str(bin_ / "python")
    assert "pyspark" not in needed, "pip would put another Spark over a platform's own"
    assert _run(python, "-c", "import statelog; print(statelog.Options().table)") == "runs\n"
    done = subprocess.run(
        [python, "-c", "import statelog; statelog.key_by"], capture_output=True, text=True, check=False
    )
    assert "ModuleNotFoundError: statelog.key_by needs PySpark" in done.stderr
    for distribution in _needed(extras["spark"]) - needed:
        _link(metadata.distribution(distribution), packages)
    needed |= _needed(extras["spark"])
    assert _run(python, "-c", USE, cwd=tmp_path) == "\n"
    done = subprocess.run([bin_ / "statelog", "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, "statelog[cli]" in done.stderr) == (1, True)
    for distribution in _needed(extras["cli"]) - needed:
        _link(metadata.distribution(distribution), packages)
    for command in ([bin_ / "statelog"], [bin_ / "python", "-m", "statelog"]):
        done = subprocess.run([*command, "ls", tmp_path], capture_output=True, text=True, check=False)
        assert (done.returncode, "holds no state" in done.stderr) == (1, True)


def test_every_development_dependency_is_pinned() -> None:
    groups = PROJECT["dependency-groups"]
    for group, pins in (("dev", "dev.txt"), ("mutate", "mutate.txt")):
        pinned = set(re.findall(r"^([a-z0-9-]+)==", (REPOSITORY / "requirements" / pins).read_text(), re.MULTILINE))
        assert {_name(requirement) for requirement in _members(groups, group)} <= pinned
    extras = itertools.chain.from_iterable(PROJECT["project"]["optional-dependencies"].values())
    declared = [*PROJECT["project"]["dependencies"], *extras]
    pinned = set(re.findall(r"^([a-z0-9-]+)==", (REPOSITORY / "requirements/dev.txt").read_text(), re.MULTILINE))
    assert {_name(requirement) for requirement in declared} <= pinned


def _members(groups: dict[str, list[str | dict[str, str]]], name: str) -> Iterator[str]:
    for member in groups[name]:
        if isinstance(member, str):
            yield member
        else:
            yield from _members(groups, member["include-group"])


def _name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", Requirement(requirement).name).lower()


def _needed(requirements: list[str]) -> set[str]:
    """The distributions of some requirements, and those that they declare, without extras."""
    found: set[str] = set()
    declared = [Requirement(line) for line in requirements]
    while declared:
        requirement = declared.pop()
        name = _name(str(requirement))
        if name in found or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        declared += [Requirement(line) for line in metadata.distribution(name).requires or ()]
    return found


def _link(distribution: metadata.Distribution, packages: Path) -> None:
    """Let an environment have an installed distribution, without copying it."""
    tops = {file.parts[0] for file in distribution.files or () if not file.parts[0].startswith((".", "_"))}
    for top in tops - {"bin"}:
        (packages / top).symlink_to(str(distribution.locate_file(top)))


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
