"""The site's configuration: ``./dev docs`` gives it to Sphinx, with the repository's root as the folder of sources."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

_ROOT = Path(__file__).parents[1]
_LISTS = {"docs/index", "docs/design/README"}
"""Pages whose lists of links are the site's navigation."""

project = "statelog"
author = "the authors of statelog"
release = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "docs/**"]
exclude_patterns = [".*", "build", "docs/site", "requirements", "src", "tests"]
highlight_language = "text"

myst_heading_anchors = 4  # the anchors of Git hosts

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings have the types
napoleon_google_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"statelog {release}"
html_static_path = ["site/site.css"]
html_css_files = ["site.css"]
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
html_extra_path = ["site/index.html"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False


def navigation(text: str) -> str:
    """The table of contents that a page's lists of links are: a part for each heading above a list."""
    parts: list[str] = []
    for part in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        links = re.findall(r"^- \[([^]]+)\]\(([^)#]+)\)", part, re.MULTILINE)
        entries = "".join(f"\n{title} <{PurePosixPath(target).with_suffix('')}>" for title, target in links)
        heading = re.match("## (.+)", part)
        caption = f":caption: {heading[1]}\n" if heading else ""
        if links:
            parts.append(f"```{{toctree}}\n:hidden:\n{caption}{entries}\n```\n")
    return "\n".join(parts)


def with_files_of_packages(text: str, folder: Path) -> str:
    """A page of a folder whose links to packages lead to their first file: MyST has no links to folders."""

    def link(found: re.Match[str]) -> str:
        first = PurePosixPath(found[1]) / "__init__.py"
        return f"]({first})" if (folder / first).is_file() else found[0]

    return re.sub(r"\]\(([^)#:]+)\)", link, text)


def _prepare(app: Any, name: str, source: list[str]) -> None:
    source[0] = with_files_of_packages(source[0], (_ROOT / name).parent)
    if name in _LISTS:
        source[0] += "\n" + navigation(source[0])


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _prepare)
