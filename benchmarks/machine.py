"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil


def describe() -> dict[str, Any]:
    """Cores, CPU model, memory, and the versions of Python, Java and Spark."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu": _cpu_model(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "java": _java_version(),
        "spark": metadata.version("pyspark"),
        "pyarrow": metadata.version("pyarrow"),
    }


def one_line(machine: dict[str, Any]) -> str:
    """The machine in one line."""
    return (
        f"{machine['cores']} cores ({machine['cpu']}), {machine['memory_bytes'] / 2**30:.0f} GiB,"
        f" {machine['system']}, Python {machine['python']}, Java {machine['java']}, Spark {machine['spark']},"
        f" PyArrow {machine['pyarrow']}"
    )


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except FileNotFoundError:
        found = None
    return found[1].strip() if found else platform.processor() or "unknown"


def _java_version() -> str:
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    if java is None:
        return "none"
    shown = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "([^"]+)"', shown)
    return found[1] if found else "unknown"
