"""Compares the interpreters and packages of driver and Python workers."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from statelog.tools.doctor.finding import DRIVER, Finding, Place

UNKNOWN: Final = "unknown"
"""The version of a package that is installed but does not report its version."""

_OWN: Final = "statelog"
_SPARK: Final = "pyspark"
_NEEDED: Final = ("lazy-loader", "msgspec", "numpy", "obstore", "pandas", "pyarrow", "xxhash")
_EXTRAS: Final = {"rocksdict": "Options(table='rocksdb')"}
PACKAGES: Final = (_OWN, _SPARK, *_NEEDED, *_EXTRAS)

_LOWEST_SPARK: Final = (4, 0)
_HIGHEST_SPARK: Final = (4, 3)
_NUMBERS: Final = re.compile(r"\d+(?:\.\d+)*")
_BOUND: Final = re.compile(r"(>=|<)\s*([\d.]+)")
_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9_.-]+)\s*([^;]*)")
_SAME_PACKAGES: Final = "Install the same versions for the driver's interpreter and for that of the Python workers."


@dataclass(frozen=True)
class Installed:
    """The interpreter of a process, and its packages."""

    host: str
    python: str
    executable: str
    versions: Mapping[str, str]
    """Of :data:`PACKAGES`; empty for one that is missing."""


def teller(packages: Sequence[str] = PACKAGES) -> Callable[[], dict[str, Any]]:
    """Make a function that returns the fields of :class:`Installed` of the process that calls it.

    cloudpickle pickles it by value, so it also runs where statelog cannot be imported.
    """

    def tell() -> dict[str, Any]:
        import importlib
        import importlib.metadata
        import importlib.util
        import platform
        import socket
        import sys

        versions = {}
        for package in packages:
            module = package.replace("-", "_")
            try:
                there = importlib.util.find_spec(module) is not None
                versions[package] = importlib.metadata.version(package) if there else ""
            except Exception:
                try:  # a package without metadata, for example in a zip file
                    versions[package] = str(importlib.import_module(module).__version__)
                except ImportError:
                    versions[package] = ""
                except Exception:
                    versions[package] = "unknown"
        return {
            "host": socket.gethostname(),
            "python": platform.python_version(),
            "executable": sys.executable,
            "versions": versions,
        }

    return tell


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without what a platform or a pre-release adds; empty if there are none."""
    found = _NUMBERS.match(version)
    return tuple(map(int, found[0].split("."))) if found else ()


def requirements() -> dict[str, str]:
    """The versions that statelog declares, such as ``>=2.2,<3``, by package; empty if statelog was not installed."""
    try:
        declared = importlib.metadata.requires(_OWN) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = (_REQUIREMENT.match(line) for line in declared)
    return {one[1].lower(): one[2].strip() for one in found if one}


def spark_findings(spark: str, pyspark: str, place: Place) -> Iterator[Finding]:
    """Whether Spark's version is supported, and that of the driver's PySpark."""
    own, python = release(spark)[:3], release(pyspark)[:3]
    if own < _LOWEST_SPARK:
        yield place.error("spark", f"Spark is {spark}.", "statelog needs Spark 4.0 or later.")
    elif own[:2] > _HIGHEST_SPARK:
        yield place.warning(
            "spark", f"Spark is {spark}; statelog is tested up to 4.3.", "Test the query before you rely on it."
        )
    elif own != python:
        told = f"Spark is {spark}, and PySpark is {pyspark}."
        remedy = "Use the PySpark that comes with Spark: pip install statelog without the extra 'spark' there."
        yield (place.error if own[:2] != python[:2] else place.warning)("spark", told, remedy)
    else:
        yield place.ok("spark", f"Spark is {spark}.")


def package_findings(
    own: Installed,
    place: Place,
    driver: Installed | None = None,
    needs: Mapping[str, str] | None = None,
    table: str = "runs",
) -> Iterator[Finding]:
    """Whether a process has the packages that it needs, in the driver's versions; `driver` is None for the driver.

    `needs` are the declared :func:`requirements`, and `table` is the option of that name.
    """
    problems = [*_missing(own, place, driver, table), *_out_of_range(own, place, needs or {})]
    if driver is not None:
        problems += _different(own, place, driver)
    yield from problems
    if not problems:
        there = ", ".join(f"{name} {version}" for name, version in own.versions.items() if version)
        yield place.ok("packages", f"Python {own.python} ({own.executable}): {there}")


def _missing(own: Installed, place: Place, driver: Installed | None, table: str) -> Iterator[Finding]:
    # If statelog or PySpark is missing, another check has a finding.
    missing = [name for name in _NEEDED if not own.versions.get(name)]
    if missing:
        yield place.error(
            "packages",
            f"{own.executable} lacks {', '.join(missing)}.",
            f"Install statelog with its dependencies for {own.executable}: pip install statelog.",
        )
    for name, user in _EXTRAS.items():
        is_used = name == "rocksdict" and table == "rocksdb"
        if not own.versions.get(name) and (is_used or (driver is not None and driver.versions.get(name))):
            told = f"{own.executable} lacks {name}, which {user} needs."
            remedy = f"Install {name} for it, or do not use {user}."
            yield (place.error if is_used else place.warning)("packages", told, remedy)


def _out_of_range(own: Installed, place: Place, needs: Mapping[str, str]) -> Iterator[Finding]:
    for name, version in own.versions.items():
        numbers = release(version)
        if name == _SPARK or not numbers:
            continue
        bounds = _BOUND.findall(needs.get(name, ""))
        if any((numbers >= release(bound)) != (sign == ">=") for sign, bound in bounds):
            yield place.warning(
                "packages",
                f"{name} is {version}; statelog supports {name}{needs[name]}.",
                f"Install a version in this range for {own.executable}: pip install '{name}{needs[name]}'.",
            )


def _different(own: Installed, place: Place, driver: Installed) -> Iterator[Finding]:
    if release(own.python)[:2] != release(driver.python)[:2]:
        yield place.error(
            "python",
            f"{own.executable} is Python {own.python}, but the {DRIVER} runs Python {driver.python}.",
            "Run the same minor version on both sides: set PYSPARK_PYTHON (or spark.pyspark.python), or the image.",
        )
    differing = {
        name: f"{name} {version} (driver: {driver.versions.get(name) or 'missing'})"
        for name, version in own.versions.items()
        if version and name not in _EXTRAS and version != driver.versions.get(name)
    }
    # The messages between tasks and driver belong to one version of statelog, and PySpark's messages to one of Spark.
    fatal = {_OWN} & differing.keys()
    if release(own.versions.get(_SPARK, ""))[:2] != release(driver.versions.get(_SPARK, ""))[:2]:
        fatal |= {_SPARK} & differing.keys()
    if UNKNOWN in (own.versions.get(_OWN), driver.versions.get(_OWN)):
        fatal -= {_OWN}
    if fatal:
        yield place.error("packages", ", ".join(differing[name] for name in sorted(fatal)), _SAME_PACKAGES)
    rest = [text for name, text in differing.items() if name not in fatal]
    if rest:
        yield place.warning("packages", ", ".join(rest), _SAME_PACKAGES)
