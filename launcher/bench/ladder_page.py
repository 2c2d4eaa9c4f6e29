"""The ladder as one page that needs nothing else, in the style of the compare page; it has no script at all."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence

from launcher.bench.drawing import render_svg
from launcher.bench.ladder_plot import draw_ladder
from launcher.bench.ladder_report import HEAD, Ladder, describe, list_missing, make_rows
from launcher.compare.html import read_style

_MORE = "figure svg { width: 100%; height: auto; border-radius: 6px; } li { margin-top: 0.3rem; }\n"


def render_page(ladder: Ladder) -> str:
    """Foreign text is escaped, and the page's own policy lets nothing run or load."""
    style = read_style() + _MORE
    title = html.escape(f"The ladder: {ladder.expert}")
    digest = base64.b64encode(hashlib.sha256(style.encode("utf-8")).digest()).decode("ascii")
    told = [*list_missing(ladder), *(f"note: {note}" for note in ladder.notes)]
    items = "".join(f"<li>{html.escape(line)}</li>" for line in told)
    notes = (
        f'<section><h2>What was not measured, and notes</h2><ul class="quiet">{items}</ul></section>' if told else ""
    )
    return f"""<!doctype html>
<!-- made by launcher bench ladder -->
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'sha256-{digest}'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header class="top"><div><h1>{title}</h1><p class="quiet">{html.escape(describe(ladder))}</p></div></header>
<main>
<figure>{render_svg(draw_ladder(ladder))}</figure>
<section><h2>Figures</h2><div class="scroll">{_render_table(HEAD, make_rows(ladder))}</div></section>
{notes}
</main>
</body>
</html>
"""


def _render_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    titles = "".join(f'<th scope="col">{html.escape(title)}</th>' for title in head)
    lines = []
    for row in rows:
        cells = "".join(f'<td class="number">{html.escape(cell)}</td>' for cell in row[1:])
        lines.append(f'<tr><th scope="row">{html.escape(row[0])}</th>{cells}</tr>')
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
