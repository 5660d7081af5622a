"""Key groups: how a key hash decides which subtask owns a key, at any parallelism.

The assignment is Flink's (FLIP-8 and KeyGroupRangeAssignment): ``subtask = key group * parallelism // 32768``. The key
group is the top 15 bits of the key hash. So a subtask owns one contiguous range of hashes, and the same sorted files
serve every parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt
from msgspec import Meta

Hashes = npt.NDArray[np.uint64]

KEY_GROUPS: Final = 32_768
"""Number of key groups, and therefore the highest parallelism."""

_HASH_BITS: Final = 64
_GROUP_BITS: Final = 15
GROUP_SHIFT: Final = _HASH_BITS - _GROUP_BITS


@dataclass(frozen=True, slots=True)
class HashRange:
    """Key hashes from `first` to `last`, both included."""

    first: int
    last: int


def hash_range(subtask: int, parallelism: int) -> HashRange:
    """Hashes that a subtask (0 to `parallelism` - 1) owns; `parallelism` is 1 to 32,768."""
    first_group = -(-subtask * KEY_GROUPS // parallelism)
    end_group = -(-(subtask + 1) * KEY_GROUPS // parallelism)
    return HashRange(first_group << GROUP_SHIFT, (end_group << GROUP_SHIFT) - 1)


def subtasks_of(hashes: Hashes, parallelism: int) -> npt.NDArray[np.int64]:
    """Subtask that owns each hash."""
    groups = (hashes >> np.uint64(GROUP_SHIFT)).astype(np.int64)
    return groups * parallelism // KEY_GROUPS


# ---- What numbers in stored documents may be: a decoder refuses a document with any other ----


Natural = Annotated[int, Meta(ge=0, lt=1 << 62)]
"""A count, a size or a place."""
Parallelism = Annotated[int, Meta(ge=1, le=KEY_GROUPS)]
KeyHash = Annotated[int, Meta(ge=0)]
