"""Long calls tell whoever watches them how many bytes they must read, and in the end have read them."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import statelog
from statelog.progress import tracked, watching
from statelog.reading.open import open_logged
from statelog.reading.rows import cut_parts, one_by_one, part_sizes
from tests.reading.saved import save
from tests.reading.story import Story
from tests.stored_query import StoredQuery


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """A query that materializes nothing and retains all, so that every changeset counts."""
    made = Story(
        tmp_path_factory.mktemp("story") / "query", inline_budget_bytes=0, file_merging="off", retained_checkpoints=20
    )
    made.run_batches(6, random.Random(1))
    return made


def bytes_of(call: Callable[[], Any]) -> int:
    """The bytes that a call has told, all of which are done."""
    with watching() as progress:
        call()
    assert progress.done_bytes == progress.known_bytes
    return progress.known_bytes


def changed(story: Story, first: int, last: int) -> int:
    """The bytes of the changesets of some batches."""
    files = (Path(story.location) / story.identity / "changes").rglob("*.run")
    return sum(file.stat().st_size for file in files if first <= int(file.name.partition("-")[0]) <= last)


def test_readers_tell_the_stored_bytes(story: Story) -> None:
    at, whole = story.location, changed(story, 0, 5)
    assert bytes_of(lambda: statelog.read_state(at, state="map").read_all()) == whole
    assert bytes_of(lambda: statelog.stats(at, scan=True)) == whole
    assert bytes_of(lambda: statelog.verify(at)) == whole
    assert bytes_of(lambda: statelog.compare(at, at)) == 3 * 2 * whole, "three states of both"
    assert bytes_of(lambda: statelog.read_changes(at, state="map", after=2, up_to=4).read_all()) == changed(story, 3, 4)
    assert bytes_of(lambda: statelog.read_diff(at, 1, 4, state="map").read_all()) == changed(story, 2, 4)


def test_a_difference_of_whole_states_tells_both(tmp_path: Path) -> None:
    query = Story(
        tmp_path / "query",
        inline_budget_bytes=0,
        file_merging="off",
        retained_checkpoints=2,
        materialization_interval_s=0.0,
        max_log_to_base=0.0,
        log_min_age_s=0.0,
    )
    query.run_batches(4, random.Random(1))
    statelog.pin(query.location, at=3, lasts_s=None, owner="test")
    query.run_batches(12, random.Random(2))
    both = [
        part_sizes(cut_parts(source.history, source.checkpoint))
        for source in (open_logged(query.location, None, at) for at in (3, 15))
    ]
    read = bytes_of(lambda: statelog.read_diff(query.location, 3, 15, state="map").read_all())
    assert read == sum(map(sum, both)) > 0


def test_savepoints_tell_what_is_read_and_what_is_restored(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path).run(["one", "two"], range(3))
    [one, two] = statelog.list_operators(query.checkpoint)
    saved = tmp_path / "saved"
    assert bytes_of(lambda: statelog.savepoint(query.checkpoint, saved)) == one.state_bytes + two.state_bytes
    sizes = {file: file.stat().st_size for file in saved.rglob("*.parquet") if pq.read_metadata(file).num_rows}
    [table] = saved.glob("operators/one/states/value/*.parquet")
    assert bytes_of(lambda: statelog.read_state(saved, "one", "value").read_all()) == sizes[table]
    assert bytes_of(lambda: statelog.restore(saved, tmp_path / "restored")) == sum(sizes.values())


def test_parts_share_the_bytes_of_their_files(story: Story, tmp_path: Path) -> None:
    """Files of several parts count once; and each part is done when it was written."""
    source = open_logged(story.location, None, None)
    parts = cut_parts(source.history, source.checkpoint, part_bytes=1000)
    sizes = part_sizes(parts)
    assert len(sizes) == len(parts) > 10
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == changed(story, 0, 5)
    assert bytes_of(lambda: save(story.location, tmp_path / "saved", 5, part_bytes=1000)) == sum(sizes)


def test_what_is_done_grows_item_by_item() -> None:
    with watching() as progress:
        seen = one_by_one(
            lambda item: (item, progress.done_bytes), [1, 2, 3], lambda items: [10 * one for one in items]
        )
        assert seen == [(1, 0), (2, 10), (3, 30)]
        assert (progress.done_bytes, progress.known_bytes) == (60, 60)
        [*tracked([4], lambda items: [5])]
        assert (progress.done_bytes, progress.known_bytes) == (65, 65)


def test_only_calls_within_the_block_and_its_thread_are_watched() -> None:
    def refuse(items: Any) -> list[int]:
        raise AssertionError("nobody watches")

    assert [*tracked([1, 2], refuse)] == [1, 2]
    with watching() as progress, watching() as inner:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: [*tracked([1], refuse)]).result() == [1]
        [*tracked([1], lambda items: [7])]
    assert (progress.known_bytes, inner.known_bytes) == (0, 7)
