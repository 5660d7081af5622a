"""A driver program: the ledger query with its checkpoint in a store, perhaps killed or stalled at steps of batches."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import statelog
from statelog import Options
from tests.spark.faults import KillAt, KillAtMany, StallAt
from tests.spark.jobs.ledger import note_jvm, run_main
from tests.spark.store_jobs import StoreJob
from tests.spark.support import make_session


def main(arguments: dict[str, Any]) -> None:
    """Run the query over all input that is there."""
    session = make_session(settings=arguments.get("settings", {}))
    note_jvm(session, arguments)
    if arguments.get("uses_s3a"):
        logging.basicConfig(level=logging.DEBUG)
        logging.getLogger("py4j").setLevel(logging.INFO)  # below, it has all that PySpark says to the JVM
        statelog.use_s3a_settings(session)
    job = StoreJob.at(Path(arguments["root"]), arguments["folder"], arguments.get("spelled", ""))
    kills = KillAtMany(tuple(KillAt(**kill) for kill in arguments.get("kills", [])))
    observer = StallAt(**arguments["stall"]) if "stall" in arguments else kills
    df = job.ledger(session, arguments["parallelism"], Options(observer=observer))
    df.explain(extended=True)
    job.run(df)


if __name__ == "__main__":
    run_main(main)
