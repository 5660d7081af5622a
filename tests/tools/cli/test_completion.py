"""Completion in bash, by the line of docs/command-line.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from statelog.tools.cli.main import commands

PAGE = (Path(__file__).parents[3] / "docs" / "command-line.md").read_text()


def bash(program: str) -> str:
    """Run a program of bash, in which `statelog` is the command; return its output."""
    command = f'statelog() {{ "{sys.executable}" -m statelog "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-c", command + program],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=os.environ | {"LC_ALL": "C.UTF-8"},
    )
    return done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["fall"], ["fall-back"]),
        ([""], sorted(commands.commands)),
        (["gc", "--d"], ["--delete"]),
    ],
    ids=" ".join,
)
def test_commands_and_options_are_completed(words: list[str], expected: list[str]) -> None:
    [line] = re.findall(r"^Completion .*bash: `(.*)`;", PAGE, re.MULTILINE)
    quoted = " ".join(f"'{word}'" for word in words)
    found = bash(
        f"set -e\n{line}\ncomplete -p statelog >/dev/null\nCOMP_WORDS=(statelog {quoted}); COMP_CWORD={len(words)}\n"
        'function_of=$(complete -p statelog | sed "s/.*-F \\([^ ]*\\) .*/\\1/")\n'
        '"$function_of" statelog\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    assert sorted(found.split()) == sorted(expected)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_a_program_for_each_shell(shell: str) -> None:
    program = bash(f"_STATELOG_COMPLETE={shell}_source statelog")
    assert "_STATELOG_COMPLETE" in program
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=program, text=True, check=True)
