"""The public names of statelog and their signatures; ``./dev python -m tests.layout.public_names`` writes the file."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

MODULES = ("statelog", "statelog.testing", "statelog.testing.contracts")
FILE = Path(__file__).with_name("public_names.txt")
MADE_BY_STATELOG = {"BroadcastState", "KeyedStream", "OperatorListState", "WindowHandle", "WindowedStream"}

_MODULE_PREFIX = re.compile(r"\b(?:[a-z_][a-z0-9_]*\.)+(?=[A-Z])")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def text() -> str:
    """Every public name with its signature, one per line; no line says in which module something is defined."""
    return "".join(f"{line}\n" for module in MODULES for line in _module(module))


def _module(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    yield f"module {name}"
    for public in sorted(module.__all__):
        yield from _described(public, getattr(module, public))


def _described(name: str, value: object) -> Iterator[str]:
    if not inspect.isclass(value):
        yield f"    {name}{_signature(value)}"
        return
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    yield f"    class {name}({bases})"
    if issubclass(value, enum.Enum):
        yield from (f"        {member.name} = {member.value!r}" for member in value)
        return
    if name not in MADE_BY_STATELOG:
        yield f"        {name}{_signature(value)}"
    for member in sorted(set(_members(value))):
        yield f"        .{member}{_signature(inspect.getattr_static(value, member, None))}"


def _members(value: type) -> Iterator[str]:
    """The public methods and properties that statelog's classes bring, inherited ones included."""
    for owner in value.__mro__:
        if owner.__module__.startswith("statelog"):
            yield from (name for name in vars(owner) if not name.startswith("_"))
            yield from (name for name in inspect.get_annotations(owner) if not name.startswith("_"))


def _signature(value: object) -> str:
    if isinstance(value, property):
        assert value.fget is not None
        return f": {_plain(str(inspect.signature(value.fget).return_annotation))}"
    function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    if not callable(function):
        return ""
    try:
        return _plain(str(inspect.signature(function)))
    except ValueError:  # a class that C code constructs
        return "(...)"


def _plain(signature: str) -> str:
    return _ADDRESS.sub("", _MODULE_PREFIX.sub("", signature)).replace("'", "")


if __name__ == "__main__":
    FILE.write_text(text())
