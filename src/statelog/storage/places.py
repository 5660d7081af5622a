"""Comparison of locations: the same place, or one within the other."""

from __future__ import annotations

from pathlib import Path

from statelog.storage.location import OBJECT_STORES, ObjectLocation, scheme_of
from statelog.storage.open import local_path
from statelog.storage.registry import is_registered


def is_same_place(one: str, other: str) -> bool:
    """Whether two locations name one place."""
    return _parts(one) == _parts(other)


def is_within(location: str, folder: str) -> bool:
    """Whether a location is a folder or lies below it; in directories, links are followed."""
    parts = _parts(folder)
    return _parts(location)[: len(parts)] == parts


def _parts(location: str) -> tuple[str, ...]:
    if scheme_of(location) in OBJECT_STORES:
        found = ObjectLocation.parse(location)
        return (found.service, found.bucket, *filter(None, found.folder.split("/")))
    if is_registered(location):
        scheme, _, rest = location.partition(":")
        authority, path = "", rest
        if rest.startswith("//"):
            authority, _, path = rest[2:].partition("/")
        return (scheme.lower(), authority, *filter(None, path.split("/")))
    if scheme_of(location) not in ("", "file"):
        return tuple(filter(None, location.split("/")))  # of another system: no place of statelog's is there
    return ("file", *Path(local_path(location)).resolve().parts)
