"""The command line: one command per benchmark."""

from __future__ import annotations

import signal
import sys
from typing import Final

from benchmarks import (
    aggregate,
    checkpointing,
    commit,
    count,
    dedup,
    distance,
    files,
    floor,
    growth,
    join,
    latency,
    memory,
    money,
    peers,
    reading,
    recovery,
    state,
    tail,
    value_state,
    window,
    window_space,
    write_ahead,
)
from benchmarks.frame import command_line
from benchmarks.published import publish

BENCHMARKS: Final = [
    count,
    aggregate,
    dedup,
    join,
    checkpointing,
    write_ahead,
    state,
    reading,
    recovery,
    distance,
    growth,
    memory,
    commit,
    files,
    floor,
    window_space,
    latency,
    tail,
    value_state,
    window,
    money,
    peers,
]

main = command_line(BENCHMARKS)
main.add_command(publish)

if __name__ == "__main__":
    # As an exception, so that the running child is ended and its files are removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    main(prog_name="bench")
