"""Keyed state for PySpark Structured Streaming, made durable by a changelog in every micro-batch.

The names are those of ``__init__.pyi``. Each is imported on first use, so that Spark's Python processes load only what
they need.
"""

from typing import Any

import lazy_loader

_attribute, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    try:
        return _attribute(name)
    except ImportError as error:
        from statelog.needed_pyspark import pyspark_problem

        problem = pyspark_problem(error)
        if problem is None:
            raise
        raise ModuleNotFoundError(f"statelog.{name} needs {problem}", name=error.name) from error
