"""Parts of an operator's state: ranges of key hashes, each the work of one call, here or in a task of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from statelog.progress import tracked
from statelog.runs.key_groups import HashRange, hash_range

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Part:
    """One of `count` equal ranges of key hashes; `number` begins at 0."""

    number: int
    count: int

    @property
    def hashes(self) -> HashRange:
        """The range of key hashes."""
        return hash_range(self.number, self.count)


class RunAll(Protocol):
    """Applies a function to each of several items, here or elsewhere; both must be picklable."""

    def __call__(
        self,
        work: Callable[[_Item], _Result],
        items: Sequence[_Item],
        sizes: Callable[[Sequence[_Item]], Sequence[int]],
    ) -> list[_Result]:
        """Return the results in the order of the items; `sizes` are their bytes, for the progress."""
        ...


def one_by_one(
    work: Callable[[_Item], _Result], items: Sequence[_Item], sizes: Callable[[Sequence[_Item]], Sequence[int]]
) -> list[_Result]:
    """Apply the function here, to one item after the other."""
    return [work(item) for item in tracked(items, sizes)]
