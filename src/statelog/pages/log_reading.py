"""Reads the entries of a log; of a damaged one all that can still be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from statelog.clock import SystemClock
from statelog.errors import ConfigurationError, CorruptionError, StorageError
from statelog.log.entry import Claim, Entry, Fence, Frame, FrameReader
from statelog.log.numbered import LOG_FILE
from statelog.log.open import LOG_FOLDER, open_log
from statelog.options import Options
from statelog.storage import ObjectInfo, Store


@dataclass(frozen=True)
class ReadLog:
    """The entries of a log."""

    entries: list[Entry]
    problems: tuple[str, ...]
    """What is wrong with it; if there is something, the entries are those that could be read."""

    @property
    def claims(self) -> list[Claim]:
        """The starts of the query that are in the log."""
        return [entry for entry in self.entries if isinstance(entry, Claim)]


def read_log(store: Store) -> ReadLog:
    """Read the log of a location; raises StorageError if the store fails."""
    try:
        return ReadLog(open_log(store, Options(), SystemClock()).read(), ())
    except (CorruptionError, ConfigurationError) as error:
        entries, problems = _salvage(store, store.list(f"{LOG_FOLDER}/"))
        told = error.message
        return ReadLog(entries, (told, *[problem for problem in problems if problem != told]))


def _salvage(store: Store, infos: Sequence[ObjectInfo]) -> tuple[list[Entry], list[str]]:
    """The entries of each log file up to its first damage, and the damages."""
    found: list[tuple[str, Frame]] = []
    problems: list[str] = []
    for info in infos:
        name = info.name.rpartition("/")[2]
        match = LOG_FILE.fullmatch(name)
        if match is None:
            continue
        reader = FrameReader(store, info.name, int(match[1]))
        end = 0
        try:
            while frame := reader.frame_at(end, info.size_bytes):
                found.append((name, frame))
                end = frame.end
        except (CorruptionError, ConfigurationError, StorageError) as error:
            problems.append(error.message)
    ends = {
        name: end
        for _, frame in reversed(found)
        if isinstance(frame.entry, Fence)
        for name, end in frame.entry.ends.items()
    }
    entries: list[Entry] = [
        frame.entry
        for name, frame in found
        if not isinstance(frame.entry, Fence) and frame.end <= ends.get(name, frame.end)
    ]
    return entries, problems
