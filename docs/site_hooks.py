"""Hooks of MkDocs: links to files beside docs/ become their names, since the site has only the pages.

The search leaves out what is for maintainers. The part of it that the theme would load from another host, where a page
is opened from a folder, lies beside the pages.
"""

from __future__ import annotations

import re
from posixpath import dirname, join, normpath
from typing import Any

MAINTAINERS = "For maintainers"  # their tab of mkdocs.yml; the decisions are in no menu
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
_SHIM = re.compile(r'src="https://unpkg\.com/iframe-worker/shim"')
_CODE = re.compile(r"(```.*?```)", re.DOTALL)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace links that lead out of docs/, or to a folder of it; mark the page for the search."""
    page.meta["search"] = {"exclude": not page.ancestors or page.ancestors[-1].title == MAINTAINERS}

    def replace(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        path = normpath(join(dirname(page.file.src_uri), target.partition("#")[0]))
        is_of_site = "://" in target or target.startswith(("#", "mailto:")) or path.endswith((".md", ".png", ".svg"))
        return match[0] if is_of_site and not path.startswith("..") else text

    pieces = _CODE.split(markdown)
    return "".join(piece if piece.startswith("```") else _LINK.sub(replace, piece) for piece in pieces)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Load the part of the search from the site."""
    return _SHIM.sub(f'src="{"../" * page.url.count("/")}vendor/iframe-worker/shim.js"', output)


def on_post_template(output: str, *, template_name: str, **_: Any) -> str:
    """The same, of the page for addresses that there are not."""
    return _SHIM.sub('src="vendor/iframe-worker/shim.js"', output)
