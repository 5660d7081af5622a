"""A driver program in a time zone of its own: timestamps as keys, in states, and in the output."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import statelog
from tests.spark.jobs.ledger import note_jvm, run_main
from tests.spark.support import Job, make_session


class FirstSeen(StatefulProcessor):
    """Returns the key, the time of the key's first row as kept in the state, and that of the batch's last row."""

    def init(self, handle: Any) -> None:
        self._first = handle.getValueState("first", "at timestamp")
        self._days = handle.getMapState("days", "at timestamp", "at timestamp")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        times = sorted(row.at for row in rows)
        if not self._first.exists():
            self._first.update((times[0],))
        self._days.updateValue((times[0],), (times[-1],))
        pairs = {entry[0]: value[0] for entry, value in self._days.iterator()}
        yield Row(key=key[0], first=self._first.get()[0], last=times[-1], kept=pairs[times[0]])

    def close(self) -> None:
        pass


def main(arguments: dict[str, Any]) -> None:
    """Run the query over all input that is there; all times go out as seconds since the Unix epoch."""
    session = make_session()
    note_jvm(session, arguments)
    job = Job(Path(arguments["root"]))
    rows = job.read(session, "hour timestamp, at timestamp")
    df = statelog.key_by(rows, "hour").transformWithState(
        FirstSeen(), "key timestamp, first timestamp, last timestamp, kept timestamp", "update", "None"
    )
    job.run(df.selectExpr("unix_seconds(key)", "unix_seconds(first)", "unix_seconds(last)", "unix_seconds(kept)"))
    assert datetime.datetime.fromtimestamp(0).hour != 0, "the zone is not set"


if __name__ == "__main__":
    run_main(main)
