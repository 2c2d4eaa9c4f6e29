"""A comparison as one page that needs nothing else: no network, no fonts, no server."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import files

from launcher.compare.model import Comparison

_SCRIPTS = (
    "format.js",
    "colours.js",
    "scales.js",
    "state.js",
    "chart.js",
    "live_chart.js",
    "legend.js",
    "tables.js",
    "page.js",
)
_PLACE = re.compile(r"\{\{(\w+)\}\}")
# As they are, these could end the script, begin a comment, or break a line of JavaScript.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render_html(comparison: Comparison) -> str:
    """Foreign text stands in the data only; the page's own policy lets nothing run but the page's own script."""
    style = _read("style.css")
    script = '(() => {\n"use strict";\n' + "\n".join(_read(name) for name in _SCRIPTS) + "\n})();\n"
    parts = {
        "title": html.escape(comparison.title),
        "policy": (
            f"default-src 'none'; script-src 'sha256-{_digest(script)}'; style-src 'sha256-{_digest(style)}'; "
            "base-uri 'none'; form-action 'none'"
        ),
        "style": style,
        "data": write_data(comparison),
        "script": script,
    }
    return _PLACE.sub(lambda match: parts[match[1]], _read("page.html"))


def write_data(comparison: Comparison) -> str:
    text = json.dumps(comparison.model_dump(mode="json"), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&\u2028\u2029]", lambda match: _ESCAPES[match[0]], text)


def read_style() -> str:
    """For other pages that shall look alike."""
    return _read("style.css")


def _read(name: str) -> str:
    return (files("launcher.compare") / "page" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
