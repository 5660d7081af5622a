"""Entries of Spark's offset log: where a query's sources stand after a batch.

::

    v1                 v2
    <metadata>         <metadata>
    <offset>           <source>:<offset>
    <offset>           <source>:<offset>

The first version has a line for each source in their order, the second one for each by its name or number, in any
order. The metadata and most offsets are JSON; ``-`` is none.
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
    """An entry.

    Parameters
    ----------
    version : str
        Of its format.
    metadata : str
        Its second line.
    offsets : list of (str, str)
        Folder of the source below ``sources``, and its offset.
    """

    version: str
    metadata: str
    offsets: list[tuple[str, str]]

    @staticmethod
    def parse(text: str, name: str) -> BatchOffsets:
        """Read an entry; `name` is its file, for messages.

        Raises
        ------
        ConfigurationError
            If it is of a format that is not known.
        """
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
        """Spark's time of the batch."""
        time_ms = _parsed(self.metadata).get("batchTimestampMs")
        return time_ms if isinstance(time_ms, int) else None

    @property
    def file_log_ends(self) -> dict[str, int]:
        """For each source of files, by its folder, the last entry of its log that the batch has read."""
        parsed = {source: _parsed(offset).get("logOffset") for source, offset in self.offsets}
        return {source: end for source, end in parsed.items() if isinstance(end, int)}

    def with_clock(self, clock_id: str) -> str:
        """The entry's text with another id of the heartbeat's source."""
        lines = [(source, _renamed(offset, clock_id)) for source, offset in self.offsets]
        if self.version == _NAMED:
            return "\n".join([self.version, self.metadata, *(f"{source}:{offset}" for source, offset in lines)])
        return "\n".join([self.version, self.metadata, *(offset for _, offset in lines)])


def _renamed(text: str, clock_id: str) -> str:
    offset = _parsed(text)
    return json.dumps({**offset, "clock": clock_id}) if offset.keys() == {"clock", "tick"} else text


def _parsed(text: str) -> dict[str, Any]:
    """An object of JSON, or an empty one if it is none."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
