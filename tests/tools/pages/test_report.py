"""``statelog.report``: its numbers are those of other functions and of the files; damage and HTML do it no harm."""

from __future__ import annotations

import itertools
import random
import re
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

import statelog
from statelog import StorageError
from statelog.__main__ import main
from statelog.reading.savepoint import Manifest
from statelog.runs.schema import encode_schema
from statelog.storage import LocalStore, ObjectInfo
from statelog.storage.store import StoreWrapper
from statelog.tools.pages.charts import Column, axis_steps, bar_chart
from statelog.tools.pages.live import watch
from statelog.tools.pages.model import PageModel, read_page
from statelog.tools.pages.operator_charts import binned
from statelog.tools.pages.operator_model import OperatorModel, read_operators
from statelog.tools.pages.render import render
from statelog.tools.pages.savepoint_list import SavepointFolders, SavepointList
from tests.reading.story import STATES, Story
from tests.short_log import ShortLog
from tests.stored_query import StoredQuery
from tests.tools.pages.queries import log_files, materialized

pytest.importorskip("jinja2", reason="jinja2 is not installed")


@pytest.fixture(scope="module")
def query(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Not to be changed."""
    return materialized(tmp_path_factory.mktemp("page") / "query")


def page_of(location: str) -> PageModel:
    return read_page(watch(location)())


def model_of(location: str) -> OperatorModel:
    [found] = page_of(location).operators
    return found


def html_of(location: str, target: Path) -> str:
    statelog.report(location, target / "page.html")
    return (target / "page.html").read_text()


def test_sizes_are_those_of_other_functions(query: Story) -> None:
    found, [measured] = model_of(query.location), statelog.stats(query.location)
    listed = {one.batch: one for one in statelog.list_checkpoints(query.location)}
    retained = {row.batch: row for row in found.checkpoints if row.is_retained}
    assert retained.keys() == listed.keys() == {8, 9, 10, 11}
    newest = retained[11].sizes
    assert newest.base_bytes is not None
    assert newest.base_bytes > 0
    assert (newest.base_bytes, newest.log_bytes, newest.files) == (
        measured.base_bytes, measured.log_bytes, measured.files,
    )  # fmt: skip
    assert newest.kept_bytes == statelog.verify(query.location).stored_bytes
    assert found.stored_bytes == measured.stored_bytes
    assert found.storage_overhead == measured.storage_overhead == measured.stored_bytes / measured.state_bytes
    assert not found.problems


def test_each_checkpoint_has_the_sizes_that_it_had_when_it_was_the_newest(tmp_path: Path) -> None:
    made = materialized(tmp_path / "query", retained_checkpoints=30)
    measured: dict[int, tuple[int, int, int]] = {}
    kept: dict[int, int] = {}
    for _ in range(8):
        made.run_batches(1, random.Random(len(made.models)))
        [one] = statelog.stats(made.location)
        measured[one.batch] = one.base_bytes, one.log_bytes, one.files
        kept[one.batch] = statelog.verify(made.location).stored_bytes
    rows = {row.batch: row.sizes for row in model_of(made.location).checkpoints}
    assert {batch: (rows[batch].base_bytes, rows[batch].log_bytes, rows[batch].files) for batch in measured} == measured
    assert {batch: rows[batch].kept_bytes for batch in kept} == kept


def test_a_log_without_materializations_is_measured_alike(tmp_path: Path) -> None:
    made = materialized(
        tmp_path / "query", max_log_to_base=1e9, materialization_interval_s=1e9, retained_checkpoints=12
    )
    found = model_of(made.location)
    assert {row.batch: row.sizes.state_bytes for row in found.checkpoints} == {
        one.batch: one.state_bytes for one in statelog.list_checkpoints(made.location)
    }
    files = [file.stat().st_size for file in (Path(made.location) / made.identity / "changes").rglob("*.run")]
    sizes = [row.sizes for row in found.checkpoints]
    assert [one.log_bytes for one in sizes][-1] == sum(files)
    assert all(one.storage_overhead == 1.0 for one in sizes), "every checkpoint needs all before it"
    assert [one.files for one in sizes] == [4 * (batch + 1) for batch in range(12)], "three changesets and an entry"


def test_changes_rows_and_subtasks_are_counted(query: Story) -> None:
    found = model_of(query.location)
    changes = Counter[int]()
    for state in STATES:
        changes.update(statelog.read_changes(query.location, state=state).read_all().column("batch").to_pylist())
    rows = {row.batch: row for row in found.checkpoints}
    assert changes
    assert {batch: rows[batch].changes for batch in changes} == changes
    assert {row.input_rows for row in found.checkpoints} == {40}
    assert found.restart is not None
    largest = max(found.subtasks, key=lambda one: one.state_bytes)
    assert (found.restart.largest_subtask, found.restart.largest_bytes) == (largest.subtask, largest.state_bytes)
    assert sum(one.state_bytes for one in found.subtasks) == found.newest.sizes.state_bytes
    assert sum(one.changed_bytes for one in found.subtasks) == sum(row.changed_bytes for row in found.checkpoints)


def test_a_restart_with_another_parallelism_reads_all_subtasks(query: Story, tmp_path: Path) -> None:
    made = query.copied(tmp_path / "query")
    made.start(2)
    made.run(12, [])
    found = model_of(made.location)
    assert [one.subtask for one in found.subtasks] == [0, 1]
    assert [row.epoch for row in found.checkpoints][-2:] == [1, 2]
    assert (
        found.newest.sizes.state_bytes
        == {one.batch: one.state_bytes for one in statelog.list_checkpoints(made.location)}[12]
    )


# ---- Damage ----


def test_a_damaged_log_is_named_and_the_rest_shown(query: Story, tmp_path: Path) -> None:
    made = query.copied(tmp_path / "query")
    damaged = log_files(made)[-2]
    data = bytearray(damaged.read_bytes())
    data[60] ^= 1
    damaged.write_bytes(data)
    found = model_of(made.location)
    assert damaged.name in found.problems[0]
    before = [row.batch for row in model_of(query.location).checkpoints]
    assert [row.batch for row in found.checkpoints] == [batch for batch in before if batch != 10]
    assert not any(row.is_retained for row in found.checkpoints)
    assert found.restart is None
    html = html_of(made.location, tmp_path)
    assert damaged.name in html
    assert ">State</h4>" not in html, "a chart without values"


def test_a_log_of_which_nothing_can_be_read_is_named(query: Story, tmp_path: Path) -> None:
    made = query.copied(tmp_path / "query")
    for file in log_files(made):
        file.write_bytes(bytes(file.stat().st_size - 1) + b"x")
    found = page_of(made.location)
    assert found.operators == ()
    assert {place for place, _ in found.unread} == {made.location}
    assert any(log_files(made)[-1].name in problem for _, problem in found.unread)
    assert "The log cannot be read" in html_of(made.location, tmp_path)
    assert log_files(made)[-1].name in repr(statelog.show(made.location))


def test_objects_that_are_gone_or_short_are_named(query: Story, tmp_path: Path) -> None:
    made = query.copied(tmp_path / "query")
    newest = [
        file for file in sorted((Path(made.location) / made.identity / "changes").rglob("*.run")) if "11" in file.stem
    ]
    newest[0].unlink()
    newest[1].write_bytes(newest[1].read_bytes()[:-1])
    gone, short = model_of(made.location).problems
    assert newest[0].name in gone
    assert "is gone" in gone
    assert newest[1].name in short
    assert f"{newest[1].stat().st_size:,} bytes" in short


def test_a_damaged_pin_is_named(query: Story, tmp_path: Path) -> None:
    made = query.copied(tmp_path / "query")
    kept = statelog.pin(made.location, at=9, lasts_s=None, owner="audit")
    assert [row.batch for row in model_of(made.location).checkpoints if row.pinned_by == ("audit",)] == [9]
    (Path(made.location) / kept.name).write_bytes(b"{}")
    found = model_of(made.location)
    assert len(found.problems) == 1
    assert kept.name in found.problems[0]


def test_what_was_taken_back_is_told(query: Story, tmp_path: Path) -> None:
    made = query.copied(tmp_path / "query")
    kept = [statelog.pin(made.location, at=batch, lasts_s=None, owner=f"of {batch}") for batch in (8, 10)]
    made.go_back(9)
    made.run_batches(2, random.Random(3))
    found = model_of(made.location)
    assert [(pin.name, pin.is_on_line) for pin in found.pins] == [(kept[0].name, True), (kept[1].name, False)]
    assert {row.batch: row.pinned_by for row in found.checkpoints if row.batch >= 8} == {
        8: ("of 8",), 9: (), 10: (), 11: (),
    }  # fmt: skip
    assert not found.problems
    html = html_of(made.location, tmp_path)
    assert html.count("taken back</span>") == 1


# ---- The page ----


def test_html_in_values_is_text(query: Story, tmp_path: Path) -> None:
    made = query.copied(tmp_path / "<i>query")
    statelog.pin(made.location, at=11, lasts_s=None, owner="<script>alert(1)</script>")
    html = html_of(made.location, tmp_path)
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "<i>query" not in html


def test_the_page_loads_nothing(query: Story, tmp_path: Path) -> None:
    html = html_of(query.location, tmp_path)
    assert not re.findall(r"(?:src|href)=\"(?!#)|url\(|@import|https?:", html)
    assert "default-src &#39;none&#39;" in html


@pytest.mark.parametrize("batches", [600, pytest.param(10_000, marks=pytest.mark.extended)])
def test_many_checkpoints_make_a_small_page(batches: int) -> None:
    key_schema = encode_schema(pa.schema([("a", pa.int64())]))
    made = ShortLog(batches, key_schema=key_schema, max_file_bytes=1 << 17)
    store = _Counted(made.store)
    [found] = read_operators(store, "place", 10_000.0).operators
    assert len(found.checkpoints) == batches
    sizes = [info.size_bytes for info in made.store.list("log/")]
    assert store.requests <= sum(3 + size // (32 << 10) for size in sizes), "only the log is read, in large pieces"
    page = render(PageModel("place", 0, (found,)))
    assert len(page) < 500_000
    assert f"{batches - 500:,} older ones" in page


class _Counted(StoreWrapper):
    requests = 0

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        self.requests += 1
        return super().read(name, offset=offset, length=length)


def test_bins_have_the_largest_values() -> None:
    series = [(7 * number) % 1000 for number in range(1000)]
    found = binned(series, [lambda one: one], 90)
    assert len(found) == 90
    assert (found[0].first, found[-1].last) == (0, 999)
    assert all(one.last + 1 == after.first for one, after in itertools.pairwise(found))
    assert [one.values[0] for one in found] == [max(series[one.first : one.last + 1]) for one in found]
    assert [one.values for one in binned([None, 3.0], [lambda one: one], 1)] == [(3.0,)]


@pytest.mark.parametrize(
    ("largest", "steps"),
    [
        (0, [0, 1]),
        (1, [0, 0.25, 0.5, 0.75, 1]),
        (40, [0, 10, 20, 30, 40]),
        (41, [0, 20, 40, 60]),
        (870, [0, 250, 500, 750, 1000]),
    ],
)
def test_axes_have_round_numbers(largest: float, steps: list[float]) -> None:
    assert axis_steps(largest) == pytest.approx(steps)


def test_bars_are_stacked_from_the_axis_to_their_values() -> None:
    chart = bar_chart("", [Column("3", (10.0, 30.0)), Column("4", (None, 20.0))], str, legend=("a", "b"))
    zero, top = chart.y_ticks[0].at, chart.y_ticks[-1].at
    heights = [bar.height / (zero - top) * 40 for bar in chart.bars]
    assert heights == pytest.approx([10, 30, 20], abs=0.1)
    assert chart.bars[0].y + chart.bars[0].height == pytest.approx(zero)
    assert chart.bars[1].y + chart.bars[1].height == pytest.approx(chart.bars[0].y)


def test_a_location_without_state_and_one_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(statelog.ConfigurationError, match="holds no state"):
        statelog.report(tmp_path, tmp_path / "page.html")
    assert "No checkpoint yet" in html_of(Story(tmp_path / "query").location, tmp_path)


def test_all_operators_and_a_savepoint_have_a_page(tmp_path: Path) -> None:
    made = StoredQuery(tmp_path).run(["first", "second"], range(3))
    found = page_of(str(made.checkpoint))
    assert [one.uid for one in found.operators] == ["first", "second"]
    for one, measured in zip(found.operators, statelog.stats(made.checkpoint), strict=True):
        assert [row.batch for row in one.checkpoints] == [0, 1, 2]
        assert (one.stored_bytes, one.newest.sizes.state_bytes) == (measured.stored_bytes, measured.state_bytes)
    statelog.savepoint(made.checkpoint, tmp_path / "saved")
    saved = page_of(str(tmp_path / "saved")).savepoint
    assert saved is not None
    assert saved.batch == 2
    assert {(one.uid, one.state, one.rows) for one in saved.tables} >= {("first", "value", 1), ("second", "list", 3)}
    assert "Savepoint of batch 2" in html_of(str(tmp_path / "saved"), tmp_path)


def test_savepoints_of_the_query_are_listed(tmp_path: Path) -> None:
    made = StoredQuery(tmp_path / "one").run(["first"], range(3))
    elsewhere = tmp_path / "elsewhere"
    beside = statelog.savepoint(made.checkpoint, made.checkpoint / "savepoints" / "monday")
    given = statelog.savepoint(made.checkpoint, elsewhere / "tuesday", batch=1)
    statelog.restore(given.target, tmp_path / "restored")
    other = statelog.savepoint(tmp_path / "restored", elsewhere / "other")
    for name in ("torn", "begun"):
        (elsewhere / name).mkdir()
    (elsewhere / "torn" / "manifest.json").write_text("{}")
    (elsewhere / "begun" / "unfinished").write_bytes(b"token")

    def found(location: Path, folder: Path) -> SavepointList:
        page = read_page(watch(location)(), SavepointFolders([f"{folder}/"]))
        assert page.savepoints is not None
        return page.savepoints

    listed = found(made.checkpoint, elsewhere)
    assert listed.folders == (str(elsewhere), str(made.checkpoint / "savepoints"))
    assert {(row.place, row.batch, row.operators) for row in listed.found} == {
        (beside.target, 2, ("first",)), (given.target, 1, ("first",)),
    }  # fmt: skip
    for row in listed.found:
        files = [file for file in Path(row.place).rglob("*") if file.is_file() and file.name != "manifest.json"]
        assert row.size_bytes == sum(file.stat().st_size for file in files)
    assert [row.rows for row in listed.found if row.batch == 2] == [sum(beside.rows["first"].values())]
    assert (listed.others, listed.unfinished) == (1, (str(elsewhere / "begun"),))
    assert len(listed.problems) == 1
    assert f"{elsewhere}/torn" in listed.problems[0]
    assert [row.place for row in found(made.checkpoint / "statelog", Path(given.target)).found] == [
        row.place for row in listed.found
    ]
    assert [row.place for row in found(made.checkpoint, Path(beside.target)).found] == [beside.target]
    of_restored = found(tmp_path / "restored", elsewhere)
    assert ([row.place for row in of_restored.found], of_restored.others) == ([other.target], 1)
    assert (
        main(["report", str(made.checkpoint), "-o", str(tmp_path / "page.html"), "--savepoints", str(elsewhere)]) == 0
    )
    html = (tmp_path / "page.html").read_text()
    for text in (beside.target, given.target, "1 savepoint of other queries", "Savepoints that cannot be read"):
        assert text in html


def test_a_manifest_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = StoredQuery(tmp_path / "one").run(["first"], range(3))
    saved = statelog.savepoint(made.checkpoint, made.checkpoint / "savepoints" / "monday")
    folders = SavepointFolders([])
    first = folders.find([str(made.checkpoint)], {saved.query_id})
    monkeypatch.setattr(Manifest, "read", None)
    assert folders.find([str(made.checkpoint)], {saved.query_id}) == first
    assert len(first.found) == 1


def test_a_folder_of_savepoints_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(store: LocalStore, prefix: str = "") -> list[ObjectInfo]:
        raise StorageError(f"{store!r} cannot be listed.")

    monkeypatch.setattr(LocalStore, "list", refuse)
    listed = SavepointFolders([]).find([str(tmp_path)], {"query"})
    assert listed.found == ()
    assert len(listed.problems) == 1
    assert "cannot be listed" in listed.problems[0]


def test_a_folder_of_savepoints_that_is_no_location_is_an_error(query: Story) -> None:
    with pytest.raises(statelog.ConfigurationError, match="elsewhere"):
        statelog.report(query.location, "page.html", savepoints=["elsewhere://bucket"])


def test_the_command_writes_the_page(query: Story, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "page.html"
    assert main(["report", query.location, "-o", str(target)]) == 0
    assert target.read_text().startswith("<!doctype html>")
    for directory in ("none", "page.html"):
        assert main(["report", query.location, "-o", str(tmp_path / directory / "page.html")]) == 1
        error = capsys.readouterr().err
        assert f"{directory}/page.html cannot be written: " in error
        assert "Hint: Name a file in a directory that exists" in error
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_without_the_extra_the_error_names_it(
    query: Story, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["report", query.location, "-o", "page.html"]) == 1
    assert "pip install 'statelog[ui]'" in capsys.readouterr().err
