"""Every package begins with a page, modules stay short, and names use the glossary's words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SOURCE = REPOSITORY / "src" / "statelog"
PACKAGES = sorted(path.parent for path in SOURCE.rglob("__init__.py") if path.parent != SOURCE)
MODULES = sorted(SOURCE.rglob("*.py"))

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]

MOST_LINES = 500
PAGE_LINES, PART_LINES = range(15, 31), range(8, 31)
"""Of a package's page, and of the page of a package within one."""

GIVEN_UP = {
    "cover": "base map",
    "edge": "local run",
    "founding": "initial checkpoint",
    "form": "codec",
    "forms": "codecs",
    "leftover": "orphan",
    "leftovers": "orphans",
    "orders": "materialization policy",
    "origin": "genesis",
    "piece": "base range",
    "taken": "accepted",
    "upkeep": "maintenance",
}
"""Words that no name uses any more, and the glossary's words for them."""


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_a_package_begins_with_a_page(package: Path) -> None:
    page = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    assert len(page.splitlines()) in (PAGE_LINES if package.parent == SOURCE else PART_LINES)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_modules_that_the_page_of_a_package_names_exist(package: Path) -> None:
    """Names in single backticks: of the package, of other packages, and of the core modules."""
    page = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    names = re.findall(r"(?<![`:])`([a-z_0-9.]+)`(?!`)", page)
    places = {name: [folder.joinpath(*name.split(".")) for folder in (SOURCE, package)] for name in names}
    assert not [
        name
        for name, paths in places.items()
        if not any(path.with_suffix(".py").exists() or path.is_dir() for path in paths)
    ]


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_a_module_has_one_job(module: Path) -> None:
    assert len(module.read_text().splitlines()) <= MOST_LINES


def test_names_of_modules_and_classes_are_not_of_words_given_up() -> None:
    found = [f"{name}: say {GIVEN_UP[word]}" for name in _names() for word in _words(name) if word in GIVEN_UP]
    assert not found


def test_the_glossary_explains_no_word_that_is_given_up() -> None:
    rows = re.findall(r"^\| ([a-z, ]+) \|", (REPOSITORY / "docs" / "glossary.md").read_text(), re.MULTILINE)
    words = {word for row in rows for word in row.split(", ")} - {"word"}
    assert len(words) >= 25
    assert not words & GIVEN_UP.keys()


def test_no_package_has_the_name_of_a_public_function() -> None:
    """Whoever imports ``statelog`` could not reach the package."""
    tree = ast.parse((SOURCE / "__init__.pyi").read_text())
    imported = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert not imported & {path.stem for path in SOURCE.iterdir()}


def _names() -> Iterator[str]:
    for module in MODULES:
        yield module.stem
        yield from (node.name for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.ClassDef))


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+", name)]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)`", page.read_text())
    assert not [name for name in named if not (SOURCE / name).exists() and not (REPOSITORY / name).exists()]
