"""Records the output of Spark's own operator in every scenario: ``./dev python -m tests.spark.dropin.record``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.spark.dropin.same_as_spark_support import RECORDED, ROCKSDB, SCENARIOS, digests
from tests.spark.dropin.scenarios import SPARK, run_on, settings
from tests.spark.support import make_session


def main() -> None:
    session = make_session()
    recorded: dict[str, dict[str, str]] = {}
    with settings(session, {"spark.sql.streaming.stateStore.providerClass": ROCKSDB}):
        for name, make in SCENARIOS.items():
            with tempfile.TemporaryDirectory() as directory:
                [found], _ = run_on([SPARK], session, make(), Path(directory))
            recorded[name] = digests(found)
            print(f"{name}: {len(found)} batches", flush=True)
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
