"""`./dev mutate`: which mistakes in the code that keeps state safe would no test see?"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path

from tests.mutation.lists import LIST, Mutant, explained, files_with_tests
from tests.mutation.session import Counts, Session

_COPIED = ("benchmarks", "docs", "examples", "src", "tests")
_FOLDER = Path(".mutation").resolve()


def _say(text: str) -> None:
    print(text, flush=True)


def _chosen(table: dict[str, list[str]], paths: list[str]) -> list[str]:
    if not paths:
        return list(table)
    chosen = [file for file in table if any(fnmatch(file, p) or file.startswith(p.rstrip("/") + "/") for p in paths)]
    if not chosen:
        raise SystemExit(
            f"Nothing that is mutated is called {' or '.join(paths)}; tests/mutation/tests.toml has the list."
        )
    return chosen


def _copied(name: str) -> Path:
    """A copy of the project: only there are files changed."""
    tree = _FOLDER / name
    if tree.exists():
        shutil.rmtree(tree)
    tree.mkdir(parents=True)
    for folder in _COPIED:
        shutil.copytree(folder, tree / folder)
    for file in ("pyproject.toml", "README.md", "CHANGELOG.md"):
        shutil.copy2(file, tree / file)
    return tree.resolve()


def _report(counts: dict[str, Counts], reasons: dict[Mutant, str]) -> int:
    """Print and keep the report; the number of survivors that are not explained, and of explanations out of date."""
    lines = [f"{'':52}{'mutants':>9}{'killed':>9}{'explained':>11}{'open':>7}{'minutes':>9}"]
    open_ones: list[Mutant] = []
    for file, count in counts.items():
        left = [mutant for mutant in count.survivors if not reasons.get(mutant)]
        known = len(count.survivors) - len(left)
        lines.append(f"{file:52}{count.mutants:9}{count.killed:9}{known:11}{len(left):7}{count.seconds / 60:9.1f}")
        open_ones += left
    met = {mutant for count in counts.values() for mutant in count.survivors}
    stale = [mutant for mutant in reasons if mutant.file in counts and mutant not in met]
    for mutant in open_ones:
        lines += ["", f"# {mutant.file}:{mutant.line}", mutant.as_toml()]
    for mutant in stale:
        lines += ["", f"{mutant.file}: listed in {LIST.name}, but does not survive: {mutant.after}"]
    text = "\n".join(lines)
    (_FOLDER / "report.txt").write_text(text + "\n")
    _say(text)
    return len(open_ones) + len(stale)


def main() -> int:
    """Mutate the files that the arguments name, or all."""
    parser = argparse.ArgumentParser(prog="./dev mutate", description=__doc__)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="a file or a folder; without any: all")
    parser.add_argument("--lines", help="only these lines of the file: FIRST-LAST")
    parser.add_argument("--seconds", type=float, default=20.0, help="of tests per mutant, the fast ones first (20)")
    arguments = parser.parse_args()
    lines = None
    if arguments.lines:
        first, _, last = arguments.lines.partition("-")
        lines = range(int(first), int(last or first) + 1)
    table = files_with_tests(Path())
    files = _chosen(table, [path.removeprefix("./") for path in arguments.paths])
    _FOLDER.mkdir(exist_ok=True)
    tree = _copied(f"tree-{os.getpid()}")
    counts: dict[str, Counts] = {}
    reasons = {mutant: why for mutant, why in explained().items() if why}
    try:
        for file in files:
            session = Session(file, table[file], _FOLDER, tree, reasons)
            counts[file] = session.run(arguments.seconds, lines, _say)
    finally:
        shutil.rmtree(tree)
        if counts:
            unexplained = _report(counts, reasons if lines is None else {})
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
