"""Who may import whom: packages import only from packages below them, and Spark stays on the upper floors."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "statelog"

CORE = "core"
FLOORS = [
    {"testing", "tools"},
    {"streams"},
    {"queries"},
    {"spark"},
    {"reading"},
    {"joins"},
    {"windows"},
    {"aggregates"},
    {"convert", "tasks", "coordinator"},
    {"rpc"},
    {"operators"},
    {"tables"},
    {"local"},
    {"history"},
    {"log"},
    {"storage", "runs"},
    {CORE},
]
"""From top to bottom; packages of one floor do not import each other."""

MAY_NAME_SPARK_TYPES = {"aggregates", "convert", "joins", "windows", "testing"}
MAY_USE_A_SESSION = {"spark", "queries", "streams", "tools"}
SPARK_TYPES = {"pyspark.errors", "pyspark.sql.types", "pyspark.sql.streaming.stateful_processor"}

MODULES = {
    ".".join(("statelog", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in SOURCE.rglob("*.py")
}


def test_packages_import_only_from_below() -> None:
    floors = {package: floor for floor, packages in enumerate(FLOORS) for package in packages}
    upwards = [
        f"{module} imports {imported}"
        for module in MODULES
        if module not in {"statelog", "statelog.__main__"}
        for imported in _imported(module)
        if _package(imported) != _package(module) and floors[_package(imported)] <= floors[_package(module)]
    ]
    assert not upwards


def test_no_modules_import_each_other_in_a_circle() -> None:
    # `statelog` itself is every module's parent; it is imported only by who uses the public names.
    graph = {module: set(_imported(module)) - {module} for module in MODULES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("module", sorted(MODULES))
def test_only_upper_packages_know_spark(module: str) -> None:
    package = _package(module)
    if package in MAY_USE_A_SESSION:
        return
    allowed = SPARK_TYPES if package in MAY_NAME_SPARK_TYPES else set()
    assert {name for name in _names(module) if name.split(".")[0] == "pyspark"} <= allowed


@pytest.mark.parametrize(
    ("imported", "left_out"),
    [
        ("statelog", {"pyspark", "pyarrow", "pandas", "numpy"}),
        ("statelog.spark.source.clock_source", {"pandas", "statelog.streams", "statelog.coordinator.coordinator"}),
        ("statelog.spark.worker.specs", {"statelog.streams", "statelog.coordinator.coordinator"}),
        ("statelog.reading.read", {"pyspark", "pandas"}),
    ],
)
def test_processes_load_only_what_they_need(imported: str, left_out: set[str]) -> None:
    """Spark starts many Python processes, and each of them imports its part of statelog; readers need no Spark."""
    program = f"import sys, {imported}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert imported in loaded
    assert not left_out & set(loaded)


def _package(module: str) -> str:
    first = module.split(".")[1:2]
    return first[0] if first and (SOURCE / first[0]).is_dir() else CORE


def _names(module: str) -> Iterator[str]:
    """The modules that a module imports, inside functions too."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            assert node.module is not None
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = [name for name in inner if name in MODULES]
            yield from modules
            if len(modules) < len(inner):
                yield node.module


def _imported(module: str) -> Iterator[str]:
    return (name for name in _names(module) if name in MODULES)
