"""mkdocs hook: pages outside docs/ that a page links to become part of the site.

The site is built from the files that GitHub shows, whose links are relative to the repository.
README.md is the first page; every file that is linked from a page, such as a table of
benchmarks/results, is added under its path, and links are rewritten to the places on the site.
A link to a file that does not exist stays as it is, so that mkdocs fails.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^):#]+)([^)]*\))")


def place(path: str) -> str:
    """Place on the site of a file of the repository."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def origin(uri: str) -> str:
    """File of the repository at a place on the site."""
    if uri == "index.md":
        return "README.md"
    return f"docs/{uri}" if (ROOT / "docs" / uri).exists() else uri


def target(path: str, link: str) -> str:
    """File of the repository that `link` in the file `path` leads to."""
    return os.path.normpath(os.path.join(os.path.dirname(path), link))


def on_files(files: Files, config: Any) -> Files:
    """Add README.md and every file that pages link to, also through other added pages."""
    waiting = ["README.md", *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    present = {file.src_uri for file in files}
    for path in waiting:
        if place(path) not in present:
            present.add(place(path))
            files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            links = [target(path, m[2]) for m in LINK.finditer((ROOT / path).read_text())]
            waiting += [x for x in links if place(x) not in present and (ROOT / x).is_file()]
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite relative links to the places on the site."""
    uri = page.file.src_uri

    def moved(match: re.Match[str]) -> str:
        path = target(origin(uri), match[2])
        if not (ROOT / path).is_file():
            return match[0]
        return match[1] + os.path.relpath(place(path), os.path.dirname(uri) or ".") + match[3]

    return LINK.sub(moved, markdown)
