"""Spark's files in the checkpointLocation of a query that is made without Spark."""

from __future__ import annotations

import json

from statelog.storage import open_store
from tests.reading.story import Story


def write_spark_files(checkpoint: str, story: Story, committed: int) -> None:
    """Write the offsets of all batches of a query, and the commits of the first ones."""
    store = open_store(checkpoint)
    store.put("metadata", json.dumps({"id": story.engine.query_id}).encode())
    for batch in range(len(story.models)):
        time_ms = story.engine.times[batch].time_ms
        offsets = f'v1\n{{"batchTimestampMs":{time_ms},"batchWatermarkMs":0}}\n{batch}\n'
        store.put(f"offsets/{batch}", offsets.encode())
        if batch < committed:
            store.put(f"commits/{batch}", b'v1\n{"nextBatchWatermarkMs":0}')
