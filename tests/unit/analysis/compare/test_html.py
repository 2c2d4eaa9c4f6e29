"""The page is self-contained, and text from outside is in its data only. tests/browser checks how it looks."""

from __future__ import annotations

import base64
import hashlib
import json
import re

from launcher.analysis.compare.html import render_data, render_html
from launcher.core import metrics
from launcher.core.errors import escape
from tests.unit.analysis.compare.made_facts import compare, make_facts

FOREIGN = "</script><!--<script>alert(1)</script> <img src=x onerror=alert(2)> {{script}} & \u2028 \"'"


def test_text_cannot_leave_the_data() -> None:
    comparison = compare(make_facts(FOREIGN), make_facts("b"))
    data = render_data(comparison)
    assert not set("<>&\u2028\u2029") & set(data)
    assert json.loads(data)["runs"][0]["name"] == escape(FOREIGN)
    page = render_html(comparison)
    assert page.count("</script>") == 2
    assert "onerror" not in page.replace(data, "")
    assert page.count(data) == 1


def test_title_is_escaped() -> None:
    page = render_html(compare(make_facts("a")).model_copy(update={"title": "<b>{{data}}</b>"}))
    assert "<title>&lt;b&gt;{{data}}&lt;/b&gt;</title>" in page


def test_page_loads_nothing_and_its_csp_allows_only_its_own_script() -> None:
    page = render_html(compare(make_facts("a")))
    namespace_or_credit = r"www\.w3\.org/2000/svg|github\.com/leeoniya/uPlot"
    assert not re.findall(rf"""(?:src|href)=["'](?!#)|@import|url\(|https?://(?!{namespace_or_credit})""", page)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy
    assert policy[1].startswith("default-src 'none';")
    script = re.search(r"<script>(.*)</script>\n</body>", page, re.DOTALL)
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    for element, directive in ((script, "script-src"), (style, "style-src")):
        assert element
        digest = base64.b64encode(hashlib.sha256(element[1].encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy[1]
    assert "unsafe" not in policy[1]


def test_no_markup_is_made_from_text() -> None:
    page = render_html(compare(make_facts("a")))
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", page)


def test_non_finite_numbers_become_null() -> None:
    data = render_data(compare(make_facts("a", {metrics.TRAIN_LOSS: [1.0, float("nan"), float("inf")]})))
    assert json.loads(data)["runs"][0]["series"][0]["mean"] == [1.0, None, None]
