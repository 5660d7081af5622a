"""Keyed state for PySpark Structured Streaming, made durable by a changelog in every micro-batch.

The names are those of ``__init__.pyi``. Each is imported when it is used first, so that Spark's Python processes load
only their part.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
