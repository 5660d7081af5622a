"""What the tests of :mod:`tests.local.test_local_runs` and others share."""

from __future__ import annotations

from tests.model.engine import Engine, Key


def read(engine: Engine, batch: int, *keys: Key) -> dict[Key, list[object]]:
    engine.new_workers()
    outputs = engine.run_commands(batch, 0, [(key, ("read",)) for key in keys])
    return {(key[0], key[1]): found for key, found in outputs}
