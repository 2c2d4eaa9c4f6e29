"""The compare page in a browser: what it draws, what controls and keys do, and that text is never markup."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from launcher.analysis.compare import Comparison, RunFacts, load_run_facts, make_comparison
from launcher.analysis.compare.html import render_html
from launcher.core.errors import escape
from tests.made_runs import MadeRun, write_run

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from selenium.webdriver.remote.webelement import WebElement

FOREIGN = "</script><!--<img src=x onerror=\"document.title='taken'\"> & <b>bold</b> \u202egnp.exe"
MISSING = "\u2013"
MADE_AT = "2026-11-15T12:00:00+00:00"
MOST_BYTES, MOST_REDRAW_MS, MOST_LOAD_SECONDS = 15_000_000, 1_000, 20
WAIT_SECONDS = 10.0
SCREENSHOTS_VARIABLE = "LAUNCHER_SCREENSHOTS"  # folder for screenshots

# Counts the pixels of a chart that have exactly this colour.
COUNT_PIXELS = """
const [metric, colour] = arguments;
const canvas = document.querySelector(`.plot[data-metric="${metric}"] canvas`);
const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
copy.drawImage(canvas, 0, 0);
const pixels = copy.getImageData(0, 0, canvas.width, canvas.height).data;
let count = 0;
for (let at = 0; at < pixels.length; at += 4) {
  if (pixels[at] === red && pixels[at + 1] === green && pixels[at + 2] === blue && pixels[at + 3] === 255) count += 1;
}
return count;
"""


class Page:
    """An open page, as a user sees and operates it."""

    def __init__(self, chrome: Chrome, file: Path) -> None:
        self.chrome = chrome
        chrome.get_log("browser")  # drops the logs of the previous page
        chrome.get_log("performance")
        begin = time.perf_counter()
        chrome.get(file.as_uri())
        self.load_seconds = time.perf_counter() - begin

    def run(self, script: str, *arguments: object) -> Any:
        return self.chrome.execute_script(script, *arguments)

    def find(self, selector: str) -> WebElement:
        return self.chrome.find_element("css selector", selector)

    def find_all(self, selector: str) -> list[WebElement]:
        return self.chrome.find_elements("css selector", selector)

    def colours(self) -> list[str]:
        return [str(button.get_attribute("data-colour")) for button in self.find_all("#legend .run")]

    def pixels(self, metric: str, colour: str) -> int:
        self.show(metric)
        return int(self.run(COUNT_PIXELS, metric, colour))

    def show(self, metric: str) -> None:
        """Scroll a chart into view, because charts out of view are not drawn."""
        plot = self.find(f".plot[data-metric='{metric}']")
        self.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", plot)
        self.settle()

    def settle(self) -> None:
        """Wait a few frames, until changes are drawn."""
        script = "let left = 3; const wait = () => (left-- ? requestAnimationFrame(wait) : arguments[0]()); wait();"
        self.chrome.execute_async_script(script)

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)
        self.settle()

    def press(self, metric: str, *keys: str) -> str:
        """Press keys on a chart and return the text for screen readers."""
        plot = self.find(f".plot[data-metric='{metric}']")
        self.run("arguments[0].focus()", plot)
        for key in keys:
            plot.send_keys(key)
        self.settle()
        return str(self.run("return document.getElementById('live').textContent"))

    def texts(self, selector: str) -> list[str]:
        """Return the texts as they are in the document, without text-transform."""
        return [str(element.get_attribute("textContent")) for element in self.find_all(selector)]

    def row(self, title: str) -> list[WebElement]:
        """Return the cells of a result, in the order shown."""
        path = f"//div[@id='figures-table']//tbody/tr[normalize-space(th)='{title}']/td"
        return self.chrome.find_elements("xpath", path)

    def sort(self, title: str) -> tuple[list[str], str]:
        """Sort the runs by a result; return its texts and the direction."""
        path = f"//div[@id='figures-table']//tbody/tr[starts-with(normalize-space(th), '{title}')]/th"
        head = self.chrome.find_element("xpath", path)
        self.run("arguments[0].querySelector('button').click()", head)
        cells = head.find_elements("xpath", "../td")
        return [str(cell.get_attribute("textContent")) for cell in cells], str(head.get_attribute("aria-sort"))

    def complaints(self) -> list[str]:
        return [f"{entry['level']}: {entry['message']}" for entry in self.chrome.get_log("browser")]

    def requests(self) -> list[str]:
        """Return the URLs that the page requested, besides itself."""
        events = [json.loads(entry["message"])["message"] for entry in self.chrome.get_log("performance")]
        urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith("file:")]

    def photograph(self, name: str) -> None:
        if folder := os.environ.get(SCREENSHOTS_VARIABLE):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.chrome.save_screenshot(str(Path(folder) / f"{name}.png"))


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunFacts]:
    """Two comparable runs; a stopped one with a smaller batch; one with other data, another GPU and no goodput."""
    folder = tmp_path_factory.mktemp("runs")
    made = (
        MadeRun(run_id="base", num_steps=400, evaluate_every=50, price_per_gpu_hour=0.4),
        MadeRun(run_id="high", num_steps=400, evaluate_every=50, last_loss=0.8, tokens_per_second=9_500.0),
        MadeRun(
            run_id="stopped",
            num_steps=250,
            planned_steps=400,
            status="stopped",
            gpu="a100",
            tokens_per_second=20_000.0,
            overrides=("training.config.batch_size=8",),
        ),
        MadeRun(
            run_id="other",
            num_steps=400,
            gpu="rtx3090",
            data_key="b" * 64,
            has_goodput=False,
            mfu=0.3,
            least_memory=0.8,  # so that its curve differs
        ),
    )
    facts = [load_run_facts(write_run(folder, one)) for one in made]
    facts[1] = replace(facts[1], name=FOREIGN)  # not possible for a directory, but for a W&B run
    return facts


@pytest.fixture(scope="module")
def comparison(runs: list[RunFacts]) -> Comparison:
    return make_comparison(runs, made_at=MADE_AT)


@pytest.fixture(scope="module")
def file(comparison: Comparison, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "compare.html"
    file.write_text(render_html(comparison), encoding="utf-8")
    return file


@pytest.fixture
def page(chrome: Chrome, file: Path) -> Iterator[Page]:
    """Open the page; afterwards, check that it logged no error and requested nothing."""
    page = Page(chrome, file)
    page.settle()
    yield page
    assert page.complaints() == []
    assert page.requests() == []


def test_every_run_is_drawn_in_its_colour_in_every_chart(page: Page, comparison: Comparison) -> None:
    assert len(set(page.colours())) == 4
    assert len(comparison.charts) == 9
    for chart in comparison.charts:
        counts = [page.pixels(chart.metric, colour) for colour in page.colours()]
        assert min(counts) > 3, chart.title
    page.photograph("four-light")


def test_legend_toggles_runs(page: Page) -> None:
    colours = page.colours()
    button = "#legend .run[data-run='2']"
    page.click(button)
    assert page.find(button).get_attribute("aria-pressed") == "false"
    assert page.pixels("train/loss", colours[2]) == 0
    assert page.pixels("train/loss", colours[0]) > 0
    assert not page.find("#figures-table th[data-run='2']").is_displayed()
    assert page.find("#figures-table th[data-run='1']").is_displayed()
    page.click(button)
    assert page.pixels("train/loss", colours[2]) > 0
    page.click("#legend li:nth-child(4) .only")
    assert [page.pixels("train/loss", colour) > 0 for colour in colours] == [False, False, False, True]
    page.click("#show-all")
    assert [page.pixels("train/loss", colour) > 0 for colour in colours] == [True] * 4
    page.click("#show-none")
    assert [page.pixels("train/loss", colour) > 0 for colour in colours] == [False] * 4


def test_runs_are_columns_that_sort_by_a_row(page: Page, comparison: Comparison) -> None:
    assert len(page.find_all("#figures-table tbody tr")) == 2 + len(comparison.figures)  # status and data group
    texts, direction = page.sort("tokens per second")
    assert direction == "descending"  # best first: higher is better
    assert [text.split("k")[0] for text in texts] == ["20.0", "9.52", "9.00", "8.99"]
    texts, direction = page.sort("tokens per second")
    assert (direction, texts[3].startswith("20.0k")) == ("ascending", True)
    assert page.texts("#figures-table thead th bdi")[3] == "stopped"
    for _ in range(2):  # missing values are last in both directions
        texts, _direction = page.sort("cost")
        assert texts[1:] == [MISSING] * 3
    page.click("#figures-table thead button")
    assert page.texts("#figures-table thead th bdi")[::2] == ["base", "stopped"]


def test_best_value_is_marked_in_words(page: Page) -> None:
    best = page.row("validation loss, final")[1]
    assert "★" in best.text
    assert "best of 2 comparable runs" in str(best.get_attribute("textContent"))
    assert "★" not in page.row("validation loss, final")[3].text


def test_verdict_comes_first_and_names_markup_as_text(page: Page, comparison: Comparison) -> None:
    sections = page.run("return [...document.querySelectorAll('main > :not([hidden])')].map((part) => part.id)")
    assert sections[:3] == ["verdict", "cautions", "figures"]
    lines = page.texts("#verdict-list li")
    assert len(lines) == len(comparison.verdicts) == 6
    assert lines[0].startswith(f"{escape(FOREIGN)} against base: validation loss lower (")
    assert "speed higher by 6 %" in lines[0]
    assert "speed not comparable (the hardware differs)" in lines[1]


def test_all_charts_are_drawn_when_the_page_has_loaded(chrome: Chrome, file: Path, comparison: Comparison) -> None:
    """A printer and a screenshot of headless Chromium neither scroll nor wait."""
    page = Page(chrome, file)
    for chart in comparison.charts:
        assert int(page.run(COUNT_PIXELS, chart.metric, page.colours()[0])) > 3, chart.title


def test_charts_fit_printed_paper(chrome: Chrome, file: Path) -> None:
    page = Page(chrome, file)
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    chrome.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 718, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    )
    try:
        outside = """return [...document.querySelectorAll("figure canvas")].filter((canvas) => {
            const [inner, outer] = [canvas, canvas.closest("figure")].map((box) => box.getBoundingClientRect());
            return inner.width < 50 || inner.right > outer.right || inner.bottom > outer.bottom; }).length"""
        assert page.run(outside) == 0
        assert page.run("return document.documentElement.scrollWidth") <= 718
        page.photograph("four-print")
    finally:
        chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_keys_move_the_crosshair_and_values_are_announced(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    text = page.press("train/loss", Keys.HOME)
    assert text.startswith("step 1: ")
    assert "base 2." in text
    assert page.press("train/loss", Keys.ARROW_RIGHT).startswith("step 5: ")
    assert page.press("train/loss", Keys.END).startswith("step 400: ")
    assert "stopped" not in page.press("train/loss", Keys.END)  # it ended at step 250
    text = page.press("train/loss", Keys.HOME, Keys.ARROW_DOWN)
    assert text.startswith("step 1: base ")
    assert "other" not in text
    assert page.find("#chart-0 .readout").is_displayed()
    page.photograph("four-crosshair")
    page.press("train/loss", Keys.ESCAPE)
    assert not page.find("#chart-0 .readout").is_displayed()


def test_chart_is_focusable_and_described(page: Page) -> None:
    plot = page.find("#chart-0 .plot")
    assert plot.get_attribute("tabindex") == "0"
    assert plot.accessible_name.lower() == "training loss"
    assert "By step, 4 runs" in page.find("#chart-0-description").text
    page.click("#chart-0 summary")
    wait_for(lambda: len(page.find_all("#chart-0 details tbody tr")) == 4)


def test_zoom_by_mouse_and_keys(page: Page) -> None:
    from selenium.webdriver import ActionChains

    page.show("train/loss")
    plot = page.find("#chart-0 .u-over")
    ActionChains(page.chrome).move_to_element(plot).click_and_hold().move_by_offset(90, 0).release().perform()
    page.settle()
    assert page.find("#reset").is_enabled()
    from selenium.webdriver.common.keys import Keys

    first = page.press("train/loss", Keys.HOME)
    assert 150 < int(first.split(":")[0].removeprefix("step ")) < 260
    page.click("#reset")
    assert page.press("train/loss", Keys.HOME).startswith("step 1:")
    page.press("train/loss", "+", "+")
    assert page.press("train/loss", Keys.END).startswith("step 101:")  # a quarter of 400
    page.press("train/loss", Keys.HOME, "-")
    assert page.press("train/loss", Keys.END).startswith("step 201:")
    page.press("train/loss", "0")
    assert not page.find("#reset").is_enabled()


def test_axes_smoothing_and_scales(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    page.click("input[name=axis][value=tokens]")
    assert "tokens: " in page.press("train/loss", Keys.END)
    page.click("input[name=axis][value=seconds]")
    assert page.press("train/loss", Keys.END).startswith("75 min: other 1.")
    assert "By wall-clock time" in page.find("#chart-0-description").text
    colour = page.colours()[0]
    page.click("#log")
    page.click("#outliers")
    assert page.pixels("train/loss", colour) > 0
    text = page.press("train/loss", Keys.HOME)
    page.run("const s = document.getElementById('smoothing'); s.value = 0; s.dispatchEvent(new Event('input'))")
    page.settle()
    assert page.find("#smoothing-value").text == "off"
    assert page.press("train/loss", Keys.HOME, Keys.ARROW_RIGHT) != text


def test_memory_chart_shows_gpu_memory_and_prediction(page: Page) -> None:
    limit = page.run("return getComputedStyle(document.documentElement).getPropertyValue('--limit')")
    assert page.pixels("memory/peak_allocated_gib", str(limit).strip()) > 50
    assert "dashed: GPU memory; dotted: predicted" in page.find("#chart-4-description").text
    page.photograph("four-memory")


def test_theme_switches_to_dark(page: Page, comparison: Comparison) -> None:
    light = page.colours()
    ground = "return getComputedStyle(document.body).backgroundColor"
    before = page.run(ground)
    page.click("#theme")
    assert page.find("#theme").get_attribute("aria-pressed") == "true"
    assert page.run(ground) != before
    dark = page.colours()
    assert not set(dark) & set(light)
    for chart in comparison.charts[:3]:
        assert all(page.pixels(chart.metric, colour) > 3 for colour in dark)
    page.photograph("four-dark")


def test_system_theme_is_followed(chrome: Chrome, file: Path) -> None:
    chrome.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    try:
        assert Page(chrome, file).run("return document.documentElement.dataset.theme") == "dark"
    finally:
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_markup_in_names_is_text(page: Page) -> None:
    assert page.chrome.title == "4 runs compared"
    assert page.run("return document.querySelectorAll('img, b b, bdi b').length") == 0
    assert page.find("#legend .run[data-run='1'] bdi").get_attribute("textContent") == escape(FOREIGN)
    assert page.find("#figures-table th[data-run='1'] bdi").get_attribute("textContent") == escape(FOREIGN)


def test_caveats_time_breakdown_and_settings_are_shown(page: Page) -> None:
    cautions = page.find("#caution-list").text
    for title in ("The runs were trained on different data", "The global batch differs", "Not finished"):
        assert title in cautions
    bars = [bar.get_attribute("aria-label") for bar in page.find_all("#share-bars .bar")]
    assert len(bars) == 4
    assert str(bars[0]).startswith("base: training 9")
    assert "summed from steps and evaluations" in page.find("#shares-note").text
    settings = page.find("#settings-table").text
    assert "batch.global_batch_size" in settings
    assert "optimizer.learning_rate" not in settings  # it is the same in all


@pytest.fixture(scope="module")
def judged_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs evaluated on the same rows, one judged by another checker, one without task metrics."""
    folder = tmp_path_factory.mktemp("judged")
    made = (
        MadeRun(run_id="low", num_steps=200, evaluate_every=20, task_rates=(0.1, 0.5)),
        MadeRun(run_id="high", num_steps=200, evaluate_every=20, task_rates=(0.1, 0.9)),
        MadeRun(run_id="other", num_steps=200, evaluate_every=20, task_rates=(0.1, 0.7), checker=FOREIGN),
        MadeRun(run_id="plain", num_steps=200, evaluate_every=20),
    )
    file = folder / "compare.html"
    comparison = make_comparison([load_run_facts(write_run(folder, one)) for one in made], made_at=MADE_AT)
    file.write_text(render_html(comparison), encoding="utf-8")
    return file


@pytest.fixture
def judged(chrome: Chrome, judged_file: Path) -> Iterator[Page]:
    page = Page(chrome, judged_file)
    page.settle()
    yield page
    assert page.complaints() == []
    assert page.requests() == []


def test_task_metrics_are_drawn_from_step_0(judged: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    counts = [judged.pixels("eval/matches", colour) for colour in judged.colours()]
    assert min(counts[:3]) > 3
    assert counts[3] == 0  # no task metrics
    judged.photograph("judged-light")
    assert "Same query or same result (eval/matches)".lower() in judged.find("#chart-0 h3").text.lower()
    text = judged.press("eval/matches", Keys.HOME)
    assert text.startswith("step 0: ")
    assert "low 10 %" in text
    assert "plain" not in text
    assert "high 90 %" in judged.press("eval/matches", Keys.END)
    assert judged.press("train/loss", Keys.HOME).startswith("step 0: ")  # one axis for all charts
    for axis in ("tokens", "seconds"):
        judged.click(f"input[name=axis][value={axis}]")
        assert all(judged.pixels("eval/matches", colour) > 3 for colour in judged.colours()[:3])
        text = judged.press("eval/matches", Keys.HOME)
        assert ("low 10 %" in text) == (axis == "tokens")  # the base model is evaluated at 0 tokens, but not at 0 s
    judged.click("#theme")
    judged.photograph("judged-dark")


def test_task_metrics_have_confidence_intervals_and_sort(judged: Page) -> None:
    assert judged.find("#figures-table tbody tr:nth-child(2) th").text == "eval/matches"  # below the status
    cells, _ = judged.sort("eval/matches")
    assert [cell.split(" %")[0] for cell in cells] == ["90.0", "70.0", "50.0", MISSING]
    assert "(35.2 to 64.8)" in cells[2]
    best = [cell for cell in judged.row("eval/matches ▶") if "best" in str(cell.get_attribute("class"))]
    assert [cell.get_attribute("data-run") for cell in best] == ["1"]
    assert best[0].get_attribute("title") == "best of 2 comparable runs; 40 answers judged; 95 %: 76.9 to 96.0"
    assert judged.row("eval/matches, gain")[0].text.startswith("+80.0 points")
    judged.photograph("judged-figures")


def test_eight_runs_fit_and_a_flat_loss_is_logarithmic(chrome: Chrome, tmp_path: Path) -> None:
    made = [
        MadeRun(
            run_id=f"neo4j-20261115-10{number}000-rank",
            num_steps=100,
            evaluate_every=50,
            task_rates=(0.0, 0.95),
            first_loss=3.6,
            last_loss=0.001,
            noise=0.0,
        )
        for number in range(8)
    ]
    file = tmp_path / "compare.html"
    comparison = make_comparison([load_run_facts(write_run(tmp_path, one)) for one in made], made_at=MADE_AT)
    file.write_text(render_html(comparison), encoding="utf-8")
    chrome.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    try:
        page = Page(chrome, file)
        box = "const box = document.getElementById('figures-table'); return box.scrollWidth - box.clientWidth"
        assert page.run(box) == 0
        cells = "return [...document.querySelectorAll('#figures-table td')]"
        assert page.run(f"{cells}.filter((cell) => cell.scrollWidth > cell.clientWidth).length") == 0
        assert page.find("#log").is_selected()
        assert "logarithmic" in page.find("#chart-1-description").text
        assert [cell.text.split("\n")[0] for cell in page.row("eval/matches")] == ["95.0 % tie"] * 8
        page.photograph("eight")
    finally:
        chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_no_row_of_charts_ends_with_a_gap(page: Page) -> None:
    script = """return ["chart-grid", "minor-grid"].map((id) => {
        const grid = document.getElementById(id).getBoundingClientRect();
        const last = document.getElementById(id).lastChild.getBoundingClientRect();
        return Math.round(grid.right - last.right); })"""
    assert page.run(script) == [0, 0]


def test_different_checkers_are_a_caveat(judged: Page) -> None:
    assert "Answers were judged by different judges (eval/matches)" in judged.find("#caution-list").text
    assert escape(FOREIGN) in judged.find("#caution-list").text
    assert judged.run("return document.querySelectorAll('img').length") == 0


@pytest.mark.parametrize("width", [360, 700, 1400, 2400])
def test_layout_fits_the_window(page: Page, width: int) -> None:
    page.chrome.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    try:
        page.settle()
        assert page.run("return document.documentElement.scrollWidth") <= width
        assert page.pixels("train/loss", page.colours()[0]) > 3
        page.photograph(f"four-{width}")
    finally:
        page.chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_missing_metrics_are_named(chrome: Chrome, tmp_path: Path) -> None:
    facts = [load_run_facts(write_run(tmp_path, MadeRun(run_id=name, gpu=None, num_steps=6))) for name in ("a", "b")]
    fresh = load_run_facts(write_run(tmp_path, MadeRun(run_id="fresh", gpu=None, num_steps=0, status=None)))
    file = tmp_path / "compare.html"
    file.write_text(render_html(make_comparison([*facts, fresh], made_at=MADE_AT)), encoding="utf-8")
    page = Page(chrome, file)
    page.settle()
    assert "No run recorded: validation loss, MFU, VRAM, GPU utilization, data wait." in page.find("#left-out").text
    assert page.find_all(".plot[data-metric='throughput/device/mfu']") == []
    assert "not started" in page.find("#legend .run[data-run='2']").text
    assert page.complaints() == []


def test_run_without_steps_has_a_page(chrome: Chrome, tmp_path: Path) -> None:
    fresh = load_run_facts(write_run(tmp_path, MadeRun(run_id="fresh", num_steps=0, status=None)))
    one = load_run_facts(write_run(tmp_path, MadeRun(run_id="one", num_steps=1)))
    for runs in ([fresh], [one], [fresh, one]):
        file = tmp_path / "compare.html"
        file.write_text(render_html(make_comparison(runs, made_at=MADE_AT)), encoding="utf-8")
        page = Page(chrome, file)
        page.settle()
        assert page.complaints() == []
        assert len(page.find_all("#figures-table thead:first-of-type th[data-run]")) in (len(runs), 2 * len(runs))


@pytest.mark.slow
def test_fifty_long_runs_stay_responsive(chrome: Chrome, tmp_path: Path) -> None:
    """Five different runs of 5,000 steps, each shown ten times under different names."""
    made = [MadeRun(run_id=f"run-{at}", num_steps=5_000, evaluate_every=100, last_loss=0.8 + at / 9) for at in range(5)]
    read = [load_run_facts(write_run(tmp_path, one)) for one in made]
    many = [replace(one, name=f"{one.name}-{copy}") for copy in range(10) for one in read]
    file = tmp_path / "compare.html"
    file.write_text(render_html(make_comparison(many, made_at=MADE_AT)), encoding="utf-8")
    assert file.stat().st_size < MOST_BYTES
    page = Page(chrome, file)
    page.settle()
    assert page.load_seconds < MOST_LOAD_SECONDS
    assert len(set(page.colours())) == 50
    for selector in ("#legend .run[data-run='7']", "#theme", "input[name=axis][value=tokens]", "#log"):
        page.run("performance.clearMeasures()")
        page.click(selector)
        took = page.run("return performance.getEntriesByName('redraw').map((entry) => entry.duration)")
        assert took
        assert max(took) < MOST_REDRAW_MS
    page.photograph("fifty-dark")
    page.find("#filter").send_keys("run-4")
    page.click("#show-none")  # of the runs that match the filter
    hidden = [button.get_attribute("data-run") for button in page.find_all("#legend .run[aria-pressed=false]")]
    assert hidden == ["4", "7", *(str(at) for at in range(9, 50, 5))]
    assert page.complaints() == []
