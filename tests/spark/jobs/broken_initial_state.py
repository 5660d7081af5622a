"""A driver program whose query has an initial state that cannot be computed, and whose tasks have several attempts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.spark.initial_state_support import Query
from tests.spark.jobs.ledger import note_jvm, run_main
from tests.spark.support import make_session


def main(arguments: dict[str, Any]) -> None:
    """Run the query, which fails."""
    session = make_session("local[2,4]")
    note_jvm(session, arguments)
    query = Query(session, Path(arguments["root"]))
    query.add(a=1)
    query.run(session.range(1).selectExpr("'a' AS k", "raise_error('no such table') AS start"))


if __name__ == "__main__":
    run_main(main)
