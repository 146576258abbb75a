"""Benchmark documents: atomic JSON files, and a self-contained HTML page.

Every ``bench`` command writes one JSON object with the keys ``benchmark``, ``synthetic``,
``workload``, ``settings``, ``environment`` and ``results``, one result per concurrency or request
rate. A result has the numbers of ``Summary``, and ``runs``, ``timeline`` and ``traces``. That of
``bench serve`` has ``missing_loads``, the loads without a result as it ended before them.
"""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from sametoken.bench.report import Summary, environment, settings
from sametoken.errors import ConfigError, in_words
from sametoken.io.files import make_directory, open_regular, require_writable, write_text
from sametoken.io.json_text import parse_json

if TYPE_CHECKING:
    from sametoken.bench.session import Session

_PAGE = resources.files("sametoken.bench").joinpath("page")


def require_output(path: Path | None) -> None:
    """Make the directory of a file that is to hold results, and refuse what cannot be written.

    Raises:
        ConfigError: it cannot be written.
    """
    if path is not None:
        make_directory(path.parent)
        require_writable(path)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically; its directory is made.

    Raises:
        ConfigError: it cannot be written, or a number is not finite, which JSON has not.
    """
    try:
        text = json.dumps(value, indent=1, allow_nan=False)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be written ({error})", "give finite options") from error
    make_directory(path.parent)
    write_text(path, text + "\n")


def read_json(path: Path, remedy: str = "give a file that bench wrote") -> dict[str, Any]:
    """Read the JSON object of a file.

    Args:
        path: the file.
        remedy: what to do if it holds none.

    Raises:
        ConfigError: the file cannot be read or holds no JSON object.
    """
    try:
        with open_regular(path) as file:
            value = parse_json(file.read())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({in_words(error)})", remedy) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object", remedy)
    return value


def offline_document(
    title: str, session: Session, summaries: Sequence[Summary], more: Mapping[str, Any]
) -> dict[str, Any]:
    """Build the document of an offline measurement.

    Args:
        title: name of the benchmark.
        session: the measured engine.
        summaries: one per concurrency.
        more: further JSON values of the workload.
    """
    workload = dataclasses.asdict(session.workload) | {"prompts": len(session.workload.prompts)}
    return {
        "benchmark": title,
        "synthetic": list(session.resolved.config.synthetic),
        "workload": workload | dict(more),
        "settings": settings(session.resolved),
        "environment": environment(session.resolved.device),
        "bandwidth": dataclasses.asdict(session.bandwidth),
        "traffic": dataclasses.asdict(session.traffic),
        "results": [dataclasses.asdict(summary) for summary in summaries],
    }


def render_report(title: str, data: dict[str, Any]) -> str:
    """Render runs side by side, with Plotly's charts.

    Raises:
        ImportError: Plotly is not installed.
    """
    from plotly.offline import get_plotlyjs

    return render_page(_PAGE, "report", title, data, library=get_plotlyjs())


def render_page(
    folder: Traversable, name: str, title: str, data: dict[str, Any], *, library: str = ""
) -> str:
    """Render a page as one HTML file that needs no other; all pages have one design.

    Args:
        folder: holds ``NAME.html``, the body, and ``NAME.js``, the script.
        name: of the page.
        title: window title.
        data: embedded JSON, the script's ``data``.
        library: a script that runs first.
    """
    parts = {
        "title": html.escape(title, quote=False),
        "style": _text(_PAGE, "style.css"),
        "body": _text(folder, f"{name}.html"),
        "data": embedded_json(data),
        "library": library,
        "common": _text(_PAGE, "common.js"),
        "script": _text(folder, f"{name}.js"),
    }
    return Template(_text(_PAGE, "frame.html")).substitute(parts)


def embedded_json(data: dict[str, Any]) -> str:
    """Serialize to JSON that cannot close the script element around it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _text(folder: Traversable, name: str) -> str:
    return folder.joinpath(name).read_text(encoding="utf-8")
