"""The lists: which tests concern which file, and the mutants that no test can kill."""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

LIST = Path(__file__).with_name("survivors.toml")
_TABLE = Path(__file__).with_name("tests.toml")


def files_with_tests(repository: Path) -> dict[str, list[str]]:
    """The files that are mutated, each with its tests."""
    table = tomllib.loads(_TABLE.read_text())
    packages, files = table["packages"], table["files"]
    modules = {f"{package}/{path.name}" for package in packages for path in (repository / package).glob("[!_]*.py")}
    chosen = sorted({*modules, *files})
    return {file: files[file] if file in files else packages[file.rpartition("/")[0]] for file in chosen}


@dataclass(frozen=True)
class Mutant:
    """One mutation: where it is, and the changed lines before and after it, without line breaks.

    The number of the line is only for reading: an edit elsewhere does not make it another mutant.
    """

    file: str
    function: str
    before: str
    after: str
    line: int = field(default=0, compare=False)

    def as_toml(self) -> str:
        """The entry for the list, to be completed by its reason."""
        return "\n".join(
            [
                "[[survivor]]",
                f"file = {_quoted(self.file)}",
                f"function = {_quoted(self.function)}",
                f"before = {_quoted(self.before)}",
                f"after = {_quoted(self.after)}",
                'why = ""',
            ]
        )


def explained(path: Path = LIST) -> dict[Mutant, str]:
    """Every listed mutant with its reason; an entry may list several mutants of a line (`after` is a list)."""
    found = {}
    for entry in tomllib.loads(path.read_text())["survivor"]:
        after = entry["after"]
        for one in after if isinstance(after, list) else [after]:
            found[Mutant(entry["file"], entry["function"], entry["before"], one)] = entry["why"]
    return found


def function_at(source: str, line: int) -> str:
    """The qualified name of the innermost function or class around a line; empty in a module's own code."""
    name: list[str] = []
    body: list[ast.stmt] = ast.parse(source).body
    while True:
        inner = next(
            (
                node
                for node in body
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0)
            ),
            None,
        )
        if inner is None:
            return ".".join(name)
        name.append(inner.name)
        body = inner.body


def is_in_function(source: str, line: int) -> bool:
    """Whether a line is in the body of a function, which runs only when it is called."""
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    return any(node.body[0].lineno <= line <= (node.end_lineno or 0) for node in functions)


def _quoted(text: str) -> str:
    if "'" not in text:
        return f"'{text}'"
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
