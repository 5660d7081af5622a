"""A query that is started again with another schema of its state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

import statelog
from statelog import Options
from statelog.options import TABLES, Tuning
from tests.spark.support import Answer, Job

pytestmark = pytest.mark.spark


class Profile(StatefulProcessor):
    """Returns what the state held before the batch, and writes what the rows say of its fields."""

    def __init__(self, schema: str) -> None:
        self._schema = schema
        self._names = [field.split()[0] for field in schema.split(", ")]

    def init(self, handle: Any) -> None:
        self._profile = handle.getValueState("profile", self._schema)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        before = self._profile.get() or (None,) * len(self._names)
        for row in rows:
            self._profile.update(tuple(row[name] for name in self._names))
        yield Row(user=key[0], before=json.dumps(dict(zip(self._names, before, strict=True))))

    def close(self) -> None:
        pass


@pytest.mark.parametrize("table", TABLES)
def test_a_state_may_change_its_fields(spark: SparkSession, tmp_path: Path, table: str) -> None:
    job = Job(tmp_path)

    def plan(schema: str) -> DataFrame:
        rows = job.read(spark, "user string, count long, name string, score double")
        return statelog.key_by(
            rows, "user", parallelism=2, options=Options(table=table, tuning=Tuning(merge_fan_in=2))
        ).transformWithState(Profile(schema), "user string, before string", "update", "None")

    def run(schema: str, **row: Any) -> Answer:
        job.add(
            [[{"user": "both", **row}, {"user": f"only in {len(job.results()) if job.output.exists() else 0}", **row}]]
        )
        job.run(plan(schema))
        answer = max(job.results().items())[1]
        return [[user, json.loads(before)] for user, before in answer if user == "both"]

    run("count int", count=1)
    assert run("count long, name string", count=2**40, name="ann") == [["both", {"count": 1, "name": None}]]
    assert run("name string, count long", name="bob", count=3) == [["both", {"name": "ann", "count": 2**40}]]
    assert run("name string, score double", name="cid", score=0.5) == [["both", {"name": "bob", "score": None}]]

    job.add([[{"user": user, "count": 0, "name": "x"} for user in ("both", *(f"only in {n}" for n in range(4)))]])
    for schema, message in {
        "name int": "field 'name' of value state 'profile' is string in the location, but the processor declares int32",
        "count int": "field 'count' of value state 'profile' is int64 in the location",
    }.items():
        failure = job.fail(plan(schema))
        assert message in failure
        assert "declare a field with another name" in failure

    job.run(plan("count double, name string"))
    assert [[user, json.loads(before)] for user, before in job.results()[4]] == [
        ["both", {"count": None, "name": "cid"}],
        ["only in 0", {"count": 1.0, "name": None}],
        ["only in 1", {"count": 2.0**40, "name": "ann"}],
        ["only in 2", {"count": 3.0, "name": "bob"}],
        ["only in 3", {"count": None, "name": "cid"}],
    ]
