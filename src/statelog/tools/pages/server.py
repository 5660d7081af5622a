"""Serves the page while a query runs: read-only, to this host unless told otherwise."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import parse_qs

from waitress.server import create_server
from waitress.wasyncore import close_all

from statelog.clock import Clock, SystemClock
from statelog.errors import ConfigurationError, ErrorKind, StatelogError
from statelog.tools.pages.browse import Wanted, browse
from statelog.tools.pages.live import Watched
from statelog.tools.pages.model import PageModel, read_page
from statelog.tools.pages.render import browse_html, checkpoints_html, content_policy, error_html, render
from statelog.tools.pages.savepoint_list import SavepointFolders

_FRESH_S: Final = 5.0
"""So long the stored files are not read again, at least."""
_REST: Final = 20.0
"""The same, as a multiple of the time to read them."""
_FORM_BYTES: Final = 16 << 10
_LAST_PORT: Final = 65_535
_THREADS: Final = 4
_CLOSE_S: Final = 10.0
_LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""The names by which callers of this host may call it, besides the one that the user has chosen."""

_Environment = Mapping[str, Any]
_Respond = Callable[[str, list[tuple[str, str]]], Any]


class App:
    """The WSGI application.

    Parameters
    ----------
    look : callable
        Returns what the page is about, each time it is shown.
    savepoints : SavepointFolders
        Where savepoints are looked for.
    token : str or None
        What a caller must know; None for callers of this host.
    redacts : bool
        Whether keys and values are not shown, not even a key that was typed.
    host : str
        The address that is served.
    """

    def __init__(
        self,
        look: Callable[[], Watched],
        savepoints: SavepointFolders,
        *,
        token: str | None,
        redacts: bool,
        clock: Clock,
        host: str = "localhost",
    ) -> None:
        self._look = look
        self._savepoints = savepoints
        self._names = {*_LOOPBACK_NAMES, f"[{host}]" if ":" in host else host}
        self._token = token
        self._cookie = "" if token is None else f"statelog_{hashlib.sha256(token.encode()).hexdigest()[:8]}"
        self._redacts = redacts
        self._clock = clock
        self._lock = threading.Lock()
        self._page: PageModel | None = None
        self._fresh_until_s = 0.0

    def __call__(self, environment: _Environment, respond: _Respond) -> Iterable[bytes]:
        status, headers, body = self._answer(environment)
        data = body.encode()
        common = [
            ("Content-Type", "text/html; charset=utf-8"),
            ("Content-Length", str(len(data))),
            ("Content-Security-Policy", f"{content_policy()}; frame-ancestors 'none'"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cache-Control", "no-store"),
        ]
        respond(f"{status.value} {status.phrase}", [*common, *headers])
        return [] if environment["REQUEST_METHOD"] == "HEAD" else [data]

    def _answer(self, environment: _Environment) -> tuple[HTTPStatus, list[tuple[str, str]], str]:
        method, path = environment["REQUEST_METHOD"], environment.get("PATH_INFO", "/")
        if self._token is None and _host_of(environment.get("HTTP_HOST", "")) not in self._names:
            # Another site's name may lead to this host; a browser then sends that name.
            return HTTPStatus.FORBIDDEN, [], error_html("This page is served to this host by its own name only.")
        if self._token is not None and not self._is_known(environment):
            given = parse_qs(environment.get("QUERY_STRING", "")).get("token", [""])[0]
            if not _is_equal(given, self._token):
                return HTTPStatus.UNAUTHORIZED, [], error_html("Open the address with the token that was printed.")
            cookie = f"{self._cookie}={self._token}; HttpOnly; SameSite=Strict; Path=/"
            return HTTPStatus.SEE_OTHER, [("Location", "/"), ("Set-Cookie", cookie)], ""
        if path == "/" and method in ("GET", "HEAD"):
            return self._guarded(lambda: render(self.read(), is_live=True, redacts=self._redacts))
        if path == "/checkpoints" and method in ("GET", "HEAD"):
            query = {name: values[0] for name, values in parse_qs(environment.get("QUERY_STRING", "")).items()}
            return self._guarded(
                lambda: checkpoints_html(self.read(), query.get("operator", ""), query.get("from", ""))
            )
        if path == "/state" and method in ("GET", "HEAD"):
            return self._guarded(lambda: browse_html(self.read(), Wanted(), None, redacts=self._redacts))
        if path == "/state" and method == "POST":
            return self._guarded(lambda: self._browsed(_form_of(environment)))
        if path in ("/", "/checkpoints", "/state"):
            return HTTPStatus.METHOD_NOT_ALLOWED, [("Allow", "GET, HEAD, POST")], error_html("This page is read-only.")
        return HTTPStatus.NOT_FOUND, [], error_html("There is no such page.")

    def _guarded(self, make: Callable[[], str]) -> tuple[HTTPStatus, list[tuple[str, str]], str]:
        try:
            return HTTPStatus.OK, [], make()
        except StatelogError as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, [], error_html(str(error))

    def _browsed(self, form: Mapping[str, str]) -> str:
        page = self.read()
        wanted = Wanted(
            operator=form.get("operator", ""),
            state=form.get("state", ""),
            key=form.get("key", ""),
            at=form.get("at", ""),
            is_history=form.get("show") == "history",
        )
        return browse_html(page, wanted, browse(page, wanted, redacts=self._redacts), redacts=self._redacts)

    def read(self) -> PageModel:
        """The page as of now; raises the errors of :func:`read_page`.

        The stored files are read by one thread at a time, and in a small part of the time.
        """
        with self._lock:
            began_s, watched = self._clock.monotonic_s(), self._look()
            if self._page is None or began_s >= self._fresh_until_s:
                self._page = read_page(watched, self._savepoints)
                now_s = self._clock.monotonic_s()
                self._fresh_until_s = now_s + max(_FRESH_S, _REST * (now_s - began_s))
            return self._page.with_live(watched.operators)

    def _is_known(self, environment: _Environment) -> bool:
        assert self._token is not None
        try:
            cookie = SimpleCookie(environment.get("HTTP_COOKIE", "")).get(self._cookie)
        except CookieError:
            return False
        return cookie is not None and _is_equal(cookie.value, self._token)


def _is_equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())


def _host_of(header: str) -> str:
    """The host of a Host header without its port."""
    host, colon, port = header.rpartition(":")
    return (host if colon and port.isdigit() else header).lower()


def _form_of(environment: _Environment) -> dict[str, str]:
    try:
        length = min(int(environment.get("CONTENT_LENGTH") or 0), _FORM_BYTES)
    except ValueError:
        length = 0
    text = environment["wsgi.input"].read(length).decode(errors="replace")
    return {name: values[0] for name, values in parse_qs(text).items()}


class PageServer:
    """A served page, made by :func:`ui`: it is served until :meth:`close`, or the end of the process.

    Use it in a ``with`` statement, or call :meth:`close`.
    """

    def __init__(self, app: App, host: str, port: int, token: str | None) -> None:
        self._sockets: dict[int, Any] = {}
        try:
            if not 0 <= port <= _LAST_PORT:
                raise ValueError(f"ports end at {_LAST_PORT}")  # the system would take another one
            self._server = create_server(
                app, map=self._sockets, host=host, port=port, threads=_THREADS, ident="statelog"
            )
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigurationError(
                f"The checkpoint page cannot be served at {host}, port {port}: {reason}.",
                kind=ErrorKind.VALUE_MISMATCH,
                hint="Pass an address of this machine as host, and a port that is free, or 0 for any.",
            ) from error
        self._token = token
        self._host = f"[{host}]" if ":" in host else host
        self._thread = threading.Thread(target=self._server.run, name="statelog-ui", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address to open in a browser, with the token if there is one."""
        address = f"http://{self._host}:{self._server.effective_port}/"
        return address if self._token is None else f"{address}?token={self._token}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def wait(self) -> None:
        """Return when the page is no longer served."""
        self._thread.join()

    def close(self) -> None:
        """Stop serving the page."""
        if not self._thread.is_alive():
            return
        self._server.task_dispatcher.shutdown()
        # Only the thread that waits for the sockets may close them.
        self._server.trigger.pull_trigger(lambda: close_all(self._sockets, ignore_all=True))
        self._thread.join(timeout=_CLOSE_S)


def serve(
    look: Callable[[], Watched], savepoints: SavepointFolders, *, host: str, port: int, redact_keys: bool
) -> PageServer:
    """Serve the page, with a token unless `host` is this host alone; raises the errors of :func:`read_page`."""
    token = None if _is_loopback(host) else secrets.token_urlsafe(24)
    app = App(look, savepoints, token=token, redacts=redact_keys, clock=SystemClock(), host=host)
    app.read()  # a wrong location is reported here, and not in a browser
    return PageServer(app, host, port, token)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
