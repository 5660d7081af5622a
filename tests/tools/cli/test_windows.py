"""Commands show windows as any other state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import statelog
from statelog import SlidingWindows
from statelog.__main__ import main
from statelog.testing.harness import parts_of
from tests.model.windows_model import instant, window_harness
from tests.reading.saved import save

HEAD = ["key_user", "window_start", "window_end", "is_complete"]


@pytest.fixture
def location() -> Iterator[str]:
    """A window of 6 ms begins every 3 ms; the watermark is at 4, so the windows of -3 and 0 and of 3 and 6 are open."""
    with window_harness(SlidingWindows(6, 3), "agg", watermark=statelog.Watermark("time", 0)) as harness:
        harness.push([("ann", instant(1), 10), ("bob", instant(4), 20)])
        harness.push([("ann", instant(4), 30)])
        yield parts_of(harness).query.location


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_windows_are_shown_found_and_exported(
    location: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(location, tmp_path / "saved", 1)
    for place in (location, str(tmp_path / "saved")):
        assert main(["show", place, "--json"]) == 0
        states = {one["state"]: one for one in json.loads(capsys.readouterr().out)["states"]}
        assert (states["windows"]["kind"], states["window.panes"]["kind"]) == ("windows", "map")
        assert [column.split()[0] for column in states["windows"]["columns"][:4]] == HEAD
        assert main(["scan", place, "--json", "--columns", "key_user,value_count,value_sum(n)"]) == 0
        rows = sorted(tuple(row.values()) for row in lines(capsys))
        assert rows == [("ann", 1, 30), ("ann", 2, 40), ("bob", 1, 20), ("bob", 1, 20)]
        assert main(["get", place, "ann", "--state", "windows", "--json"]) == 0
        found = lines(capsys)
        assert [list(row)[:4] for row in found] == [HEAD, HEAD]
        assert [row["value_count"] for row in found] == [2, 1]
        assert main(["scan", place]) == 0
        assert "window_start" in capsys.readouterr().out
        target = tmp_path / f"{Path(place).name}.parquet"
        assert main(["export", place, str(target), "--state", "windows"]) == 0
        capsys.readouterr()
        table = pq.read_table(target)
        assert table.num_rows == 4
        assert set(table["window_start"].to_pylist()) == {instant(0), instant(3)}
