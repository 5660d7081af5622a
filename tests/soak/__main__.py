"""The command: runs lives until the time is over, or one fails."""

from __future__ import annotations

import argparse
import gc
import logging
import secrets
import sys
from contextlib import nullcontext

from tests.soak.engine import Life
from tests.soak.plants import PLANTS
from tests.soak.report import Difference, Report


def main() -> int:
    """Run; return the exit code."""
    parser = argparse.ArgumentParser(prog="./dev soak", description="Random harm, compared with a model.")
    parser.add_argument("--minutes", type=float, default=10.0, help="for how long")
    parser.add_argument("--seed", type=int, default=None, help="repeats what was drawn at random")
    parser.add_argument("--life", type=int, default=None, help="only this life, once: repeats a failure")
    parser.add_argument("--lane", choices=["both", "engine", "spark"], default="both")
    parser.add_argument("--plant", choices=list(PLANTS), default=None, help="a defect that must be found")
    arguments = parser.parse_args()
    with PLANTS[arguments.plant]() if arguments.plant else nullcontext():
        return soak(arguments)


def soak(arguments: argparse.Namespace) -> int:
    """Live life after life; return the exit code."""
    seed = secrets.randbelow(1 << 32) if arguments.seed is None else arguments.seed
    logging.getLogger("statelog").setLevel(logging.ERROR)  # it tells of each fault and of each other result
    gc.freeze()  # a collection in a fork would copy the pages that it shares
    report = Report(seed)
    report.tell("begins", lane=arguments.lane)
    lives = [arguments.life] if arguments.life is not None else range(1 << 62)
    for number in lives:
        life = Life(f"{seed}/{number}", report.counts)
        try:
            life.run()
        except Difference as difference:
            for move in life.moves:
                print("   ", move)
            print(difference)
            report.tell("failed", life=number, kept=str(life.directory))
            print(f"repeat it with: ./dev soak --lane engine --seed {seed} --life {number}", flush=True)
            return 1
        report.tell_sometimes()
        if report.elapsed_s >= 60 * arguments.minutes:
            break
    report.tell("passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
