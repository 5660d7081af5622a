"""A page of the documentation as a program: its Python blocks, in order, in one namespace.

``python -m tests.docs.page PAGE`` runs one in a process of its own, in the current directory. A page with Spark needs
that, because Spark takes relative paths from where its JVM was started.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def uses_spark(page: str) -> bool:
    """Whether the examples of a page use a session called spark."""
    blocks = "".join(BLOCK.findall((REPOSITORY / page).read_text()))
    return re.search(r"\bspark\b\.", blocks) is not None


def run(page: str) -> None:
    """Run the blocks of a page."""
    text = (REPOSITORY / page).read_text()
    # As in a program of the user's own, so that its classes are sent to the workers by value.
    names: dict[str, Any] = {"__name__": "__main__"}
    if uses_spark(page):
        from tests.spark.support import make_session

        names["spark"] = make_session()
    for found in BLOCK.finditer(text):
        # Blank lines in front, so that a traceback has the page's line numbers.
        lines = text.count("\n", 0, found.start(1))
        exec(compile("\n" * lines + found[1], page, "exec"), names)


if __name__ == "__main__":
    if sys.argv[1] == "README.md":  # which reads what the reader has
        Path("events").mkdir()
        Path("events/first.json").write_text('{"user": "ann", "page": "home"}\n')
    run(sys.argv[1])
