"""The command: harms a query on several hosts, and prints how long it takes until the query goes on."""

from __future__ import annotations

import argparse
import json
import random
import secrets
import signal
import sys
import time
from dataclasses import asdict

from tests.cluster.harms import HARMS
from tests.cluster.life import Life
from tests.cluster.spark_hosts import SparkHosts, missing_for_cluster
from tests.jars import KAFKA, missing_server

_LINE = "{:<28} {:>8} {:>12} {:>14} {:>7}  {}"


def main() -> int:
    """Run; return the exit code."""
    parser = argparse.ArgumentParser(prog="./dev cluster", description=__doc__)
    parser.add_argument("--harm", choices=list(HARMS), action="append", help="only this one; may be repeated")
    parser.add_argument("--minutes", type=float, default=0.0, help="go on with harms in random order for so long")
    parser.add_argument("--seed", type=int, default=None, help="of their order")
    parser.add_argument("--json", action="store_true", help="print a line of JSON per harm instead of a table")
    arguments = parser.parse_args()
    if missing := missing_for_cluster():
        print(f"no cluster: {missing}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # processes are ended then, too
    return run(arguments)


def run(arguments: argparse.Namespace) -> int:
    """Do all harms once, then some at random until the time is over; return the exit code."""
    seed = secrets.randbelow(1 << 32) if arguments.seed is None else arguments.seed
    rng = random.Random(seed)
    missing_kafka = missing_server(KAFKA)
    if missing_kafka:
        print(f"no Kafka ({missing_kafka}), so it is not harmed; ./dev kafka installs it", file=sys.stderr)
    chosen = [name for name in arguments.harm or HARMS if not (missing_kafka and HARMS[name].needs_kafka)]
    if not chosen:
        return 1
    names, failed = list(chosen), 0
    if not arguments.json:
        print(f"seed {seed}")
        print(_LINE.format("harm", "lasts s", "next batch s", "longest pause s", "starts", "errors"))
    started_s = time.monotonic()
    with SparkHosts() as cluster, Life(cluster) as life:
        while names or time.monotonic() - started_s < 60 * arguments.minutes:
            name = names.pop(0) if names else rng.choice(chosen)
            outcome = life.suffer(HARMS[name])
            unexpected = set(outcome.errors) - HARMS[name].errors
            failed += bool(unexpected)
            if arguments.json:
                print(json.dumps({"harm": name, **asdict(outcome), "seed": seed}), flush=True)
                continue
            row = (outcome.lasts_s, outcome.recovery_s, outcome.longest_pause_s, outcome.starts)
            print(_LINE.format(name, *row, ", ".join(error or "of Spark" for error in outcome.errors)), flush=True)
        if not arguments.json:
            print(f"exact in {outcome.batches} batches")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
