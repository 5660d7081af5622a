"""Says why PySpark cannot be used: it is missing, or too old."""

from __future__ import annotations

import importlib
from typing import Final

_LOWEST: Final = (4, 0)


def pyspark_problem(error: ImportError) -> str | None:
    """The problem with PySpark that made an import fail; None if the module that failed is not PySpark's."""
    if (error.name or "").partition(".")[0] != "pyspark":
        return None
    try:
        pyspark = importlib.import_module("pyspark")
    except ImportError:
        return (
            "PySpark, which is not installed: pip install 'statelog[spark]'; on a platform that includes Spark, use the"
            " platform's Python."
        )
    found = str(getattr(pyspark, "__version__", "an unknown version"))
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdecimal())
    if numbers >= _LOWEST:
        return None
    return (
        f"PySpark 4.0 or later, but this Python has PySpark {found} ({pyspark.__file__}). On a platform that includes"
        " Spark, choose a runtime with Spark 4.0 or later; elsewhere: pip install 'statelog[spark]'."
    )
