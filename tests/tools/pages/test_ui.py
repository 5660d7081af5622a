"""``statelog.ui`` and ``show``: who may see the page, what its state browser finds, and that keys can be hidden."""

from __future__ import annotations

import http.client
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pyarrow as pa
import pytest

import statelog
from statelog import CheckpointMetrics, HotKey, StateMetrics, SubtaskMetrics
from statelog.coordinator.active_operator import Restore, SubtaskRestore
from statelog.runs.schema import encode_schema
from statelog.testing.query import ManualClock
from statelog.tools.pages.live import LiveOperator, Watched
from statelog.tools.pages.model import PageModel
from statelog.tools.pages.operator_model import read_operators
from statelog.tools.pages.savepoint_list import SavepointFolders
from statelog.tools.pages.server import App, PageServer
from statelog.tools.pages.ui import Summary
from tests.reading.story import Story
from tests.short_log import ShortLog
from tests.tools.pages.queries import materialized

pytest.importorskip("jinja2", reason="jinja2 is not installed")
pytest.importorskip("waitress", reason="waitress is not installed")

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def query(tmp_path_factory: pytest.TempPathFactory) -> Story:
    made = materialized(tmp_path_factory.mktemp("ui") / "query")
    made.run(12, [((77, EVIL), ("set", 4711)), ((77, EVIL), ("append", EVIL))])
    return made


@pytest.fixture(scope="module")
def page(query: Story) -> Iterator[statelog.PageServer]:
    with statelog.ui(query.location) as served:
        yield served


def ask(
    page: statelog.PageServer, path: str = "/", method: str = "GET", form: dict[str, str] | None = None, **headers: str
) -> tuple[http.client.HTTPResponse, str]:
    address = urlsplit(page.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    try:
        connection.request(method, path, None if form is None else urlencode(form), headers)
        answer = connection.getresponse()
        return answer, answer.read().decode()
    finally:
        connection.close()


def look_up(page: statelog.PageServer, **form: str) -> list[list[str]]:
    """The table that the state browser shows."""
    _, text = ask(page, "/state", "POST", {"operator": "op", **form})
    found = re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL)
    return [[unescape(cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)] for row in found]


def test_the_page_is_served_with_a_strict_policy(page: statelog.PageServer) -> None:
    answer, text = ask(page)
    assert answer.status == 200
    assert "Newest checkpoint" in text
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "script-src" not in policy
    assert answer.headers["Cache-Control"] == "no-store"
    assert ask(page, method="HEAD")[1] == ""


@pytest.mark.parametrize(
    ("method", "path", "status"), [("POST", "/", 405), ("DELETE", "/state", 405), ("GET", "/x", 404)]
)
def test_nothing_else_is_served(page: statelog.PageServer, method: str, path: str, status: int) -> None:
    assert ask(page, path, method)[0].status == status


def test_a_visit_leaves_the_location_as_it_is(query: Story, page: statelog.PageServer) -> None:
    """Also one that reads state, which is pinned meanwhile."""

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in Path(query.location).rglob("*") if path.is_file()}

    before = files()
    assert ask(page)[0].status == 200
    assert ask(page, "/checkpoints?operator=op")[0].status == 200
    key = f'[77, "{EVIL}"]'
    assert look_up(page, state="value", key=key)
    assert look_up(page, state="list", key=key, show="history")
    assert files() == before


def test_another_name_of_this_host_is_refused(page: statelog.PageServer) -> None:
    port = urlsplit(page.url).port
    assert ask(page, Host=f"evil.example:{port}")[0].status == 403
    assert ask(page, Host=f"localhost:{port}")[0].status == 200


def test_at_another_address_a_token_is_needed(query: Story) -> None:
    with statelog.ui(query.location, host="0.0.0.0") as served:
        assert ask(served)[0].status == 401
        assert ask(served, "/?token=wrong")[0].status == 401
        token = urlsplit(served.url).query
        answer, _ = ask(served, f"/?{token}")
        assert (answer.status, answer.headers["Location"]) == (303, "/")
        cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert ask(served, Cookie=cookie.partition(";")[0])[0].status == 200
        assert ask(served, Cookie=cookie.partition("=")[0] + "=wrong")[0].status == 401


def test_keys_and_their_histories_are_found(query: Story, page: statelog.PageServer) -> None:
    key = f'[77, "{EVIL}"]'
    assert look_up(page, state="value", key=key)[1:] == [["77", EVIL, "4711"]]
    history = look_up(page, state="list", key=key, show="history")
    assert history[1][0] == "12"
    assert EVIL in history[1][-1]
    expected = statelog.read_state(query.location, state="map", at=11).read_all()
    assert len(look_up(page, state="map", at="11")[1:]) == min(expected.num_rows, 100)


def test_html_in_keys_and_values_is_text(page: statelog.PageServer) -> None:
    _, text = ask(page, "/state", "POST", {"operator": "op", "state": "list", "key": f'[77, "{EVIL}"]'})
    assert "<img" not in text
    assert text.count("&lt;img src=x onerror=alert(1)&gt;") >= 2


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ({"state": "value", "key": "[1"}, "does not fit the key"),
        ({"state": "none"}, "none"),
        ({"state": "value", "at": "99"}, "no checkpoint 99"),
        ({"state": "value", "at": "soon"}, "neither a batch nor a time"),
        ({"state": "value", "show": "history"}, "Name a key"),
        ({"operator": "other", "state": "value"}, "Choose an operator"),
    ],
)
def test_a_visitors_mistake_is_told(page: statelog.PageServer, form: dict[str, str], problem: str) -> None:
    answer, text = ask(page, "/state", "POST", {"operator": "op", **form})
    assert answer.status == 200
    assert problem in unescape(text)


@pytest.mark.parametrize("state", ["value", "list", "map"])
@pytest.mark.parametrize("show", ["rows", "history"])
def test_keys_and_values_can_be_hidden(query: Story, state: str, show: str) -> None:
    key = f'[77, "{EVIL}"]'
    with statelog.ui(query.location) as plain, statelog.ui(query.location, redact_keys=True) as served:
        form = {"operator": "op", "state": state, "key": key, "show": show}
        if state == "map":  # of that key there is none
            form |= {"key": "", "show": "rows"}
        shown, hidden = look_up(plain, **form), look_up(served, **form)
        _, text = ask(served, "/state", "POST", form)
    assert hidden[0] == shown[0]
    assert len(hidden) == len(shown) > 1
    for place, name in enumerate(shown[0]):
        is_hidden = name.startswith(("key_", "mapkey_", "value_"))
        assert is_hidden != (name in {"batch", "batch_time_ms", "operation", "position"})
        expected = [["\N{BULLET}" * 3 if is_hidden else row[place]] for row in shown[1:]]
        assert [[row[place]] for row in hidden[1:]] == expected
    for secret in ("77", "onerror", "4711"):
        assert secret not in text


def test_a_key_that_does_not_fit_is_hidden_too(query: Story) -> None:
    with statelog.ui(query.location, redact_keys=True) as served:
        for key in ("[1", "secret", '["secret", 1]'):
            _, text = ask(served, "/state", "POST", {"operator": "op", "state": "value", "key": key})
            assert "does not fit the key" in unescape(text)
            assert key not in unescape(text)
            assert "secret" not in text


def test_a_wrong_location_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(statelog.ConfigurationError, match="holds no state"):
        statelog.ui(tmp_path)


def test_the_page_answers_to_the_address_that_it_is_served_at(tmp_path: Path) -> None:
    made = Story(tmp_path / "query")
    made.run_batches(1, random.Random(1))
    with statelog.ui(made.location, host="127.0.0.2", port=0) as served:
        answer, _ = ask(served)
        assert answer.status == 200


# ---- The history ----


class LongApp(App):
    """Serves a log of very many checkpoints."""

    model: PageModel

    def read(self) -> PageModel:
        return self.model


@pytest.fixture(name="history", scope="module")
def serve_history() -> Iterator[statelog.PageServer]:
    log = ShortLog(1000, key_schema=encode_schema(pa.schema([("a", pa.int64())])), max_file_bytes=1 << 17)
    app = LongApp(lambda: Watched([]), SavepointFolders([]), token=None, redacts=False, clock=ManualClock())
    [found] = read_operators(log.store, "place", 0.0).operators
    app.model = PageModel("place", 0, (replace(found, uid="a&b"),))
    with PageServer(app, "127.0.0.1", 0, None) as served:
        yield served


def batches_of(text: str) -> list[int]:
    table = text.rpartition("input rows</th>")[2]
    return [int(batch) for batch in re.findall(r'<tr><td class="n">(\d+)</td>', table)]


def test_all_checkpoints_are_on_some_page_of_the_history(history: statelog.PageServer) -> None:
    _, text = ask(history)
    [link] = re.findall(r'href="(/checkpoints[^"]*)">All 1,000 checkpoints', text)
    assert batches_of(text) == list(range(999, 949, -1))
    seen: list[int] = []
    pages: list[str] = []
    while link:
        pages.append(unescape(link))
        _, text = ask(history, pages[-1])
        seen += batches_of(text)
        [link] = set(re.findall(r'href="([^"]*)">Older', text)) or {""}
    assert seen == list(range(999, -1, -1))
    assert len(pages) == 5
    newer = {unescape(one) for one in re.findall(r'href="([^"]*)">Newer', text)}
    assert newer == {pages[-2]}, "the way back"


@pytest.mark.parametrize(
    ("newest", "first", "last"), [("", 999, 800), ("5000", 999, 800), ("450", 450, 251), ("7", 7, 0), ("0", 0, 0)]
)
def test_the_history_from_a_batch(history: statelog.PageServer, newest: str, first: int, last: int) -> None:
    _, text = ask(history, f"/checkpoints?operator=a%26b&from={newest}")
    assert batches_of(text) == list(range(first, last - 1, -1))
    assert (">Newest<" in text) == (first < 999)
    assert (">Oldest<" in text) == (last > 0)


@pytest.mark.parametrize(
    ("query_text", "problem"),
    [("operator=none", "no checkpoint of an operator 'none'"), ("operator=a%26b&from=x", "'x' is not a batch")],
)
def test_a_history_that_is_not_there(history: statelog.PageServer, query_text: str, problem: str) -> None:
    assert problem in unescape(ask(history, f"/checkpoints?{query_text}")[1])


# ---- The driver's own figures ----


class Live:
    """A query whose driver the test plays."""

    def __init__(self, location: str, *operators: LiveOperator) -> None:
        self.location, self.operators, self.clock = location, operators, ManualClock()
        self.app = App(self.look, SavepointFolders([]), token=None, redacts=False, clock=self.clock)

    def look(self) -> Watched:
        return Watched([self.location], self.operators)

    def html(self) -> str:
        answered: list[str] = []
        environment = {"REQUEST_METHOD": "GET", "HTTP_HOST": "localhost"}
        [body] = self.app(environment, lambda status, headers: answered.append(status))
        assert answered == ["200 OK"]
        return bytes(body).decode()

    def text(self) -> str:
        return " ".join(unescape(re.sub(r"<[^>]*>", " ", self.html().partition("</style>")[2])).split())


def refresh_s(html: str) -> int:
    [seconds] = re.findall(r'http-equiv="refresh" content="(\d+)"', html)
    return int(seconds)


def restored(batch: int, input_rows: int = 1, **values: Any) -> CheckpointMetrics:
    return CheckpointMetrics("query", "op", batch, 0, 3, input_rows, 0, 0, 1, 1, 1, 0.0, 0.0, **values)


def test_the_page_of_a_query_that_has_no_state_yet(tmp_path: Path) -> None:
    page = Live(str(tmp_path), LiveOperator("op", 3))
    assert "op not begun" in page.text()
    assert refresh_s(page.html()) == 3
    page.operators = (LiveOperator("op", 3, has_begun=True),)
    assert "It has no checkpoint yet" in page.text()
    made = Story(tmp_path / "statelog")
    shutil.copytree(made.location, tmp_path / "statelog", dirs_exist_ok=True)
    page.clock.advance(60.0)
    assert "It has no checkpoint yet" in page.text()


def test_a_restore_is_shown_as_it_goes_on(query: Story) -> None:
    def restore(read_bytes: int, left_s: float | None) -> LiveOperator:
        subtasks = (SubtaskRestore(0, 3_000_000, 3_000_000), SubtaskRestore(2, read_bytes, 7_000_000))
        return LiveOperator("op", 3, True, [restored(12)], None, Restore(13, subtasks, 4.0, left_s))

    page = Live(query.location, restore(1_000_000, None))
    text = page.text()
    assert "Restoring the state for batch 13" in text
    assert "4.0 MB of 10.0 MB read in 4 s 2 of 3 subtasks took longer" in text
    assert refresh_s(page.html()) == 3
    page.operators = (restore(5_000_000, 2.5),)
    html = page.html()
    assert "8.0 MB of 10.0 MB read in 4 s; about 2.5 s left" in html
    assert '<progress max="10000000" value="8000000"' in html
    assert "<title>2: 5 MB + 2 MB = 7 MB</title>" in html
    page.operators = (restore(7_000_000, 0.0),)
    assert "The state is restored; batch 13 is running" in page.text()


def test_a_restore_that_is_over_is_told(query: Story) -> None:
    subtasks = (SubtaskRestore(0, 9, 10),)
    last = restored(13, restore_s=4.0, restored_bytes=10_000_000)
    page = Live(
        query.location, LiveOperator("op", 3, True, [last, restored(14)], last, Restore(13, subtasks, 1.0, 1.0))
    )
    text = page.text()
    assert "Restoring" not in text
    assert "last restore of this driver: batch 13, 10.0 MB 4 s" in text
    assert refresh_s(page.html()) == 15


def measured(key: tuple[object, ...] | None) -> CheckpointMetrics:
    """The metrics of batch 12, whose 40 rows have one hot key."""
    return restored(
        12,
        40,
        subtasks=[
            SubtaskMetrics(0, 30, 3, 100, 0.5, 0.25, 2.0, 0.5, 0.25, 0.5),
            SubtaskMetrics(1, 10, 3, 100, wait_s=4.0),
        ],
        states={"count": StateMetrics(1234, 56_000)},
        hot_keys=[HotKey(30, 17_000, key)],
    )


def test_a_running_query_shows_times_states_and_hot_keys(query: Story) -> None:
    newest = measured(("<script>alert(1)</script>", 7))
    page = Live(query.location, LiveOperator("op", 2, True, [newest], newest=newest))
    text, html = page.text(), page.html()
    assert "Time in batch 12" in text
    assert "<title>0: 750 ms + 2 s + 500 ms + 250 ms + 500 ms = 4 s</title>" in html
    assert "count 1,234 56.0 KB" in text
    assert "<script>alert(1)</script>, 7 17,000 30 75.0 %" in text
    assert "<script" not in html
    page.operators = (LiveOperator("op", 2, True, [newest], newest=restored(12)),)
    assert "No key had several rows." in page.text()


@pytest.mark.parametrize(("redacts", "key"), [(True, ("secret",)), (False, None)])
def test_hot_keys_can_be_hidden(query: Story, redacts: bool, key: tuple[str] | None) -> None:
    newest = measured(key)
    page = Live(query.location, LiveOperator("op", 2, True, [newest], newest=newest))
    page.app = App(page.look, SavepointFolders([]), token=None, redacts=redacts, clock=page.clock)
    text = page.text()
    assert "secret" not in page.html()
    assert "\N{BULLET}\N{BULLET}\N{BULLET} 17,000 30" in text
    assert "secret" not in Summary(page.app.read(), redacts=redacts).html


def test_the_stored_files_are_read_now_and_then(query: Story, tmp_path: Path) -> None:
    made = query.copied(tmp_path / "query")
    page = Live(made.location)
    assert "Newest checkpoint 12 " in page.text()
    made.start()
    made.run(13, [])
    page.clock.advance(4.9)
    assert "Newest checkpoint 12 " in page.text()
    page.clock.advance(0.1)
    assert "Newest checkpoint 13 " in page.text()


def test_a_page_that_is_closed_is_gone(query: Story) -> None:
    with statelog.ui(query.location) as served:
        assert ask(served)[0].status == 200
    served.wait()
    with pytest.raises(ConnectionError):
        ask(served)


def test_a_port_that_is_taken_is_an_error(query: Story, page: statelog.PageServer) -> None:
    with pytest.raises(
        statelog.ConfigurationError, match=r"cannot be served at 127\.0\.0\.1, port \d+: Address already"
    ):
        statelog.ui(query.location, port=urlsplit(page.url).port or 0)


@pytest.mark.parametrize(("host", "port"), [("bad..host", 0), ("192.0.2.1", 0), ("127.0.0.1", 99_999)])
def test_an_address_that_cannot_be_used_is_an_error(query: Story, host: str, port: int) -> None:
    with pytest.raises(statelog.ConfigurationError, match=f"cannot be served at {host}, port {port}: "):
        statelog.ui(query.location, host=host, port=port)


def test_what_is_no_query_is_an_error() -> None:
    with pytest.raises(statelog.ConfigurationError, match="neither a query"):
        statelog.ui(7)  # type: ignore[arg-type]  # a user's mistake


def test_a_notebook_shows_the_page_in_a_frame_without_rights(query: Story, tmp_path: Path) -> None:
    shown = statelog.show(query.location)
    html = shown.html
    [text] = re.findall(r'^<iframe sandbox srcdoc="([^"]*)"', html)
    statelog.report(query.location, tmp_path / "page.html")
    made = re.compile(r"as of [^<]*")
    assert made.sub("", unescape(text)) == made.sub("", (tmp_path / "page.html").read_text())
    [operator] = statelog.stats(query.location)
    assert f"checkpoint {operator.batch} of" in repr(shown)
