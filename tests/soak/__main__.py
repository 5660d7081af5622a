"""The command: runs lives until the time is over, or one fails."""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import secrets
import signal
import sys
import time
from collections import Counter
from contextlib import nullcontext
from typing import Final

from tests.soak.engine import Life
from tests.soak.moves import MOODS
from tests.soak.plants import PLANTS
from tests.soak.query_lane import QueryLife
from tests.soak.report import AnyLife, Report
from tests.soak.spark_lane import SparkLife

LANES: Final = ("engine", "queries", "spark")
SHARES: Final = {"engine": 0.5, "queries": 0.25, "spark": 0.25}
"""Of the time, when all run in turns."""


def main() -> int:
    """Run; return the exit code."""
    parser = argparse.ArgumentParser(prog="./dev soak", description="Random harm, compared with a model.")
    parser.add_argument("--minutes", type=float, default=10.0, help="for how long")
    parser.add_argument("--seed", type=int, default=None, help="repeats what was drawn at random")
    parser.add_argument("--life", type=int, default=None, help="only this life, once: repeats a failure")
    parser.add_argument("--lane", choices=["all", *LANES], default="all")
    parser.add_argument("--mood", choices=list(MOODS), default=None, help="of all runs, but not in the spark lane")
    parser.add_argument("--plant", choices=list(PLANTS), default=None, help="a defect that must be found")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # processes are ended then, too
    with PLANTS[arguments.plant]() if arguments.plant else nullcontext():
        return soak(arguments)


def soak(arguments: argparse.Namespace) -> int:
    """Live life after life; return the exit code."""
    seed = secrets.randbelow(1 << 32) if arguments.seed is None else arguments.seed
    logging.getLogger("statelog").setLevel(logging.ERROR)  # it tells of each fault and of each other result
    gc.freeze()  # a collection in a fork would copy the pages that it shares
    lanes = LANES if arguments.lane == "all" else (arguments.lane,)
    reports = {lane: Report(lane, seed, arguments.mood or "") for lane in lanes}
    started_s = time.monotonic()
    for number in itertools.count() if arguments.life is None else [arguments.life]:
        lane = min(lanes, key=lambda lane: reports[lane].busy_s / SHARES[lane])
        counts, name = reports[lane].counts, f"{seed}/{lane}/{number}"
        if not reports[lane].live(new_life(lane, name, counts, arguments.mood), number):
            return 1
        if time.monotonic() - started_s >= 60 * arguments.minutes:
            break
    for report in reports.values():
        report.tell("passed")
    return 0


def new_life(lane: str, name: str, counts: Counter[str], mood: str | None) -> AnyLife:
    """A life of a lane, from its seed."""
    match lane:
        case "spark":
            return SparkLife(name, counts)
        case "queries":
            return QueryLife(name, counts, MOODS.get(mood or ""))
    return Life(name, counts, MOODS.get(mood or ""))


if __name__ == "__main__":
    sys.exit(main())
