"""A page of the documentation as a program: its Python blocks, in order, in one namespace.

``python -m tests.docs.page PAGE`` runs one in a process of its own, in the current directory.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.docs.reading_state import Prepared

REPOSITORY = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(?!# \w+\.py\n)(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```", re.MULTILINE | re.DOTALL)
"""A program of its own, which the page asks the reader to store under the name in its first line."""


def uses_spark(page: str) -> bool:
    """Whether the examples of a page use a session called spark."""
    return re.search(r"\bspark\b\.", _program(page)) is not None


def has_own_settings(page: str) -> bool:
    """Whether the examples of a page need a session that is made for them."""
    return ".config(map=" in _program(page)


def _makes_session(page: str) -> bool:
    return re.search(r"^spark = ", _program(page), re.MULTILINE) is not None


def _program(page: str) -> str:
    return "".join(BLOCK.findall((REPOSITORY / page).read_text()))


def files(page: str) -> dict[str, str]:
    """The programs that a page asks its reader to store, by name."""
    return dict(FILE.findall((REPOSITORY / page).read_text()))


def run(page: str) -> None:
    """Run the blocks of a page; ``/data`` in them is a folder of the current directory."""
    text = (REPOSITORY / page).read_text()
    prepared = _prepared(page)
    # As in a program of the user's own, so that its classes are sent to the workers by value.
    names: dict[str, Any] = {"__name__": "__main__"}
    if uses_spark(page) and not _makes_session(page):
        from tests.spark.support import make_session

        names["spark"] = make_session()
    names |= prepared.names if prepared else {}
    data = f'"{Path("data").absolute()}/'
    for found in BLOCK.finditer(text):
        # Blank lines in front, so that a traceback has the page's line numbers.
        lines = text.count("\n", 0, found.start(1))
        exec(compile("\n" * lines + found[1].replace('"/data/', data), page, "exec"), names)
    if prepared:
        prepared.check(names)


def run_with_spark(page: str, folder: str) -> str:
    """Run the blocks of a page in this process's session; then end its queries and take back its settings.

    Parameters
    ----------
    page : str
        The page.
    folder : str
        The directory that the JVM was started in, because Spark takes relative paths from there. It is emptied
        after each page.

    Returns
    -------
    str
        The failure with its traceback, or nothing.
    """
    from tests.spark.support import make_session

    os.chdir(folder)
    session = make_session()
    settings = session.conf.getAll
    try:
        run(page)
    except BaseException:
        return "\n".join(line for line in traceback.format_exc().splitlines() if not line.startswith("\tat "))
    finally:
        for query in session.streams.active:
            query.stop()
        for name in session.conf.getAll.keys() - settings.keys():
            session.conf.unset(name)
        for name, value in settings.items():
            if session.conf.get(name, None) != value:
                session.conf.set(name, value)
        for path in Path(folder).iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return ""


def _prepared(page: str) -> Prepared | None:
    """The state that a page reads, if it reads some that it does not make."""
    if page != "docs/reading-state.md":
        return None
    from tests.docs.reading_state import Prepared

    return Prepared(Path("data"))


if __name__ == "__main__":
    run(sys.argv[1])
