"""The names of PySpark that statelog uses: none newer than Spark 4.0, but for a few; and the lowest Spark is tested."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pyspark

from tests.layout import spark_names

REPOSITORY = Path(__file__).parents[2]

NEWER = {
    "builder": "older, but not defined by a statement before 4.1",
    "TimeType": "4.1; newer_types has a substitute",
    "SupportsTriggerAvailableNow": "4.2; newer_streaming has a substitute",
    "ReadMaxBytes": "4.2; as above",
    "sql.streaming.datasource": "4.2; as above",
}
"""The version that a name came with. Any other newer name needs a fallback for older Sparks before it comes here."""

NOT_SPARKS = {"builder", "changes", "instance", "to_pandas"}
"""Attributes of other objects, whose names newer versions of PySpark use as well. Spark 4.0 assigns ``builder``."""


def test_no_more_names_are_newer_than_spark_4_0() -> None:
    """Names are compared without what they belong to; parameters and calls into the JVM are not seen."""
    newer = spark_names.names(Path(pyspark.__file__).parent) - set(spark_names.FILE.read_text().split())
    used = {name for path in (REPOSITORY / "src").rglob("*.py") for name in _used(path)}
    assert used & newer == {*NEWER, *NOT_SPARKS}


def _used(path: Path) -> Iterator[str]:
    """The names that a module imports from PySpark, and all attributes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Import):
            yield from (name[len("pyspark.") :] for alias in node.names if (name := alias.name).startswith("pyspark."))
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("pyspark."):
            yield str(node.module).removeprefix("pyspark.")
            yield from (alias.name for alias in node.names)


def test_the_lowest_spark_is_tested() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    [requirement] = project["optional-dependencies"]["spark"]
    lowest = requirement.removeprefix("pyspark>=").partition(";")[0]
    assert f"\npyspark=={lowest}." in (REPOSITORY / "requirements" / f"spark-{lowest}.txt").read_text()
    assert f"run_on_spark {lowest} " in (REPOSITORY / "dev").read_text()
