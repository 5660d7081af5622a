"""Says why PySpark cannot be used: it is missing, or too old."""

from __future__ import annotations

import importlib
from typing import Final

_LOWEST: Final = (4, 0)


def pyspark_problem(error: ImportError) -> str | None:
    """What is wrong with PySpark if an import has failed because of it; None if it is none of PySpark's modules."""
    if (error.name or "").partition(".")[0] != "pyspark":
        return None
    try:
        pyspark = importlib.import_module("pyspark")
    except ImportError:
        return (
            "PySpark, which is not installed: pip install 'statelog[spark]'; on a platform with a Spark of its own, run"
            " its Python."
        )
    found = str(getattr(pyspark, "__version__", "an unknown version"))
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdecimal())
    if numbers >= _LOWEST:
        return None
    return (
        f"PySpark 4.0 or later, and this Python has PySpark {found} ({pyspark.__file__}). On a platform, choose a"
        " runtime with Spark 4.0 or later; in an environment without a Spark of its own: pip install 'statelog[spark]'."
    )
