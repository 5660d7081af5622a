"""The count on several engines, without any of them: input, written counts, and what the check finds."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import click
import numpy as np
import pytest

from benchmarks import peers
from benchmarks.frame import Result, Unavailable
from benchmarks.peers import Settings, rates, table_row
from benchmarks.peers.files import Counts, Lines, Verdict, covered_rows
from benchmarks.peers.programs import BYTEWAX, PYFLINK, Program, Sample
from benchmarks.skew import HOT, SKEWS, UNIFORM

KEYS = 100

COUNTING = """
import json, os, sys, time
from collections import Counter
from pathlib import Path

source, output, checkpoint = map(Path, sys.argv[1:4])
flaw, pause_s = sys.argv[4], float(sys.argv[5])
state = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"files": 0, "counts": {}}
files, counts = state["files"], Counter(state["counts"])
if files and flaw == "reads a file again":
    files -= 1
if files and flaw == "leaves a file out":
    files += 1
if files and flaw == "forgets counts":
    counts.clear()
with (output / "counts").open("w") as lines:
    for number, file in list(enumerate(sorted(source.iterdir())))[files:]:
        for key in file.read_text().split():
            counts[key] += 1
            lines.write(f"{key},{counts[key]}\\n")
        lines.flush()
        if flaw != "makes no checkpoint":
            checkpoint.with_name("new").write_text(json.dumps({"files": number + 1, "counts": counts}))
            checkpoint.with_name("new").rename(checkpoint)
        time.sleep(pause_s)
        while pause_s and time.process_time() < 0.02 * (number + 3 - files):
            pass  # work
if flaw == "never ends":
    time.sleep(3600)
"""
"""An engine in small: counts lines, with a checkpoint after each file."""


def counts_of(folder: Path, text: str, numbers_per_line: int = 2) -> Counts:
    counts = Counts(folder, KEYS, numbers_per_line)
    (folder / "file").write_text(text)
    counts.look()
    return counts


def found(counts: Counts) -> dict[int, int]:
    return {key: n for key, n in enumerate(counts.last.tolist()) if n}


class TestLines:
    @pytest.mark.parametrize("skew", SKEWS.choices)
    def test_files_have_the_rows_that_are_counted(self, skew: str, tmp_path: Path) -> None:
        lines = Lines(rows=950, rows_per_file=100, keys=KEYS, skew=skew)

        lines.write(tmp_path / "input")

        files = sorted((tmp_path / "input").iterdir(), key=lambda file: file.stat().st_mtime)
        assert [len(file.read_text().splitlines()) for file in files] == [100] * 9 + [50]
        assert files == sorted(files)
        rows = Counter(int(line) for file in files for line in file.read_text().splitlines())
        assert rows == {key: n for key, n in enumerate(lines.counts().tolist()) if n}

    def test_the_first_rows_are_whole_files(self, tmp_path: Path) -> None:
        lines = Lines(rows=950, rows_per_file=100, keys=KEYS, skew=UNIFORM)
        lines.write(tmp_path / "input")

        fewer = lines.first(210)
        fewer.link(tmp_path / "input", tmp_path / "linked")

        assert (fewer.rows, fewer.counts().sum()) == (300, 300)
        linked = Counter(int(line) for file in (tmp_path / "linked").iterdir() for line in file.read_text().split())
        assert linked == {key: n for key, n in enumerate(fewer.counts().tolist()) if n}
        assert lines.first(10_000) == lines


class TestCounts:
    def test_are_read_as_files_grow_and_are_renamed(self, tmp_path: Path) -> None:
        counts = Counts(tmp_path / "output", KEYS, 2)
        hidden = counts.folder / "day" / ".part-0.inprogress"
        assert not counts.look()
        hidden.parent.mkdir()
        with hidden.open("w") as file:
            file.write("7,1\n8,1\n7,")
            file.flush()
            assert counts.look()
            assert (found(counts), counts.rows) == ({7: 1, 8: 1}, 2)
            assert not counts.look(), "a line that is not whole"
            file.write("2\n9,5\n")
        hidden.rename(hidden.with_name("part-0"))
        (counts.folder / ".part-0.crc").write_bytes(b"crc\x00 3 4\n")

        assert counts.look()

        assert found(counts) == {7: 2, 8: 1, 9: 5}
        assert {key: n for key, n in enumerate(counts.first.tolist()) if n} == {7: 1, 8: 1, 9: 5}

    @pytest.mark.parametrize(
        ("text", "numbers_per_line"),
        [
            ("+I[3, 1]\n-U[3, 1]\n+U[3, 2]\n+I[41, 1]\n", 2),
            ('data,n,time,diff\n"3","1",1700,1\n"3","1",1702,-1\n"3","2",1702,1\n"41","1",1702,1\n', 4),
        ],
    )
    def test_retractions_change_nothing(self, text: str, numbers_per_line: int, tmp_path: Path) -> None:
        assert found(counts_of(tmp_path / "output", text, numbers_per_line)) == {3: 2, 41: 1}

    def test_a_header_alone_has_no_counts(self, tmp_path: Path) -> None:
        assert found(counts_of(tmp_path / "output", "data,n,time,diff\n", 4)) == {}


class TestVerdict:
    RIGHT = np.bincount([1, 1, 1, 2, 2, 3], minlength=KEYS)

    def of(self, tmp_path: Path, before: str, after: str) -> Verdict:
        lives = [
            counts_of(tmp_path / name, text.replace(" ", "\n") + "\n")
            for name, text in (("before", before), ("after", after))
        ]
        return Verdict.of(self.RIGHT, *lives)

    def test_a_life_may_repeat_what_the_one_before_has_written(self, tmp_path: Path) -> None:
        verdict = self.of(tmp_path, "1,1 2,1 3,1 1,2", "1,2 1,3 2,2")

        assert verdict == Verdict(keys_after=2, wrong=0, missing=0, restored_rows=3)
        assert verdict.is_exact

    @pytest.mark.parametrize(
        ("before", "after", "wrong", "missing"),
        [
            ("1,1 2,1 3,1", "1,2 1,3 1,4 2,2", 1, 0),
            ("1,1 2,1 3,1", "1,1 1,2 2,2", 1, 0),
            ("1,3 2,1 3,1", "1,2 2,2", 1, 0),
            ("1,1 2,1", "1,2 1,3 2,2", 0, 1),
            ("1,1 2,1 3,1 4,1", "1,2 1,3 2,2", 0, 1),
            ("1,1 2,1 3,1", "1,2 1,3 2,2 5,1", 1, 0),
        ],
        ids=["doubled", "lost", "lost, but right before", "never written", "unknown before", "unknown after"],
    )
    def test_a_difference_is_found(self, before: str, after: str, wrong: int, missing: int, tmp_path: Path) -> None:
        verdict = self.of(tmp_path, before, after)

        assert (verdict.wrong, verdict.missing) == (wrong, missing)
        assert not verdict.is_exact

    def test_a_start_from_nothing_restores_nothing(self, tmp_path: Path) -> None:
        assert self.of(tmp_path, "1,1 1,2 2,1", "1,1 1,2 1,3 2,1 2,2 3,1").restored_rows == 0

    def test_rows_that_both_lives_cover_count_once(self, tmp_path: Path) -> None:
        before, after = counts_of(tmp_path / "before", "1,2\n2,1\n"), counts_of(tmp_path / "after", "1,3\n3,1\n")

        assert covered_rows(before, after) == 3 + 1 + 1


class TestRates:
    SAMPLES = (Sample(3.0, 100, 5.0), Sample(4.0, 260, 6.0), Sample(5.0, 500, 7.5), Sample(7.0, 860, 11.0))

    def test_leave_the_first_rows_out(self) -> None:
        assert rates(self.SAMPLES, 200) == {"measured_rows": 600, "rows_per_s": 200.0, "rows_per_cpu_s": 120.0}

    def test_counts_that_come_at_once_have_none(self) -> None:
        with pytest.raises(click.ClickException, match="there must be more rows"):
            rates(self.SAMPLES, 800)


def test_the_row_of_a_side() -> None:
    figures = {
        **{"rows": 8_000_000, "rows_per_s": 123_456.7, "rows_per_cpu_s": 65_432.1, "restart_s": 12.34},
        **{"restored_rows": 4_700_000, "keys_after": 950_000, "wrong": 0, "missing": 0},
    }

    assert table_row(BYTEWAX, figures) == {
        "side": "Bytewax",
        "rows": "8,000,000",
        "rows/s": "123,457",
        "rows/CPU s": "65,432",
        "restart s": "12.3",
        "rows restored": "4,700,000",
        "keys after restart": "950,000",
        "wrong": "0",
    }


class TestRun:
    def run(
        self,
        monkeypatch: pytest.MonkeyPatch,
        place: Path,
        flaw: str = "none",
        side: str = PYFLINK,
        pause_s: float = 0.2,
    ) -> Result:
        def program_of(name: str, parallelism: int, files_per_batch: int, checkpoint_s: float) -> Program:
            command = [sys.executable if name == side else "/missing/python", "-c", COUNTING]
            return Program(
                side=name,
                command=command,
                arguments=[flaw, str(pause_s)],
                settled_s=0.5 if flaw == "never ends" else None,
            )

        monkeypatch.setattr(peers, "program_of", program_of)
        settings = Settings(
            rows=3_000, slow_rows=1_000, keys=KEYS, skew=HOT, sides=(BYTEWAX, PYFLINK), rows_per_batch=200
        )
        return peers.run(settings, place)

    def test_a_side_is_killed_and_continues(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        result = self.run(monkeypatch, tmp_path)

        assert [(row["side"], row["rows"], row["wrong"]) for row in result.rows] == [(PYFLINK, "1,000", "0")]
        figures = result.figures["sides"][PYFLINK]
        assert 700 <= figures["killed_rows"] < 1_000
        assert figures["killed_rows"] - 200 <= figures["restored_rows"] <= figures["killed_rows"]
        assert figures["rows_per_s"] == pytest.approx(450, rel=0.3)
        assert result.remarks[-1].startswith("Left out: Bytewax: not installed; ./dev peers")

    def test_a_program_that_waits_for_more_is_ended(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        assert self.run(monkeypatch, tmp_path, "never ends").rows[0]["wrong"] == "0"

    @pytest.mark.parametrize("flaw", ["reads a file again", "leaves a file out", "forgets counts"])
    def test_wrong_counts_have_no_speed(self, flaw: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        with pytest.raises(click.ClickException, match="PyFlink, Python state has returned wrong counts"):
            self.run(monkeypatch, tmp_path, flaw)

    def test_a_start_from_nothing_is_no_restart(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        with pytest.raises(click.ClickException, match="had no recent checkpoint when it was killed"):
            self.run(monkeypatch, tmp_path, "makes no checkpoint")

    def test_a_program_that_is_too_fast_is_reported(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        with pytest.raises(click.ClickException, match="more rows"):
            self.run(monkeypatch, tmp_path, pause_s=0)

    def test_a_program_that_fails_shows_its_output(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        with pytest.raises(
            click.ClickException, match=r"PyFlink, Python state failed with exit code 1(.|\n)*ValueError"
        ):
            self.run(monkeypatch, tmp_path, pause_s=float("nan"))

    def test_without_any_peer_there_is_nothing_to_compare(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        with pytest.raises(Unavailable, match=r"Bytewax; PyFlink, Python state: not installed; \./dev peers"):
            self.run(monkeypatch, tmp_path, side="none")
