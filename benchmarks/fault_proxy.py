"""A reverse proxy between a client and an HTTP server that delays requests, refuses them, and loses their answers.

It passes on the bytes of requests and answers as they came, the Host header included, which is part of what a
client of S3 signs. It knows as much of HTTP/1.1 as it takes to see where a message ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from benchmarks.http_messages import Message, read_answer, read_request
from benchmarks.latency_table import latency_of

__all__ = ["FaultProxy", "ProxyProcess", "Rule", "proxy_in_thread"]

_ROOT: Final = Path(__file__).resolve().parents[1]
_HOST: Final = "127.0.0.1"
_LONGEST_HEAD: Final = 1 << 20
_IDLE_S: Final = 5.0
_SLOW_DOWN: Final = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
_SLOW_DOWN_HEAD: Final = (
    f"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: {len(_SLOW_DOWN)}\r\n\r\n"
).encode()


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What happens to some requests.

    Parameters
    ----------
    action : str
        ``latency``: it is passed on after a time from FLIP-158's table. ``slow_down``: answered with 503 SlowDown.
        ``reset``: the connection is reset. ``reset_after``: the same when the server has answered. ``hang``: it is
        never answered.
    method : str
        Which requests; empty is all.
    path : str
        A regular expression that is searched in the request's target. If it has a group, then latencies depend on
        what that matched instead of on the whole target.
    share : float
        To which share of them it happens, at random.
    times : int or None
        To how many of them it happens at most; None is no limit.
    scale : float
        Factor of the latencies.
    """

    action: Literal["latency", "slow_down", "reset", "reset_after", "hang"]
    method: str = ""
    path: str = ""
    share: float = 1.0
    times: int | None = None
    scale: float = 1.0


class FaultProxy:
    """The proxy; lives in one event loop, while its rules may be replaced and its counts read from any thread.

    Of the rules that fit a request the first one counts, and no rule means that it is passed on at once.

    Parameters
    ----------
    upstream_port : int
        Where the server listens, on the loopback interface.
    rules : sequence of Rule
        The first rules.
    seed : int
        Chooses shares and latencies.
    """

    def __init__(self, upstream_port: int, rules: Sequence[Rule] = (), *, seed: int = 0) -> None:
        self._upstream_port = upstream_port
        self._seed = seed
        self._random = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._idle: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._times_seen: Counter[str] = Counter()
        self._applied: Counter[int] = Counter()
        self._rules: tuple[Rule, ...] = tuple(rules)
        self.counts: Counter[str] = Counter()
        """Requests by method and by action; ``passed`` are those without a fault."""
        self.late_s: list[float] = []
        """For each latency, how much longer it took than it should have: how busy the proxy is."""
        self.upstream_s: list[float] = []
        """How long the server took for each request."""

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules; replaced as a whole, and counted from the start then."""
        return self._rules

    @rules.setter
    def rules(self, rules: Sequence[Rule]) -> None:
        self._applied = Counter()
        self._rules = tuple(rules)

    @property
    def port(self) -> int:
        """Where it listens."""
        if self._server is None:
            raise RuntimeError("the proxy has not been started")
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self, port: int = 0) -> None:
        """Listen; port 0 is any free one."""
        self._server = await asyncio.start_server(self._accept, _HOST, port, limit=_LONGEST_HEAD)

    async def stop(self) -> None:
        """Close all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        while self._idle:
            self._idle.pop()[2].close()

    def report(self) -> dict[str, Any]:
        """What was counted and measured so far."""
        return {
            "counts": dict(self.counts),
            "late_s": list(self.late_s),
            "upstream_s": list(self.upstream_s),
            "cpu_s": time.process_time(),
        }

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while await self._serve(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # either side went away in the middle of a message
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False if the connection is of no more use."""
        request = await read_request(reader, writer)
        if request is None:
            return False
        method, target, _ = request.first_line
        rule = self._rule(method, target)
        action = "passed" if rule is None else rule.action
        self.counts.update((action, method))
        if rule is not None and rule.action == "latency":
            await self._delay(rule, target)
        if action == "hang":
            await reader.read()  # ends when the client gives up
            return False
        if action == "reset":
            _reset(writer)
            return False
        if action == "slow_down":
            writer.write(_SLOW_DOWN_HEAD if method == "HEAD" else _SLOW_DOWN_HEAD + _SLOW_DOWN)
            await writer.drain()
            return not request.is_last
        answer = await self._pass_on(request, method)
        if action == "reset_after":
            _reset(writer)
            return False
        writer.write(answer.head + answer.body)
        await writer.drain()
        return not (request.is_last or answer.is_last)

    def _rule(self, method: str, target: str) -> Rule | None:
        for number, rule in enumerate(self._rules):
            if rule.method not in ("", method) or not re.search(rule.path, target):
                continue
            if rule.times is not None and self._applied[number] >= rule.times:
                continue
            if rule.share < 1 and self._random.random() >= rule.share:
                continue
            self._applied[number] += 1
            return rule
        return None

    async def _delay(self, rule: Rule, target: str) -> None:
        self._times_seen[target] += 1
        found = re.search(rule.path, target)
        name = found[1] if found and found.re.groups else target
        until_s = time.perf_counter() + rule.scale * latency_of(self._seed, name, self._times_seen[target])
        await asyncio.sleep(until_s - time.perf_counter())
        self.late_s.append(time.perf_counter() - until_s)

    async def _pass_on(self, request: Message, method: str) -> Message:
        started_s = time.perf_counter()
        reader, writer = await self._connection()
        try:
            writer.write(request.head + request.body)
            await writer.drain()
            answer = await read_answer(reader, method)
        except BaseException:
            writer.close()
            raise
        if answer.is_last:
            writer.close()
        else:
            self._idle.append((time.perf_counter(), reader, writer))
        self.upstream_s.append(time.perf_counter() - started_s)
        return answer

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the server; one that it may be closing now is not used, since nothing is sent twice."""
        while self._idle:
            since_s, reader, writer = self._idle.pop()
            if time.perf_counter() - since_s < _IDLE_S and not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(_HOST, self._upstream_port, limit=_LONGEST_HEAD)


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection so that the client gets an error and not an end."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextmanager
def proxy_in_thread(proxy: FaultProxy) -> Iterator[FaultProxy]:
    """Run a proxy in a thread of this process; for tests."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(proxy.start(), loop).result(10)
        yield proxy
    finally:
        asyncio.run_coroutine_threadsafe(proxy.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


class ProxyProcess:
    """A proxy in a process of its own, so that it has an interpreter for itself; ends with this process.

    Parameters
    ----------
    upstream_port, rules, seed
        As for :class:`FaultProxy`.
    """

    def __init__(self, upstream_port: int, rules: Sequence[Rule] = (), *, seed: int = 0) -> None:
        arguments = [str(upstream_port), str(seed)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fault_proxy", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )
        self.port: int = self._ask(rules)["port"]

    def __enter__(self) -> ProxyProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set_rules(self, rules: Sequence[Rule]) -> None:
        """Replace the rules."""
        self._ask(rules)

    def report(self) -> dict[str, Any]:
        """What was counted and measured so far."""
        return self._ask(None)

    def close(self) -> None:
        """End it."""
        self._process.communicate()

    def _ask(self, rules: Sequence[Rule] | None) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(rules).decode() + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the proxy ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


async def _serve_commands(upstream_port: int, seed: int) -> None:
    """Take rules, or null to report, from each line of the standard input until it ends."""
    proxy = FaultProxy(upstream_port, seed=seed)
    await proxy.start()
    commands = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        if (rules := msgspec.json.decode(line, type=list[Rule] | None)) is None:
            answer = proxy.report()
        else:
            proxy.rules = rules
            answer = {"port": proxy.port}
        print(json.dumps(answer), flush=True)
    await proxy.stop()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve_commands(int(sys.argv[1]), int(sys.argv[2])))
