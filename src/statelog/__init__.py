"""Keyed state for PySpark Structured Streaming, made durable by a changelog in every micro-batch.

The names are those of ``__init__.pyi``. Each is imported when it is used first, so that Spark's Python processes load
only their part.
"""

from typing import Any

import lazy_loader

_attribute, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    try:
        return _attribute(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "pyspark":
            raise
        raise ModuleNotFoundError(
            f"statelog.{name} needs PySpark, which is not installed: pip install 'statelog[spark]'; on a platform with"
            " a Spark of its own, run its Python.",
            name=error.name,
        ) from error
