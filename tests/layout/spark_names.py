"""The names of PySpark's API, out of its source text; the file holds those of 4.0, the oldest version with this API.

It is made from the unpacked source distribution:
``./dev python -m tests.layout.spark_names pyspark-4.0.5/pyspark > tests/layout/spark-4.0.txt``.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

FILE = Path(__file__).with_name("spark-4.0.txt")

_PARTS = ("*.py", "core/**/*.py", "errors/**/*.py", "sql/**/*.py")
_OTHER_APIS = {"connect", "tests", "worker"}


def names(package: Path) -> set[str]:
    """The public names of all modules below ``pyspark``, and of their functions, classes and methods: all bare."""
    found = set()
    for path in {path for part in _PARTS for path in package.glob(part)}:
        module = path.relative_to(package).with_suffix("").parts
        if not _OTHER_APIS & set(module):
            found.add(".".join(part for part in module if part != "__init__"))
            found.update(_defined(ast.parse(path.read_text())))
    return {name for name in found if not name.startswith("_")}


def _defined(where: ast.Module | ast.ClassDef) -> Iterator[str]:
    for node in where.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from _defined(node)


if __name__ == "__main__":
    print(textwrap.fill(" ".join(sorted(names(Path(sys.argv[1])))), 120, break_on_hyphens=False))
