"""The site has every page, every public name and every kind of error; its pictures are what their program draws."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

import statelog
from statelog.errors import ErrorKind, StatelogError
from tests.docs.page import REPOSITORY
from tests.layout.public_names import MODULES

DOCS = REPOSITORY / "docs"
LISTS = (DOCS / "index.md", DOCS / "design" / "README.md")


def load(name: str) -> ModuleType:
    """A program of the docs' folder, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation_once() -> None:
    conf = load("conf")
    listed = Counter(
        (page.parent / entry).resolve()
        for page in LISTS
        for entry in re.findall(r"<(.+)>$", conf.navigation(page.read_text()), re.MULTILINE)
    )
    pages = [*DOCS.rglob("*.md"), *DOCS.rglob("*.rst"), REPOSITORY / "benchmarks" / "README.md"]
    pages += [REPOSITORY / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")]
    assert listed == Counter(page.with_suffix("") for page in pages if page != LISTS[0])


def test_navigation_has_a_part_for_each_heading_with_links() -> None:
    page = """# Site

- [One](one.md): text

## Part

- [Two](api/two.rst)
- [Three](../three.md)

## No list
"""
    assert load("conf").navigation(page) == (
        "```{toctree}\n:hidden:\n\nOne <one>\n```\n\n"
        "```{toctree}\n:hidden:\n:caption: Part\n\nTwo <api/two>\nThree <../three>\n```\n"
    )


def test_links_to_packages_lead_to_their_first_files() -> None:
    page = (
        "[a](../examples/sinks), [`b`](../examples/sinks/files.py#x), [c](sinks.md), [d](design), [e](https://e.org/a)"
    )
    assert load("conf").with_files_of_packages(page, DOCS) == page.replace(
        "(../examples/sinks)", "(../examples/sinks/__init__.py)"
    )


def test_the_reference_has_every_public_name_once() -> None:
    entry = re.compile(r"^\.\. auto(?:class|function):: (?:statelog\.)?(\S+)", re.MULTILINE)
    named = Counter(name for page in (DOCS / "api").glob("*.rst") for name in entry.findall(page.read_text()))
    public = [
        f"{module}.{name}".removeprefix("statelog.")
        for module in MODULES
        for name in importlib.import_module(module).__all__
    ]
    assert named == Counter(public)


def test_every_kind_of_error_is_explained_once() -> None:
    text = (DOCS / "errors.md").read_text()
    first, *parts = re.split(r"^## (?=\w+Error$)", text, flags=re.MULTILINE)
    classes = {cls.__name__ for cls in StatelogError.__subclasses__()}
    assert (
        {part.partition("\n")[0] for part in parts}
        == classes
        == set(re.findall(r"^\| `(\w+)` \|", first, re.MULTILINE))
    )
    kinds = [
        kind for part in parts for row in re.findall(r"^\| (`.+?) \|", part, re.MULTILINE) for kind in row.split(", ")
    ]
    assert Counter(kinds) == Counter(f"`{kind}`" for kind in ErrorKind)


@pytest.mark.parametrize("cls", StatelogError.__subclasses__(), ids=lambda cls: cls.__name__)
def test_the_kind_that_a_class_has_by_default_is_listed_under_it(cls: type[StatelogError]) -> None:
    part = (DOCS / "errors.md").read_text().partition(f"\n## {cls.__name__}\n")[2].partition("\n## ")[0]
    assert f"`{cls.default_kind}`" in part


def test_pictures_are_as_drawn() -> None:
    pictures = load("pictures")
    drawn = {f"{name}.svg": picture().svg() for name, picture in pictures.PICTURES.items()}
    held = {path.name: path.read_text() for path in pictures.FOLDER.glob("*.svg")}
    del held["speed.svg"]  # tests/benchmarks/test_published.py
    assert held == drawn, "run ./dev python docs/pictures.py"


def test_photographs_show_the_page_as_it_is() -> None:
    pytest.importorskip("selenium", reason="selenium is not installed")
    pictures = load("page_pictures")
    for photograph in pictures.PHOTOGRAPHS:
        path = DOCS / "pictures" / f"{photograph.name}.png"
        assert path.stat().st_size < 100_000
        with Image.open(path) as image:
            noted = image.info[pictures.NOTE]
        assert noted == pictures.look(), "run ./dev demo, then ./dev python docs/page_pictures.py"


def test_the_reference_is_of_modules_that_are_there() -> None:
    """Building the site, which finds more, takes packages that the other tests do without."""
    directive = re.compile(r"^\.\. (?:click|automodule):: ([\w.]+)", re.MULTILINE)
    named = {name for page in (DOCS / "api").glob("*.rst") for name in directive.findall(page.read_text())}
    assert "statelog.tools.cli.main" in named
    for name in named:
        importlib.import_module(name)


@pytest.mark.extended
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    python = Path(sys.prefix, "site/bin/python")
    if not python.exists():
        pytest.skip("./dev docs installs what the site needs")
    built = subprocess.run(
        [
            python,
            "-m",
            "sphinx",
            "-W",
            "--keep-going",
            "-c",
            "docs",
            "-d",
            tmp_path / "read",
            ".",
            tmp_path / "site",
        ],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "site/docs/api/queries.html").read_text()
    assert 'id="statelog.key_by"' in reference
    assert statelog.key_by.__doc__ is not None
    assert statelog.key_by.__doc__.splitlines()[0].partition(",")[0] in reference
