"""Where files are: tests in the folder of the package they test, and at the root only what belongs there."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TESTS = REPOSITORY / "tests"
SOURCE = REPOSITORY / "src" / "statelog"

ROOT = {
    *(".ci", ".gitattributes", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md"),
    *("benchmarks", "dev", "docs", "examples", "pyproject.toml", "requirements", "src", "tests"),
}

ACROSS = {
    *(
        "azure",
        "benchmarks",
        "cluster",
        "compat",
        "contract",
        "conversions",
        "core",
        "docs",
        "examples",
        "hdfs",
        "kafka",
    ),
    *("layout", "model", "mutation", "packaging", "s3", "s3a", "soak"),
}
"""Folders of tests that are not of one package; `core` is of the modules beside the packages."""


def test_only_what_belongs_there_is_at_the_root() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no checkout of git")
    names = listed.stdout.splitlines()
    assert {name.split("/")[0] for name in names} <= ROOT
    assert not [name for name in names if ":" in name]


def test_folders_of_tests_are_named_as_packages() -> None:
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    folders = {path.name for path in TESTS.iterdir() if (path / "__init__.py").exists()}
    assert folders <= packages | ACROSS


def test_no_test_module_is_imported_by_another() -> None:
    """What several share is in a module of its own."""
    found = []
    for path in TESTS.rglob("*.py"):
        if path == TESTS / "compat" / "make.py":
            continue  # it makes the files that the tests beside it describe
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests"):
                named = {node.module.split(".")[-1], *(alias.name for alias in node.names)}
                found += [f"{path.relative_to(TESTS)}: {name}" for name in named if name.startswith("test_")]
    assert not found
