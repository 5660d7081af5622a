"""The streaming job: what has each aircraft done so far?

Start it again after a crash, with any parallelism: it continues where it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import click
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

import statelog
from examples.flights.data import FLIGHT_SCHEMA
from examples.flights.telemetry import BatchListener, Telemetry

ON_TIME_MINUTES = 15
ROUTES_KEPT = 10
HISTORY_SCHEMA = (
    "tailnum string, flights long, minutes_late long, longest_streak long,"
    " departures map<string, long>, last_routes array<string>"
)

by_schedule = attrgetter("scheduled", "carrier", "flight", "origin")


class AircraftHistory(StatefulProcessor):
    """Keeps the history of each aircraft, and emits it whenever it changes.

    A flight is on time if it arrives at most 15 minutes late. One that is cancelled (no departure delay) or
    diverted (no arrival delay) is not on time and has no delay; one that is cancelled is not a departure either.
    """

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.totals = handle.getValueState("totals", "flights long, late long, streak long, longest long")
        self.departures = handle.getMapState("departures", "airport string", "departures long")
        self.routes = handle.getListState("routes", "route string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        flights, late, streak, longest = self.totals.get() or (0, 0, 0, 0)
        departed = []
        for flight in sorted(rows, key=by_schedule):
            is_on_time = flight.arr_delay is not None and flight.arr_delay <= ON_TIME_MINUTES
            flights += 1
            late += max(flight.arr_delay or 0, 0)
            streak = streak + 1 if is_on_time else 0
            longest = max(longest, streak)
            if flight.dep_delay is not None:
                departed.append(flight)
        self.totals.update((flights, late, streak, longest))

        for airport, count in Counter(flight.origin for flight in departed).items():
            (before,) = self.departures.getValue((airport,)) or (0,)
            self.departures.updateValue((airport,), (before + count,))
        if departed:
            routes = [*self.routes.get(), *((f"{flight.origin}-{flight.dest}",) for flight in departed)]
            self.routes.put(routes[-ROUTES_KEPT:])

        yield Row(
            tailnum=key[0],
            flights=flights,
            minutes_late=late,
            longest_streak=longest,
            departures={airport: count for (airport,), (count,) in self.departures.iterator()},
            last_routes=[route for (route,) in self.routes.get()],
        )

    def close(self) -> None:
        pass


@click.command()
@click.option("--flights", required=True, help="Folder of the input files, read in order of their age.")
@click.option("--histories", required=True, help="Folder of the output files.")
@click.option("--checkpoint", required=True, help="Folder of the query's checkpoint; the state is in there too.")
@click.option("--telemetry", required=True, help="File that the demo follows the job in.")
@click.option("--parallelism", type=int, help="Number of subtasks; may differ at every start.")
@click.option("--files-per-batch", type=int, default=5)
def main(
    flights: str, histories: str, checkpoint: str, telemetry: str, parallelism: int | None, files_per_batch: int
) -> None:
    """Keep the history of every aircraft until all files are read."""
    # Three tasks at a time; each may fail three times, with a killed Python worker for example.
    spark = SparkSession.builder.master("local[3,4]").config("spark.ui.enabled", "false").getOrCreate()
    spark.streams.addListener(BatchListener(telemetry))

    stream = spark.readStream.schema(FLIGHT_SCHEMA).option("maxFilesPerTrigger", files_per_batch).parquet(flights)
    changed = statelog.key_by(
        stream, "tailnum", parallelism=parallelism, options=statelog.Options(observer=Telemetry(telemetry))
    ).transformWithState(AircraftHistory(), HISTORY_SCHEMA, outputMode="update", timeMode="None")

    def write(rows: DataFrame, batch: int) -> None:
        # A batch that is repeated after a crash replaces what it had written.
        rows.write.mode("overwrite").parquet(f"{histories}/batch={batch}")

    query = (
        changed.writeStream.foreachBatch(write)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
