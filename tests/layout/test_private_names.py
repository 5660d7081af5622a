"""Tests pass values in: they replace no private name of statelog or its benchmarks, and reach for none from outside."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SOURCES = [TESTS.parent / "src" / "statelog", TESTS.parent / "benchmarks"]

_BY_NAME = {"setattr", "delattr", "getattr", "hasattr", "object"}
"""Functions that take a name as text; the last is that of unittest.mock.patch."""
_OWN = {"self", "cls", "super()"}


def test_tests_use_no_private_names() -> None:
    private = {name for source in SOURCES for path in source.rglob("*.py") for name in _defined(ast.parse(_text(path)))}
    assert len(private) > 1000
    used = {path.relative_to(TESTS).as_posix(): set(_used(ast.parse(_text(path)), private)) for path in _test_files()}
    assert not {file: names for file, names in used.items() if names}


@pytest.mark.parametrize(
    "use",
    [
        "table._rows",
        "table.folder._rows = 1",
        "open_table(folder)._rows()",
        "monkeypatch.setattr(RocksTable, '_rows', 1)",
        "monkeypatch.setattr('statelog.tables.rocksdb._rows', 1)",
        "patch.object(RocksTable, '_rows')",
        "from statelog.tables.rocksdb import RocksTable, _rows",
        "def die(self):\n    self._rows",
        "SCRIPT = '''\nimport statelog\ntable._rows = 1\n'''",
    ],
)
def test_every_way_to_a_private_name_is_found(use: str) -> None:
    assert set(_used(ast.parse(use), {"_rows"})) == {"_rows"}


@pytest.mark.parametrize(
    "use",
    [
        "class Own:\n    def rows(self):\n        return self._rows",
        "class Own(Table):\n    def rows(self):\n        return super()._rows()",
        "class Own:\n    def rows(self):\n        return getattr(self, '_rows')",
        "spark._jvm",
        "_rows = 1",
    ],
)
def test_own_names_and_those_of_others_may_be_private(use: str) -> None:
    assert set(_used(ast.parse(use), {"_rows"})) == set()


def _test_files() -> Iterator[Path]:
    return (path for path in TESTS.rglob("*.py") if path != Path(__file__))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _defined(module: ast.Module) -> Iterator[str]:
    """The private names that a module gives to something."""
    for node in ast.walk(module):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                pass
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                pass
            case _:
                continue
        if name.startswith("_") and name.strip("_") and not name.endswith("__"):
            yield name


def _used(node: ast.AST, private: set[str], own: frozenset[str] = frozenset()) -> Iterator[str]:
    """The private names that code uses of objects other than those of `own` names: those of the class around it."""
    match node:
        case ast.ClassDef():
            own = frozenset(_OWN)
        case ast.Attribute(value=value, attr=name) if name in private and ast.unparse(value) not in own:
            yield name
        case ast.ImportFrom(names=aliases):
            yield from (alias.name for alias in aliases if alias.name in private)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[first, *_]) if name in _BY_NAME:
            if ast.unparse(first) not in own:
                texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
                yield from private.intersection(str(text).rpartition(".")[2] for text in texts)
        case ast.Constant(value=str(text)) if "import statelog" in text or "from statelog" in text:
            yield from _used(_script(text), private)
    for child in ast.iter_child_nodes(node):
        yield from _used(child, private, own)


def _script(text: str) -> ast.Module:
    """The code of a child process; nothing if the text is no code."""
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])
