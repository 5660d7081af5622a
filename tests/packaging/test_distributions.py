"""What is published: the wheel, the source distribution, and a library that works with no more than it declares."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.packaging.environment import EXTRAS, PROJECT, REPOSITORY, Environment, name_of, pinned

TEMPLATES = REPOSITORY / "src" / "statelog" / "tools" / "pages" / "templates"

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
print(*sorted(name for name in ("pytest", "rocksdict", "hypothesis", "rich") if name in sys.modules))
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
    environment = Environment(tmp_path / "environment")
    python = environment.python
    needed = environment.link(PROJECT["project"]["dependencies"])
    _run(*environment.install(wheel))
    assert "pyspark" not in needed, "pip would put another Spark over a platform's own"
    assert _run(python, "-c", "import statelog; print(statelog.Options().table)") == "runs\n"
    done = subprocess.run(
        [python, "-c", "import statelog; statelog.key_by"], capture_output=True, text=True, check=False
    )
    assert "ModuleNotFoundError: statelog.key_by needs PySpark" in done.stderr
    environment.link(EXTRAS["spark"])
    assert _run(python, "-c", USE, cwd=tmp_path) == "\n"
    done = subprocess.run([environment.bin / "statelog", "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, "statelog[cli]" in done.stderr) == (1, True)
    environment.link(EXTRAS["cli"])
    for command in ([environment.bin / "statelog"], [python, "-m", "statelog"]):
        done = subprocess.run([*command, "ls", tmp_path], capture_output=True, text=True, check=False)
        assert (done.returncode, "holds no state" in done.stderr) == (1, True)


def test_an_older_python_is_told_so_and_nothing_else(distributions: Path) -> None:
    """pip before 24.2 resolves what is required before it looks at the Python that is: so nothing may be required."""
    [wheel] = distributions.glob("*.whl")
    [archive] = distributions.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as files, tarfile.open(archive) as source:
        [of_wheel] = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        [of_source] = [name for name in source.getnames() if name.endswith("/PKG-INFO")]
        packed = source.extractfile(of_source)
        assert packed is not None
        texts = [files.read(of_wheel).decode(), packed.read().decode()]
    for text in texts:
        metadata = HeaderParser().parsestr(text)
        assert metadata["Requires-Python"] == ">=3.11"
        requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
        needed = {python: _needed(requirements, python) for python in ("3.10", "3.11", "3.14")}
        assert needed["3.10"] == set()
        assert needed["3.11"] == needed["3.14"] >= {"numpy", "obstore", "pyspark"}


def _needed(requirements: list[Requirement], python: str) -> set[str]:
    """What a Python needs, with the extra for Spark."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": "spark"}
    return {one.name for one in requirements if one.marker is None or one.marker.evaluate(environment)}


def test_every_development_dependency_is_pinned() -> None:
    groups = PROJECT["dependency-groups"]
    for group in ("dev", "mutate", "release"):
        assert {name_of(requirement) for requirement in _members(groups, group)} <= pinned(f"{group}.txt").keys()
    declared = [*PROJECT["project"]["dependencies"], *itertools.chain.from_iterable(EXTRAS.values())]
    assert {name_of(requirement) for requirement in declared} <= pinned("dev.txt").keys()


def test_groups_that_are_installed_together_pin_the_same_versions() -> None:
    for file in ("mutate.txt", "release.txt"):
        pins = pinned("dev.txt")
        assert not [name for name, version in pinned(file).items() if pins.get(name, version) != version]


def _members(groups: dict[str, list[str | dict[str, str]]], name: str) -> Iterator[str]:
    for member in groups[name]:
        if isinstance(member, str):
            yield member
        else:
            yield from _members(groups, member["include-group"])


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
