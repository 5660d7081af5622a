"""Spark's logs in a checkpointLocation: offsets of batches, and the files that a file source has read.

An entry of the offset log has the positions of a query's sources after a batch::

    v1                 v2
    <metadata>         <metadata>
    <offset>           <source>:<offset>
    <offset>           <source>:<offset>

Version 1 has a line for each place in the plan that reads a source, in their order. Version 2 has a line per source
with its name or number, in any order. The metadata and most offsets are JSON; ``-`` stands for no offset.

Entry n of a file source's log is the file ``n``. At regular intervals Spark writes ``n.compact`` instead, which has all
entries up to n, and then deletes the older files. Spark derives the interval from the compacted files that it finds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

from statelog.errors import ConfigurationError, CorruptionError, ErrorKind, StateMissingError

_POSITIONAL: Final = "v1"
_NAMED: Final = "v2"
_COMPACT: Final = ".compact"
_MOST_NUMBERINGS: Final = 1000
SOURCE_NAMES: Final = "spark.sql.streaming.queryEvolution.enableSourceEvolution"
"""The setting by which the sources of a query have names."""


@dataclass(frozen=True)
class BatchOffsets:
    """An entry of the offset log."""

    version: str
    metadata: str
    """The second line."""
    offsets: list[tuple[str, str]]
    """Each source, by its folder below ``sources``, and its offset."""

    @staticmethod
    def parse(text: str, name: str) -> BatchOffsets:
        """Parse an entry; raises ConfigurationError for an unknown format. `name` is the file, for messages."""
        version, *rest = text.split("\n")
        metadata, lines = (rest or [""])[0], rest[1:]
        if version == _POSITIONAL:
            return BatchOffsets(version, metadata, [(str(source), line) for source, line in enumerate(lines)])
        pairs = [line.partition(":") for line in lines]
        if version != _NAMED or not all(separator for _, separator, _ in pairs):
            raise ConfigurationError(
                f"{name}: statelog does not know this format of Spark's offset log; it begins with {version[:20]!r}.",
                kind=ErrorKind.UNSUPPORTED_FEATURE,
                hint="Only v1 and v2 are supported (spark.sql.streaming.offsetLog.formatVersion).",
            )
        return BatchOffsets(version, metadata, [(source, offset) for source, _, offset in pairs])

    @property
    def time_ms(self) -> int | None:
        """Spark's time of the batch; None if the entry has none."""
        time_ms = parsed(self.metadata).get("batchTimestampMs")
        return time_ms if isinstance(time_ms, int) else None

    def file_log_ends(self, logs: Mapping[str, Sequence[str]]) -> dict[str, int]:
        """The last log entry that the batch has read, for each file source by its folder.

        `logs` has the names of the files in each folder. In version 1 a source that is read at several places of the
        plan has several lines, which are equal, and one folder: the folders show which lines belong to one source.
        """
        if self.version == _POSITIONAL:
            newest = {source: max(map(_last_entry, names), default=-1) for source, names in logs.items()}
            lines = [line for _, line in self.offsets]
            found = [
                _ends(zip(map(str, numbers), lines, strict=True))
                for numbers in islice(_numberings(lines, newest, []), _MOST_NUMBERINGS)
            ]
            # If several fit, the logs are hardly ahead of what was read.
            return max(found, key=lambda ends: (len(ends), sum(ends.values())), default=_ends(self.offsets))
        return _ends(self.offsets)

    @property
    def watermark_ms(self) -> int:
        """Spark's watermark of the batch; 0 if the entry has none."""
        watermark_ms = parsed(self.metadata).get("batchWatermarkMs")
        return watermark_ms if isinstance(watermark_ms, int) else 0

    @property
    def conf(self) -> dict[str, str]:
        """The settings that Spark keeps from the query's first start on."""
        conf = parsed(self.metadata).get("conf")
        return conf if isinstance(conf, dict) else {}

    @property
    def has_source_names(self) -> bool:
        """Whether Spark finds the sources by names that the query gives them, and accepts that some come or go."""
        return str(self.conf.get(SOURCE_NAMES)).lower() == "true"

    @property
    def text(self) -> str:
        """The entry as Spark stores it."""
        has_names = self.version == _NAMED
        return "\n".join(
            [
                self.version,
                self.metadata,
                *(f"{source}:{offset}" if has_names else offset for source, offset in self.offsets),
            ]
        )

    @property
    def clocks(self) -> list[str]:
        """The ids of the clock sources."""
        return [str(parsed(offset)["clock"]) for _, offset in self.offsets if _is_clock(offset)]

    def with_clock(self, clock_id: str) -> str:
        """The entry's text, with `clock_id` as the id of the heartbeat's clock source."""
        return self._with([(source, _renamed(offset, clock_id)) for source, offset in self.offsets])

    def with_clocks(self, are_clocks: Sequence[bool], clock_id: str) -> str | None:
        """The entry's text for a query with these sources, of which some are clocks; None if no change is needed.

        Clocks that are new begin with the id `clock_id`. None also if the change would not leave the numbers of other
        sources as they are, or if the sources have names: Spark itself then lets sources come and go.
        """
        if self.has_source_names:
            return None
        others = [one for one in self.offsets if not _is_clock(one[1])]
        clocks = [one for one in self.offsets if _is_clock(one[1])]
        count = sum(are_clocks)
        if len(clocks) == count or [*are_clocks] != [False] * len(others) + [True] * count:
            return None
        if self.version == _POSITIONAL and self.offsets != others + clocks:
            return None
        added = [
            (str(place), json.dumps({"clock": clock_id, "tick": 0}))
            for place in range(len(others) + len(clocks), len(others) + count)
        ]
        return self._with([*others, *clocks[:count], *added])

    def _with(self, offsets: list[tuple[str, str]]) -> str:
        return replace(self, offsets=offsets).text


def _ends(offsets: Iterable[tuple[str, str]]) -> dict[str, int]:
    ends = {source: parsed(offset).get("logOffset") for source, offset in offsets}
    return {source: end for source, end in ends.items() if isinstance(end, int)}


def _numberings(lines: Sequence[str], newest: Mapping[str, int], numbers: list[int]) -> Iterator[list[int]]:
    """The sources' numbers by line, in all ways that fit the folders; those with more sources come first.

    Each file source has a folder whose `newest` entry is not before its end, and no folder is of a further source.
    `numbers` are those of the first lines.
    """
    count = max(numbers, default=-1) + 1
    if len(numbers) == len(lines):
        if all(int(source) < count for source in newest if source.isdecimal()):
            yield numbers
        return
    line = lines[len(numbers)]
    if all(newest.get(str(count), -1) >= end for end in _ends([("", line)]).values()):
        yield from _numberings(lines, newest, [*numbers, count])
    if line in lines[: len(numbers)]:
        yield from _numberings(lines, newest, [*numbers, numbers[lines.index(line)]])


def _is_clock(text: str) -> bool:
    return parsed(text).keys() == {"clock", "tick"}


def _renamed(text: str, clock_id: str) -> str:
    return json.dumps({**parsed(text), "clock": clock_id}) if _is_clock(text) else text


def parsed(text: str) -> dict[str, Any]:
    """The JSON object of a text; an empty one if the text is not an object."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _last_entry(base_name: str) -> int:
    return int(base_name.removesuffix(_COMPACT)) if is_file_log_entry(base_name) else -1


def is_file_log_entry(base_name: str) -> bool:
    """Whether a file's name is one of a log's entries."""
    return base_name.removesuffix(_COMPACT).isdecimal()


def file_log_until(names: Sequence[str], end: int, read: Callable[[str], bytes], folder: str) -> dict[str, bytes]:
    """The files, by name, of a log cut after entry `end`; raises StateMissingError if entries up to it are gone.

    `names` are the files of the log, `read` reads one, and `folder` is for messages.
    """
    single = {int(name) for name in names if name.isdecimal()}
    compact = {int(name.removesuffix(_COMPACT)) for name in names if name.endswith(_COMPACT)}
    last = max((number for number in compact if number <= end), default=-1)
    if single.issuperset(range(last + 1, end + 1)):
        own = [str(number) for number in sorted(single) if number <= end]
        own += [f"{number}{_COMPACT}" for number in sorted(compact) if number <= end]
        return {name: read(name) for name in own}
    later = min((number for number in compact if number > end), default=None)
    if later is None:
        raise StateMissingError(
            f"{folder}: the log of the files that were read lacks entries up to {end}.", hint="Choose a newer batch."
        )
    # From this compacted file alone Spark derives an interval that the file fits, whichever interval is configured.
    name = f"{later}{_COMPACT}"
    return {f"{end}{_COMPACT}": _cut(read(name), end, f"{folder}/{name}")}


def _cut(compacted: bytes, end: int, name: str) -> bytes:
    """A compacted file without the entries after `end`; `name` is the file, for messages."""
    try:
        version, *lines = compacted.decode().split("\n")
        return "\n".join([version, *(line for line in lines if line and json.loads(line)["batchId"] <= end)]).encode()
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptionError(
            f"{name}: it is not a log of the files that were read: {type(error).__name__}: {error}.",
            kind=ErrorKind.FORMAT,
            hint="Restore the file from a copy, or choose a newer batch.",
        ) from error
