"""The table of docs/versioning.md is true: every version that can be read has a fixture, and these are all."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from statelog.aggregates import sketches
from statelog.log import entry
from statelog.runs import schema as run_schema

FIXTURES: Final = Path(__file__).parent
PAGE: Final = Path(__file__).parents[2] / "docs" / "versioning.md"
ROW: Final = re.compile(r"^\| ([a-z ]+?)(?:,[^|]*)? \| (\d)(?: to (\d))? \| [^|]* \|$", re.MULTILINE)
SEALED: Final = {"statelog pin": "pin", "statelog savepoint": "savepoint"}
MAGICS: Final = {
    "log entry": re.compile(rb"SLE(\d)"),
    "run": re.compile(rb"SLRUN\0\0(.)", re.DOTALL),
    "snapshot": re.compile(rb"SLSNP\0\0(.)", re.DOTALL),
}


def documented() -> dict[str, set[int]]:
    """The versions that can be read, by kind."""
    rows = ROW.findall(PAGE.read_text())
    return {kind: set(range(int(first), int(last or first) + 1)) for kind, first, last in rows}


def stored() -> dict[str, set[int]]:
    """The versions of the fixtures' files, and of what log files hold, by kind."""
    found: dict[str, set[int]] = defaultdict(set)
    for path in FIXTURES.rglob("*"):
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts:
            for kind, version in _versions(path):
                found[kind].add(version)
    return found


def _versions(path: Path) -> Iterator[tuple[str, int]]:
    data = path.read_bytes()
    if path.suffix == ".json":
        document = json.loads(data)
        yield SEALED[document["kind"]], document["version"]
    for kind, magic in MAGICS.items():
        for [version] in magic.findall(data):
            yield kind, version if version < ord("0") else version - ord("0")


def test_every_version_that_can_be_read_has_a_fixture() -> None:
    found = stored()
    # The bytes of a sketch are values of an uncompressed or compressed column; test_aggregates reads them.
    assert (FIXTURES / "aggregates" / "v1").exists()
    assert documented() == {**found, "sketch": {1}}


def test_the_newest_versions_are_those_of_the_code() -> None:
    read = documented()
    assert max(read["log entry"]) == entry.VERSION
    assert max(read["run"]) == run_schema.MAGIC[-1]
    assert max(read["sketch"]) == sketches.VERSION
