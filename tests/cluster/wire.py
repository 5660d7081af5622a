"""A cable that is slow and loses frames: forwards them between two network interfaces, for kernels without netem."""

from __future__ import annotations

import random
import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from typing import Final

_EVERY_PROTOCOL: Final = 3
_PACKET: Final = 263
_KEEP_OFFLOADS: Final = 15  # frames come and go with what their checksums and segments lack yet
_BUFFER_BYTES: Final = 8 << 20
_FRAME_BYTES: Final = 1 << 17


class Direction:
    """Frames on their way from one interface to another."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source = source
        self._target = target
        self._frames: deque[tuple[float, bytes]] = deque()

    def take(self, due_s: float, loss: float, rng: random.Random) -> None:
        """Take what has come, which leaves at a time."""
        with suppress(BlockingIOError):
            while True:
                frame, sender = self.source.recvfrom(_FRAME_BYTES)
                if sender[2] != socket.PACKET_OUTGOING and rng.random() >= loss:
                    self._frames.append((due_s, frame))

    def send(self, now_s: float) -> float:
        """Send what is due, and return for how many seconds nothing more is."""
        while self._frames and self._frames[0][0] <= now_s:
            with suppress(OSError):  # lost
                self._target.send(self._frames.popleft()[1])
        return self._frames[0][0] - now_s if self._frames else 1.0


def forward(first: str, second: str, delay_s: float, loss: float, rng: random.Random) -> None:
    """Forward between two interfaces until this process is killed; `loss` is the share of frames."""
    ends = [_open(first), _open(second)]
    ways = [Direction(*ends), Direction(*reversed(ends))]
    print("ready", flush=True)
    while True:
        idle_s = min(way.send(time.monotonic()) for way in ways)
        ready = select.select(ends, [], [], idle_s)[0]
        for way in ways:
            if way.source in ready:
                way.take(time.monotonic() + delay_s, loss, rng)


def _open(interface: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL))
    end.setsockopt(_PACKET, _KEEP_OFFLOADS, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    end.bind((interface, _EVERY_PROTOCOL))
    end.setblocking(False)
    return end


if __name__ == "__main__":
    forward(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), random.Random(int(sys.argv[5])))
