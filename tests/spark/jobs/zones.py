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
    """Returns times that it got as key, from rows, and from its states."""

    def init(self, handle: Any) -> None:
        self._first = handle.getValueState("first", "at timestamp")
        self._seen = handle.getMapState("seen", "at timestamp", "at timestamp")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        times = sorted(row.at for row in rows)
        if not self._first.exists():
            self._first.update((times[0],))
        for at in times:
            self._seen.updateValue((at,), (at,))
        yield Row(
            key=key[0],
            last=times[-1],
            first=self._first.get()[0],
            latest=max(entry[0] for entry, _ in self._seen.iterator()),
            # Spark gives times of rows and keys with a zone, those of states as local time without one.
            is_like_spark=all(at.tzinfo for at in (key[0], *times)) and self._first.get()[0].tzinfo is None,
        )

    def close(self) -> None:
        pass


def main(arguments: dict[str, Any]) -> None:
    """Run the query over all input that is there; all times go out as seconds since the Unix epoch."""
    assert datetime.datetime.fromtimestamp(0).hour != 0, "the time zone is not set"
    session = make_session()
    note_jvm(session, arguments)
    job = Job(Path(arguments["root"]))
    rows = job.read(session, "hour timestamp, at timestamp")
    output = "key timestamp, last timestamp, first timestamp, latest timestamp, is_like_spark boolean"
    df = statelog.key_by(rows, "hour").transformWithState(FirstSeen(), output, "update", "None")
    seconds = [f"unix_seconds({name})" for name in ("key", "last", "first", "latest")]
    job.run(df.selectExpr(*seconds, "is_like_spark"))


if __name__ == "__main__":
    run_main(main)
