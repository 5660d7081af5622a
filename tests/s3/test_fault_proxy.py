"""The fault proxy, in front of a small server."""

from __future__ import annotations

import http.client
import random
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.s3.fault_proxy import FaultProxy, Rule, proxy_in_thread


class Upstream(BaseHTTPRequestHandler):
    """Answers with what it was asked; a chunked answer if the path says so, none at all for deletions."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    seen: list[tuple[str, str, bytes, dict[str, str]]]

    def do_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.seen.append((self.command, self.path, body, dict(self.headers)))
        answer = b"%s %s %s" % (self.command.encode(), self.path.encode(), body)
        if self.command == "DELETE":
            self.send_response(204)
            self.end_headers()
        elif "chunked" in self.path:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for part in (answer[:5], answer[5:]):
                self.wfile.write(b"%x;note=1\r\n%s\r\n" % (len(part), part))
            self.wfile.write(b"0\r\nTrailer: x\r\n\r\n")
        elif "until-the-end" in self.path:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)
            self.close_connection = True
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = do_any

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def upstream() -> Iterator[tuple[int, list[tuple[str, str, bytes, dict[str, str]]]]]:
    requests: list[tuple[str, str, bytes, dict[str, str]]] = []
    handler = type("Handler", (Upstream,), {"seen": requests})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port, requests
        server.shutdown()
        thread.join()


@pytest.fixture
def seen(upstream: tuple[int, list[tuple[str, str, bytes, dict[str, str]]]]) -> list[Any]:
    """The requests that have reached the server."""
    return upstream[1]


@pytest.fixture
def proxy(upstream: tuple[int, list[Any]]) -> Iterator[FaultProxy]:
    with proxy_in_thread(FaultProxy(upstream[0])) as running:
        yield running


def connect(proxy: FaultProxy, timeout_s: float = 30) -> closing[http.client.HTTPConnection]:
    return closing(http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=timeout_s))


def ask(proxy: FaultProxy, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    with connect(proxy) as connection:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()


class TestPassingOn:
    def test_many_requests_on_one_connection(self, proxy: FaultProxy) -> None:
        large = random.Random(1).randbytes(3_000_000)
        with connect(proxy) as connection:
            for method, path, body, expected in [
                ("PUT", "/bucket/a?x=1&y=%2F", b"content", b"PUT /bucket/a?x=1&y=%2F content"),
                ("GET", "/bucket/a", None, b"GET /bucket/a "),
                ("HEAD", "/bucket/a", None, b""),
                ("GET", "/chunked", None, b"GET /chunked "),
                ("DELETE", "/bucket/a", None, b""),
                ("PUT", "/large", large, b"PUT /large " + large),
                ("GET", "/until-the-end", None, b"GET /until-the-end "),
            ]:
                connection.request(method, path, body)
                answer = connection.getresponse()
                assert answer.read() == expected
                if method == "HEAD":
                    assert answer.headers["Content-Length"] == str(len("HEAD /bucket/a "))
        assert proxy.counts == {"passed": 7, "PUT": 2, "GET": 3, "HEAD": 1, "DELETE": 1}

    def test_headers_stay_as_they_are(self, proxy: FaultProxy, seen: list[Any]) -> None:
        with connect(proxy) as connection:
            connection.request("PUT", "/x", b"1", {"Host": "bucket.example:99", "x-amz-Date": "today"})
            connection.getresponse().read()

        headers = seen[0][3]
        assert (headers["Host"], headers["x-amz-Date"]) == ("bucket.example:99", "today")

    def test_a_client_that_asks_whether_to_continue(self, proxy: FaultProxy, seen: list[Any]) -> None:
        with connect(proxy) as connection:
            connection.request("PUT", "/x", b"1", {"Expect": "100-continue"})
            assert connection.getresponse().read() == b"PUT /x 1"
        assert "Expect" not in seen[0][3]


class TestFaults:
    def test_slow_down(self, proxy: FaultProxy, seen: list[Any]) -> None:
        proxy.rules = [Rule("slow_down", method="PUT")]

        status, body = ask(proxy, "PUT", "/x", b"1")

        assert status == 503
        assert b"<Code>SlowDown</Code>" in body
        assert ask(proxy, "GET", "/x") == (200, b"GET /x ")
        assert [method for method, *_ in seen] == ["GET"]
        assert proxy.counts == {"slow_down": 1, "passed": 1, "PUT": 1, "GET": 1}

    def test_reset_before_the_server_sees_the_request(self, proxy: FaultProxy, seen: list[Any]) -> None:
        proxy.rules = [Rule("reset")]

        with pytest.raises(ConnectionResetError):
            ask(proxy, "PUT", "/x", b"1")

        assert seen == []

    def test_reset_after_the_server_has_answered(self, proxy: FaultProxy, seen: list[Any]) -> None:
        proxy.rules = [Rule("reset_after")]

        with pytest.raises(ConnectionResetError):
            ask(proxy, "PUT", "/x", b"1")

        assert [(method, body) for method, _, body, _ in seen] == [("PUT", b"1")]

    def test_hang(self, proxy: FaultProxy, seen: list[Any]) -> None:
        proxy.rules = [Rule("hang")]

        with connect(proxy, timeout_s=0.2) as connection:
            connection.request("GET", "/x")
            with pytest.raises(TimeoutError):
                connection.getresponse()

        assert seen == []

    def test_the_first_rule_that_fits_counts(self, proxy: FaultProxy) -> None:
        proxy.rules = [
            Rule("slow_down", path="^/a/", times=2),
            Rule("reset", path="^/a/", times=1),
            Rule("hang", method="DELETE"),
        ]

        statuses: list[int] = []
        for path in ("/a/1", "/b/1", "/a/2"):
            statuses.append(ask(proxy, "GET", path)[0])
        with pytest.raises(ConnectionResetError):
            ask(proxy, "GET", "/a/3")
        statuses.append(ask(proxy, "GET", "/a/4")[0])

        assert statuses == [503, 200, 503, 200]

    def test_rules_are_replaced_while_it_runs(self, proxy: FaultProxy) -> None:
        for rules, expected in [
            ([Rule("slow_down", times=1)], [503, 200]),
            ([], [200, 200]),
            ([Rule("slow_down", times=1)], [503, 200]),
        ]:
            proxy.rules = rules
            assert [ask(proxy, "GET", "/x")[0] for _ in range(2)] == expected

    def test_a_share_of_the_requests(self, upstream: tuple[int, list[Any]]) -> None:
        found = []
        for _ in range(2):
            with proxy_in_thread(FaultProxy(upstream[0], [Rule("slow_down", share=0.3)], seed=4)) as proxy:
                with connect(proxy) as connection:
                    statuses = []
                    for _ in range(200):
                        connection.request("GET", "/x")
                        answer = connection.getresponse()
                        answer.read()
                        statuses.append(answer.status)
                found.append(statuses)

        assert 40 <= found[0].count(503) <= 80
        assert found[0] == found[1]

    def test_a_server_that_is_gone(self) -> None:
        with proxy_in_thread(FaultProxy(9)) as proxy, pytest.raises((ConnectionError, http.client.HTTPException)):
            ask(proxy, "GET", "/x")
