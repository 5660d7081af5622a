"""Keys, values and names that would control a terminal or a page: they are shown as escapes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pytest

import statelog
from statelog.__main__ import main
from statelog.shown import plain_text
from statelog.tools.cli.shown import cell_text, show_rows, show_table
from tests.model.engine import Engine
from tests.reading.story import hash_of

EVIL = [
    *("\x1b]52;c;cm0gLXJmIH4=\x1b\\", "\x1b[2J\x1b[31mPAID\x1b[0m", "\x9b2J", "a\nWARN forged line", "\u202egnp.exe"),
    *("[bold red]x[/bold red]", "<script>alert(1)</script>", "\x00nul", "\r\x08\x7f"),
]
UID = "<b>op\x1b[31m\u202e"
COMMANDS = [
    *(["ls"], ["show"], ["stats"], ["verify"], ["pins"], ["scan", "--state", "value"], ["scan", "--state", "map"]),
    *(["scan", "--state", "list"], ["changes", "--state", "map"], ["changes", "--state", "list"]),
    *(["get", json.dumps([0, EVIL[0]]), "--state", "value"], ["history", json.dumps([1, EVIL[1]]), "--state", "list"]),
    *(["diff", "0", "1", "--state", "list"], ["scan", "--state", "\x1b[2J"]),
]


@pytest.fixture(scope="module")
def location(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A query whose uid, keys and values are hostile."""
    engine = Engine(tmp_path_factory.mktemp("hostile"), hash_of, uid=UID)
    engine.start(1, 0)
    for batch, text in enumerate(EVIL):
        key = (batch, text)
        engine.run_commands(batch, 0, [(key, ("append", text)), (key, ("set", batch)), (key, ("put", text, batch))])
    engine.coordinator.close()
    return str(engine.location)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: plain_text(" ".join(command[::2])))
def test_no_command_writes_control_characters(
    command: list[str], as_json: bool, location: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main([command[0], location, *command[1:], *(["--json"] if as_json else [])])
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert text
    assert [line for line in text.split("\n") if plain_text(line) != line] == []


def test_a_table_shows_headings_and_cells_as_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    """Names of columns come from a store, too."""
    show_table(EVIL, [EVIL])
    text = capsys.readouterr().out
    assert [line for line in text.split("\n") if plain_text(line) != line] == []
    assert r"\x1b[2J\x1b[31mPAID\x1b[0m" in text


def test_a_value_stays_on_its_line(location: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["scan", location, "--state", "list"])
    shown = capsys.readouterr().out
    assert shown.count(r"a\nWARN forged line") == 2, "as key and as value"
    assert cell_text("owner", "a\nWARN") == cell_text("uids", ("a\nWARN",)) == r"a\nWARN"


def test_a_notebook_shows_escapes_as_text(location: str) -> None:
    text = repr(statelog.show(location))
    assert r"<b>op\x1b[31m\u202e: checkpoint" in text
    assert [line for line in text.split("\n") if plain_text(line) != line] == []


def test_json_has_the_values_as_they_are(location: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scan", location, "--state", "list", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(row["key_b"] for row in rows) == sorted(EVIL)
    assert all(row["value_field"] == row["key_b"] for row in rows)


def test_the_page_has_neither_markup_nor_control_characters_of_theirs(location: str, tmp_path: Path) -> None:
    statelog.report(location, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", page) == []
    assert "<b>op" not in page
    assert r"&lt;b&gt;op\x1b[31m\u202e" in page


def test_values_that_python_lacks_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """A date after the year 9999, which Spark and Arrow have."""
    day = pa.array([3_000_000], pa.int32()).cast(pa.date32())
    days = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), day)
    rows = pa.RecordBatch.from_pydict({"day": day, "days": days, "n": pa.array([1])})
    for as_json in (True, False):
        show_rows(pa.RecordBatchReader.from_batches(rows.schema, [rows]), as_json=as_json)
        shown = capsys.readouterr().out
        assert re.search(r"10183-\d\d-\d\d", shown)
        assert "a value that Python lacks" in shown
