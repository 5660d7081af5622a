"""The command line: one command per benchmark."""

from __future__ import annotations

from benchmarks import commit, count
from benchmarks.frame import command_line

main = command_line([count.BENCHMARK, commit.BENCHMARK])

if __name__ == "__main__":
    main(prog_name="bench")
