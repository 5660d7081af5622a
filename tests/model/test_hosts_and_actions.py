"""Long runs whose subtasks move from host to host, and whose micro-batches have several actions.

Every answer is compared with plain dictionaries, and at the end all state is read by a run on hosts without files.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.model.random_query import RandomQuery

BATCHES = 90


@pytest.fixture
def long_runs() -> Iterator[list[RandomQuery]]:
    runs: list[RandomQuery] = []
    yield runs
    for run in runs:
        run.harness.close()


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_when_subtasks_move_from_host_to_host(long_runs: list[RandomQuery], seed: int) -> None:
    """What a job has left on a host is of no use once another host has materialized the state."""
    options = {"retained_checkpoints": 2 + seed % 2, "materialization_interval_s": (3.0, 8.0)[seed // 2 % 2]}
    long_runs.append(run := RandomQuery(seed, hosts=3, options=options))
    for batch in range(BATCHES):
        run.clock.advance(run.random.choice([0.0, 1.0, 3.0]))
        run.run_batch(batch)
        if batch % 3 == 0:
            assert run.files.missing(run.retained) == {}, f"batch {batch}, seed {seed}"
    assert run.moves > BATCHES
    run.compare_all()


@pytest.mark.parametrize("changelog", [True, False])
@pytest.mark.parametrize("actions", [1, 2, 3])
def test_bases_advance_however_many_actions_a_batch_has(
    long_runs: list[RandomQuery], actions: int, changelog: bool
) -> None:
    """Every materialization lands, so the log is cut, files stay few, and a subtask may begin the next one."""
    options = {"retained_checkpoints": 3, "materialization_interval_s": 0.0, "changelog": changelog}
    long_runs.append(run := RandomQuery(actions, options=options))
    through: list[int] = []
    for batch in range(40):
        run.run_batch(batch, actions)
        record = run.files.history.latest_record
        assert record is not None
        through.append(record.base_map.through if record.base_map else -1)
        assert run.files.missing(run.retained) == {}, f"batch {batch}"
        assert run.files.count("changes") <= 8 * run.parallelism, f"batch {batch}: the log is not cut"
        assert len(run.files.unreferenced) <= 4 * run.parallelism, f"batch {batch}: what is stored is not used"
    lag = max(batch - base for batch, base in enumerate(through) if batch >= 4)
    assert lag <= 6, f"bases stand still: {through}"
    run.compare_all()
