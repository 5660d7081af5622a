"""Builds what a release consists of: the wheel, the source distribution, and the wheel's bill of materials."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path

import click

from tests.packaging.environment import EXTRAS, PROJECT, REPOSITORY, Environment, name_of, pinned


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), default=REPOSITORY / "dist")
def main(folder: Path) -> None:
    """Build the wheel, the source distribution and the bill of materials into FOLDER, by default `dist`.

    The bill is a CycloneDX document in JSON: every package that the wheel and its extras need, directly or not, in the
    version that the tests ran with.
    """
    release = folder.resolve() / f"statelog-{PROJECT['project']['version']}"
    bill = Path(f"{release}.cdx.json")
    _run(sys.executable, "-m", "hatchling", "build", "-d", str(release.parent))
    write_bill(Path(f"{release}-py3-none-any.whl"), bill)
    click.echo(f"\n[bill of materials]\n{bill}")


def write_bill(wheel: Path, bill: Path) -> None:
    """Write the bill of materials of a wheel; exit with an error if it does not have exactly what the wheel needs."""
    with tempfile.TemporaryDirectory() as directory:
        environment = Environment(Path(directory))
        needed = environment.link([*PROJECT["project"]["dependencies"], *chain.from_iterable(EXTRAS.values())])
        _run(*environment.install(wheel))
        options = ["--pyproject", "pyproject.toml", "--mc-type", "library", "--output-reproducible", "-o", str(bill)]
        _run(sys.executable, "-m", "cyclonedx_py", "environment", *options, environment.python)
    listed = {name_of(one["name"]): one["version"] for one in json.loads(bill.read_text())["components"]}
    pins = pinned("dev.txt")
    if wrong := sorted(listed.items() ^ {name: pins[name] for name in needed}.items()):
        sys.exit(f"{bill} is not what requirements/dev.txt has for the wheel: {wrong}")


def _run(*command: str) -> None:
    # Without the caller's PYTHONPATH, whose packages the bill would list, too.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True)


if __name__ == "__main__":
    main()
