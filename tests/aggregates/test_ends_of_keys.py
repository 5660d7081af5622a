"""When a key is complete: a time after its last row, by the clock of the TTL."""

from __future__ import annotations

import datetime

import statelog
from statelog import Watermark
from statelog.testing import Harness
from tests.model.aggregates_model_support import INPUT, planned


def test_a_ttl_in_processing_time_does_not_count_from_the_event_time_of_rows() -> None:
    plan = planned(["user"], output_mode="append", ttl=10, aggregates={"rows": statelog.Count()})
    later = datetime.datetime.fromtimestamp(1000, datetime.UTC)
    with Harness(
        plan.operator,
        input=INPUT,
        output=plan.output,
        keys=["user"],
        timeMode=plan.time_mode,
        watermark=Watermark("time"),
    ) as query:
        assert query.push([("a", later, 1, 0.5)], 0) == []
        assert query.advanceProcessingTime(9) == []
        assert query.advanceProcessingTime(10) == [("a", 1)]
