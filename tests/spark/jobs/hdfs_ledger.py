"""A driver program: the ledger query with its checkpoint in HDFS, killed at a step of a batch if that is wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from statelog import Options
from tests.hdfs.queries import HdfsJob
from tests.spark.faults import KillAt
from tests.spark.jobs.ledger import note_jvm, run_main
from tests.spark.support import make_session


def main(arguments: dict[str, Any]) -> None:
    """Run the query over all input that is there."""
    session = make_session()
    note_jvm(session, arguments)
    job = HdfsJob.at(Path(arguments["root"]), arguments["folder"], arguments["spelled"])
    options = Options(observer=KillAt(**arguments["kill"])) if "kill" in arguments else Options()
    job.run(job.ledger(session, arguments["parallelism"], options))


if __name__ == "__main__":
    run_main(main)
