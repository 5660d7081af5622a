"""The state of Spark's applyInPandasWithState continues in a query of statelog, as its page says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

import statelog
from tests.docs.page import BLOCK, REPOSITORY

PAGE = (REPOSITORY / "docs" / "coming-from-pandas-state.md").read_text()
TIMEOUT_MS = 3_600_000


def count(key: Any, frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    clicks = state.getOption[0] if state.getOption else 0
    state.update((clicks + sum(len(frame) for frame in frames),))
    state.setTimeoutDuration(TIMEOUT_MS)
    yield from ()


def test_state_and_timeouts_are_brought_along(spark: SparkSession, tmp_path: Path) -> None:
    read = spark.readStream.schema("user string")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "1.json").write_text('{"user": "ann"}\n{"user": "ann"}\n{"user": "bob"}')
    spark_counts = read.json(str(tmp_path / "old")).groupBy("user")
    run(
        spark_counts.applyInPandasWithState(
            count, "user string, clicks long", "n long", "append", GroupStateTimeout.ProcessingTimeTimeout
        ),
        tmp_path / "spark",
    )

    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "1.json").write_text('{"user": "ann"}')
    names: dict[str, Any] = {
        "spark": spark,
        "statelog": statelog,
        "clicks": read.json(str(tmp_path / "new")),
        "__name__": "__main__",
    }
    [processor] = BLOCK.findall(PAGE)
    [block] = re.findall(r"^```python no-run\n(old = .+?)^```", PAGE, re.MULTILINE | re.DOTALL)
    exec(processor, names)
    exec(block.replace("/data/checkpoints/clicks", str(tmp_path / "spark")), names)
    run(names["counts"], tmp_path / "statelog")

    counts = statelog.read_state(tmp_path / "statelog", state="clicks").read_all()
    assert dict(zip(*counts.select(["key_user", "value_n"]).to_pydict().values(), strict=True)) == {"ann": 3, "bob": 1}
    timers = statelog.read_state(tmp_path / "statelog", state="timers").read_all()
    times = dict(zip(*timers.select(["key_user", "time_ms"]).to_pydict().values(), strict=True))
    timeouts = {row.key_user: row.time_ms for row in names["tables"]["$timers"].collect()}
    assert times["bob"] == timeouts["bob"]
    assert times["ann"] < timeouts["ann"], "ann's row has replaced the timeout of an hour by a timer of ten seconds"


def run(counts: DataFrame, checkpoint: Path) -> None:
    query = counts.writeStream.format("noop").outputMode("append").option("checkpointLocation", str(checkpoint))
    query.trigger(once=True).start().awaitTermination()
