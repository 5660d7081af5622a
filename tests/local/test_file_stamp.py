"""A file counts as it was written only while its bytes cannot be others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash

from statelog.local.runs import FILE_STAMPS, FileStamps


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.write_bytes(b"some bytes")
    return path


def test_a_file_that_nobody_marked_is_not_trusted(written: Path) -> None:
    assert not FILE_STAMPS.is_stamped(written)
    FILE_STAMPS.stamp(written)
    assert FILE_STAMPS.is_stamped(written)


def test_a_file_that_was_written_again_is_not_trusted(written: Path) -> None:
    FILE_STAMPS.stamp(written)
    written.write_bytes(b"same size!")
    assert not FILE_STAMPS.is_stamped(written)


def test_other_bytes_with_the_old_time_are_noticed_by_their_number(written: Path) -> None:
    """As a copying tool leaves them that was interrupted."""
    FILE_STAMPS.stamp(written)
    status = written.stat()
    written.write_bytes(b"some byte")
    os.utime(written, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not FILE_STAMPS.is_stamped(written)


def test_the_mark_of_one_second_is_none_of_another(written: Path) -> None:
    FILE_STAMPS.stamp(written)
    status = written.stat()
    os.utime(written, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
    assert not FILE_STAMPS.is_stamped(written)


def test_a_mark_is_told_from_a_time_without_a_fraction(written: Path) -> None:
    """File systems that keep whole seconds would otherwise mark every file."""
    os.utime(written, ns=(0, 1_700_000_000 * 10**9))
    assert not FILE_STAMPS.is_stamped(written)


def test_without_an_id_of_the_boot_nothing_is_marked(written: Path) -> None:
    stamps = FileStamps(written.with_name("none"))
    before = written.stat().st_mtime_ns
    stamps.stamp(written)
    assert written.stat().st_mtime_ns == before
    assert not stamps.is_stamped(written)
    nameless = f"None {before // 10**9} {written.stat().st_size}"
    seconds = before // 10**9 * 10**9
    forged = seconds + xxhash.xxh3_64_intdigest(nameless.encode()) % 10**9
    os.utime(written, ns=(before, forged))
    assert not stamps.is_stamped(written), "what would be the mark of a system that says no id"


def test_a_boot_ends_all_marks(written: Path, tmp_path: Path) -> None:
    stamps = FileStamps(tmp_path / "boot")
    (tmp_path / "boot").write_text("one")
    stamps.stamp(written)
    assert stamps.is_stamped(written)
    (tmp_path / "boot").write_text("two")
    assert not stamps.is_stamped(written)


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    for ask in (FILE_STAMPS.stamp, FILE_STAMPS.is_stamped):
        with pytest.raises(FileNotFoundError):
            ask(tmp_path / "gone")
