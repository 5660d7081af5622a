"""Every link between the pages leads to a file that is there, and to a heading that it has."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted(
    str(page.relative_to(REPOSITORY))
    for folder in (".", "benchmarks", "docs", "docs/*", "examples/*", "tests/*")
    for page in REPOSITORY.glob(f"{folder}/*.md")
)


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    path = REPOSITORY / page
    broken = [link for link in links(path) if not leads_somewhere(path, link)]
    assert not broken


def test_names_of_other_pages_in_the_reference() -> None:
    api = REPOSITORY / "docs" / "api"
    named = {name for page in api.glob("*.rst") for name in re.findall(r":doc:`([^`]+)`", page.read_text())}
    assert named
    assert not [name for name in named if not (api / f"{name}.md").exists()]


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("How it works", "how-it-works"),
        ("`Options` & more, really?", "options--more-really"),
        ("[A link](page.md) and under_scores", "a-link-and-under_scores"),
    ],
)
def test_anchors_are_those_of_git_hosts(heading: str, anchor: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# {heading}\n\n## {heading}\n")
    assert anchors(page) == {anchor, f"{anchor}-1"}


def links(path: Path) -> list[str]:
    """The targets of all links and pictures of a page that are no addresses of the web."""
    tokens = (child for token in parsed(path) for child in token.children or [])
    targets = (token.attrGet("href") or token.attrGet("src") for token in tokens)
    return [str(target) for target in targets if target and not re.match(r"[a-z]+:", str(target))]


def leads_somewhere(page: Path, link: str) -> bool:
    name, _, anchor = unquote(link).partition("#")
    target = (page.parent / name).resolve() if name else page
    return target.exists() and (not anchor or anchor in anchors(target))


@cache
def anchors(path: Path) -> set[str]:
    """The anchors that Git hosts make of a page's headings."""
    found: set[str] = set()
    tokens = parsed(path)
    for opening, heading in pairwise(tokens):
        if opening.type == "heading_open":
            text = "".join(child.content for child in heading.children or [])
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            count = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in found)
            found.add(f"{slug}-{count}" if count else slug)
    return found


@cache
def parsed(path: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(path.read_text())
