"""Savepoints of operators without a query of Spark's."""

from __future__ import annotations

from pathlib import Path

from statelog.checkpoint.history import History
from statelog.checkpoint.query_operators import operators_of
from statelog.log.open import open_location, open_log
from statelog.options import Options
from statelog.reading.manifest import Manifest
from statelog.reading.parts import one_by_one
from statelog.reading.scan import PART_BYTES
from statelog.runs.byte_slices import BUDGET
from statelog.savepoints.save import save_operator
from statelog.testing.clock import ManualClock


def save(
    location: str,
    target: Path,
    batch: int,
    *,
    part_bytes: int = PART_BYTES,
    slice_bytes: int = BUDGET.slice_bytes,
) -> Manifest:
    """Save the operators of a location at a checkpoint, in parts and row groups of about these sizes."""
    store = open_location(location)
    saved = [
        save_operator(
            History(open_log(store, uid, Options(), ManualClock()).read()),
            batch,
            uid,
            location=location,
            target=str(target),
            run_all=one_by_one,
            part_bytes=part_bytes,
            slice_bytes=slice_bytes,
        )
        for uid in operators_of(store)
    ]
    manifest = Manifest(batch=batch, query_id="query", taken_ms=0, offsets={}, commits={}, sources=[], operators=saved)
    manifest.write(open_location(str(target)))
    return manifest
