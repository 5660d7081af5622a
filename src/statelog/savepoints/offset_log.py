"""Entries of Spark's offset log: where a query's sources stand after a batch.

::

    v1                 v2
    <metadata>         <metadata>
    <offset>           <source>:<offset>
    <offset>           <source>:<offset>

Version 1 has a line per source in the order of the sources. Version 2 has a line per source with its name or number,
in any order. The metadata and most offsets are JSON; ``-`` stands for no offset.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from statelog.errors import ConfigurationError, ErrorKind

_POSITIONAL: Final = "v1"
_NAMED: Final = "v2"


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
                hint="Known are v1 and v2 (spark.sql.streaming.offsetLog.formatVersion).",
            )
        return BatchOffsets(version, metadata, [(source, offset) for source, _, offset in pairs])

    @property
    def time_ms(self) -> int | None:
        """Spark's time of the batch; None if the entry has none."""
        time_ms = _parsed(self.metadata).get("batchTimestampMs")
        return time_ms if isinstance(time_ms, int) else None

    @property
    def file_log_ends(self) -> dict[str, int]:
        """The last log entry that the batch has read, for each file source by its folder."""
        parsed = {source: _parsed(offset).get("logOffset") for source, offset in self.offsets}
        return {source: end for source, end in parsed.items() if isinstance(end, int)}

    def with_clock(self, clock_id: str) -> str:
        """The entry's text, with `clock_id` as the id of the heartbeat's clock source."""
        lines = [(source, _renamed(offset, clock_id)) for source, offset in self.offsets]
        if self.version == _NAMED:
            return "\n".join([self.version, self.metadata, *(f"{source}:{offset}" for source, offset in lines)])
        return "\n".join([self.version, self.metadata, *(offset for _, offset in lines)])


def _renamed(text: str, clock_id: str) -> str:
    offset = _parsed(text)
    return json.dumps({**offset, "clock": clock_id}) if offset.keys() == {"clock", "tick"} else text


def _parsed(text: str) -> dict[str, Any]:
    """The JSON object of a text; an empty one if the text is no object."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
