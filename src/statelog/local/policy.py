"""How much merging, materializing and table writing is done at once, and when it begins: one value, passed in."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final


@dataclass(frozen=True)
class MergePolicy:
    """The sizes and times that govern merging, materializing and filling tables.

    Merging local runs: small merges are done at once after a batch, larger ones and materializations in slices. A slice
    ends at a time or a size, whichever comes first. ValueError for a number that is not positive.
    """

    slice_s: float = 0.25
    """A slice of maintenance may add this much to a batch."""
    slice_rows: int = 262_144
    """Input rows that a job merges between two checks of the clock."""
    at_once_rows: int = 524_288
    """Rows of a merge that is done at once: about a fifth of a second."""
    at_once_bytes: int = 128 << 20
    """Bytes of a merge that is done at once."""
    smallest_tier_rows: int = 16_384
    """Runs up to this size are in the lowest tier of size-tiered merging."""
    group_runs: int = 64
    """Fetched runs that are merged before more are fetched."""
    group_bytes: int = 64 << 20
    """The bytes of fetched runs that are merged before more are fetched."""
    least_block_rows: int = 16_384
    """The fewest rows of a block of a restored run: a search looks into every block."""
    most_block_rows: int = 65_536
    """The most rows of such a block: its memory is reused, and getting new memory takes longer than merging."""
    blocks: int = 32
    """Blocks of a restored run before they become larger."""
    stored_run_bytes: int = 16 << 20
    """Bytes of a local run per stored run of a base: storing one takes about a tenth of a second."""
    small_log_bytes: int = 1 << 20
    """A log up to this size does not make a materialization due."""
    size_share: float = 0.025
    """The largest share of a subtask's time for materializations due to the log's size, by estimate."""
    materialized_bytes_per_s: float = 50e6
    """Estimated speed of materializing."""
    replay_bytes_per_s: float = 50e6
    """Estimated speed of replaying changes at a restart."""
    replay_checkpoint_s: float = 0.005
    """Estimated time that each checkpoint adds to the replay."""
    table_batch_bytes: int = 4 << 20
    """Approximate size of a batch of writes to a RocksDB table; an empty table ingests a larger run as sorted files."""
    table_chunk_rows: int = 16_384
    """Rows that are added to a RocksDB table between two checks of the deadline."""
    expiry_rows: int = 1000
    """The fewest rows of a table in RocksDB or in memory that are checked for expiry before a batch."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"{field.name} must be positive, not {getattr(self, field.name)}")
        if self.least_block_rows > self.most_block_rows:
            raise ValueError(f"least_block_rows {self.least_block_rows} is more than {self.most_block_rows}")

    def rest_after(self, stored_bytes: int) -> float:
        """Seconds after a materialization of this size during which the log's size does not make the next one due."""
        return stored_bytes / self.materialized_bytes_per_s / self.size_share

    def block_rows(self, rows: int) -> int:
        """Rows of the blocks of a restored run with `rows` rows."""
        return min(max(self.least_block_rows, -(-rows // self.blocks)), self.most_block_rows)


MERGE_POLICY: Final = MergePolicy()
