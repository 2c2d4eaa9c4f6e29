"""Render a comparison as one self-contained HTML page: no network, no fonts, no server."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import files

from launcher.analysis.compare.model import Comparison

_STYLES = ("vendor/uplot/uPlot.min.css", "style.css")
_SCRIPTS = (
    "vendor/uplot/uPlot.iife.min.js",
    "format.js",
    "colours.js",
    "state.js",
    "chart.js",
    "legend.js",
    "tables.js",
    "page.js",
)
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
# Unescaped, these could end the script, begin a comment, or break a line of JavaScript.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render_html(comparison: Comparison) -> str:
    """Render a comparison as an HTML page. Untrusted text is in its data only; its CSP allows no script but its own."""
    style = "\n".join(map(_read, _STYLES))
    script = '(() => {\n"use strict";\n' + "\n".join(map(_read, _SCRIPTS)) + "\n})();\n"
    parts = {
        "title": html.escape(comparison.title),
        "policy": (
            f"default-src 'none'; script-src 'sha256-{_digest(script)}'; style-src 'sha256-{_digest(style)}'; "
            "base-uri 'none'; form-action 'none'"
        ),
        "style": style,
        "data": render_data(comparison),
        "script": script,
    }
    return _PLACEHOLDER.sub(lambda match: parts[match[1]], _read("page.html"))


def render_data(comparison: Comparison) -> str:
    """Render the data of the page as JSON that is safe inside a script element."""
    text = json.dumps(comparison.model_dump(mode="json"), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&\u2028\u2029]", lambda match: _ESCAPES[match[0]], text)


def _read(name: str) -> str:
    return (files("launcher.analysis.compare") / "page" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
