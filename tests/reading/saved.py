"""Savepoints of operators without a query of Spark's."""

from __future__ import annotations

from pathlib import Path

from statelog.history.query_history import read_history
from statelog.log.open import open_location
from statelog.queries.save import save_operator
from statelog.reading.rows import PART_BYTES, one_by_one
from statelog.reading.savepoint import Manifest
from statelog.runs.byte_slices import BUDGET


def save(
    location: str,
    target: Path,
    batch: int,
    *,
    part_bytes: int = PART_BYTES,
    slice_bytes: int = BUDGET.slice_bytes,
    **texts: dict[str, str],
) -> Manifest:
    """Save the operators of a location at a checkpoint, in parts and row groups of about these sizes.

    `texts` are Spark's offsets and commits, none by default.
    """
    query = read_history(open_location(location))
    saved = [
        save_operator(
            query.histories[identity],
            batch,
            uid,
            location=location,
            target=str(target),
            run_all=one_by_one,
            part_bytes=part_bytes,
            slice_bytes=slice_bytes,
        )
        for uid, identity in sorted(query.names_at(batch).items())
    ]
    noted = {"offsets": {}, "commits": {}, **texts}
    manifest = Manifest(batch=batch, query_id="query", taken_ms=0, sources=[], operators=saved, **noted)
    manifest.write(open_location(str(target)))
    return manifest
