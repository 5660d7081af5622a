"""Brings the stores that the driver's program has registered to the Python workers."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from pyspark import cloudpickle

from statelog.errors import ConfigurationError, ErrorKind
from statelog.storage.open import REGISTERED

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")

_adopted: Final[dict[str, bytes]] = {}


def pickled_stores() -> dict[str, bytes]:
    """The registered factories, pickled, by scheme; raises ConfigurationError if one cannot be pickled."""
    pickled: dict[str, bytes] = {}
    for scheme, factory in dict(REGISTERED).items():
        try:
            pickled[scheme] = cloudpickle.dumps(factory)  # type: ignore[no-untyped-call]  # no types there
        except Exception as error:
            raise ConfigurationError(
                f"The factory of the scheme {scheme!r} cannot be sent to the workers: {type(error).__name__}: {error}.",
                hint="Register a function or class of a module, and open files and connections in the store's methods.",
            ) from error
    return pickled


def adopt_stores(pickled: Mapping[str, bytes]) -> None:
    """Register the driver's factories in this Python worker; raises ConfigurationError if one cannot be loaded."""
    for scheme, data in pickled.items():
        if _adopted.get(scheme) == data:
            continue
        try:
            factory = pickle.loads(data)
        except Exception as error:
            raise ConfigurationError(
                f"The factory of the scheme {scheme!r} cannot be loaded in the Python workers:"
                f" {type(error).__name__}: {error}.",
                kind=ErrorKind.UNSUPPORTED_FEATURE,
                hint="Install the module of the store for the workers' interpreter on every host.",
            ) from error
        REGISTERED[scheme] = factory
        _adopted[scheme] = data


def with_stores(work: Callable[[_Argument], _Result]) -> Callable[[_Argument], _Result]:
    """The function for a Spark job, which knows the driver's stores wherever it runs."""
    stores = pickled_stores()

    def run(argument: _Argument) -> _Result:
        adopt_stores(stores)
        return work(argument)

    return run
