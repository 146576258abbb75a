"""One page that works from disk: markup, style, script, plotly and data in one file."""

from __future__ import annotations

import json
from importlib import resources
from string import Template
from typing import Any

_PAGES = "page"


def render_page(name: str, title: str, data: dict[str, Any]) -> str:
    """A page of ``bench/page`` with everything that it needs inside.

    Args:
        name: of ``NAME.html``, whose body it is, and of ``NAME.js``, which reads the data;
            the style is shared.
        title: of the window.
        data: what the script reads, from the element with the id ``data``.

    Returns:
        HTML.
    """
    from plotly.offline import get_plotlyjs

    parts = {
        "title": _escaped(title),
        "style": _file("style.css"),
        "body": _file(f"{name}.html"),
        "data": embedded_json(data),
        "plotly": get_plotlyjs(),
        "script": _file(f"{name}.js"),
    }
    return Template(_file("frame.html")).substitute(parts)


def embedded_json(data: dict[str, Any]) -> str:
    """JSON that cannot end the script element which holds it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _escaped(text: str) -> str:
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, entity)
    return text


def _file(name: str) -> str:
    page = resources.files("sametoken.bench").joinpath(_PAGES, name)
    return page.read_text(encoding="utf-8")
