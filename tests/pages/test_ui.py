"""``statelog.ui`` and ``show``: who may see the page, what its state browser finds, and that keys can be hidden."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest

import statelog
from tests.pages.queries import materialized
from tests.reading.story import Story

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


def test_keys_can_be_hidden(query: Story) -> None:
    with statelog.ui(query.location, redact_keys=True) as served:
        for show in ("rows", "history"):
            rows = look_up(served, state="value", key=f'[77, "{EVIL}"]', show=show)
            places = [place for place, name in enumerate(rows[0]) if name.startswith("key_")]
            assert len(places) == 2
            assert {rows[1][place] for place in places} == {"\N{BULLET}" * 3}


def test_a_page_that_is_closed_is_gone(query: Story) -> None:
    with statelog.ui(query.location) as served:
        assert ask(served)[0].status == 200
    served.wait()
    with pytest.raises(ConnectionError):
        ask(served)


def test_a_port_that_is_taken_is_an_error(query: Story, page: statelog.PageServer) -> None:
    with pytest.raises(statelog.ConfigurationError, match="cannot be served"):
        statelog.ui(query.location, port=urlsplit(page.url).port or 0)


def test_what_is_no_query_is_an_error() -> None:
    with pytest.raises(statelog.ConfigurationError, match="neither a query"):
        statelog.ui(7)  # type: ignore[arg-type]


def test_a_notebook_shows_the_page_in_a_frame_without_rights(query: Story, tmp_path: Path) -> None:
    shown = statelog.show(query.location)
    html = shown.html
    [text] = re.findall(r'^<iframe sandbox srcdoc="([^"]*)"', html)
    statelog.report(query.location, tmp_path / "page.html")
    made = re.compile(r"as of [^<]*")
    assert made.sub("", unescape(text)) == made.sub("", (tmp_path / "page.html").read_text())
    [operator] = statelog.stats(query.location)
    assert f"checkpoint {operator.batch} of" in repr(shown)
