"""What the sides of ``window-space`` send to the Python workers; imports little, because every worker imports it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row

from statelog import TimeWindow, WindowContext, WindowProcessor

__all__ = ["CountWindowRows"]


class CountWindowRows(WindowProcessor):
    """Reads all rows of a window, and returns how many they are and how long their payloads."""

    def process(
        self, key: tuple[Any, ...], window: TimeWindow | None, rows: Iterator[Any], context: WindowContext
    ) -> Iterator[Row]:
        lengths = [len(row.payload) for row in rows]
        yield Row(key=key[0], n=len(lengths), bytes=sum(lengths))
