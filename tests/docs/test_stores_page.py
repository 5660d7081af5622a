"""The store of docs/stores.md keeps the contract, tested as the page says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.docs import page as pages

PAGE = "docs/stores.md"


def test_the_store_of_the_page_keeps_the_contract(tmp_path: Path) -> None:
    store, *_ = pages.BLOCK.findall((pages.REPOSITORY / PAGE).read_text())
    (tmp_path / "sqlite_store.py").write_text(store)
    [(name, test)] = pages.files(PAGE).items()
    (tmp_path / name).write_text(test)

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", name, "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert len(store.splitlines()) <= 75, "a store is short"
