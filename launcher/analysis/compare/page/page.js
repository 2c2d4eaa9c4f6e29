// Builds the page and handles its controls.

function makeCautions() {
  if (!comparison.cautions.length) return;
  for (const { level, title, spoils, detail } of comparison.cautions) {
    const chips = spoils.map((aspect) => make("span", { class: "chip", text: aspect }));
    const lead = make("span", { class: "unseen", text: level === "warning" ? "Warning: " : "Note: " });
    const affected = make("span", { class: "unseen", text: spoils.length ? "affects the comparison of " : "" });
    byId("caution-list").append(make("li", { class: `caution ${level}` },
      make("div", {}, lead, make("b", { text: title }), affected, ...chips), make("p", { text: detail })));
  }
  byId("cautions").hidden = false;
}

function makeVerdicts() {
  for (const { run, against, parts } of comparison.verdicts) {
    const name = (index) => [makeSwatch(index, state.theme), make("bdi", { text: runs[index].name })];
    const words = parts.flatMap(({ outcome, text }, at) => {
      const [, verdict, detail] = text.match(/^([^(]*)(.*)$/s);
      const kind = outcome === "better" || outcome === "worse" ? "clear" : "";
      return [at ? ", " : "", make("span", { class: kind, text: verdict }), make("span", { class: "detail", text: detail })];
    });
    byId("verdict-list").append(make("li", {},
      make("span", { class: "pair" }, ...name(run), " against ", ...name(against), ": "), make("span", {}, ...words)));
  }
  byId("verdict-note").textContent = comparison.about_verdicts;
  byId("verdict-note").hidden = !comparison.about_verdicts;
  byId("verdict").hidden = !comparison.verdicts.length;
}

function makeTexts() {
  byId("title").textContent = comparison.title;
  const experts = [...new Set(runs.map((run) => run.expert).filter(Boolean))];
  const when = comparison.made_at.replace("T", " ").replace(/\+00:00$|Z$/, " UTC");
  byId("subtitle").textContent = [experts.length ? `expert ${experts.join(", ")}` : "", `${runs.length} ${runs.length === 1 ? "run" : "runs"}`, `as of ${when}`].filter(Boolean).join(" · ");
  byId("footer").textContent = `Created by launcher compare ${comparison.launcher_version}. This page is self-contained and loads nothing from a server.`;
  if (comparison.left_out.length) {
    byId("left-out").textContent = `Not shown. ${comparison.about_left_out}`;
    byId("left-out").hidden = false;
  }
  for (const { place, why } of comparison.skipped) {
    byId("skipped-list").append(make("li", { class: "quiet", text: `${place}: ${why}` }));
    byId("skipped").hidden = false;
  }
}

function setTheme(theme) {
  state.theme = theme;
  document.documentElement.dataset.theme = theme;
  const isDark = theme === "dark";
  byId("theme").setAttribute("aria-pressed", String(isDark));
  readScheme();
  document.querySelectorAll("svg.swatch").forEach((svg) => svg.replaceWith(makeSwatch(Number(svg.dataset.run), theme)));
  document.querySelectorAll("#legend .run").forEach((button, index) => { button.dataset.colour = colourOf(index, theme); });
  changed();
}

// Redraws charts that have changed when they come into view.
const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const chart = charts.find(({ figure }) => figure === target);
    chart.isNear = isIntersecting;
    if (isIntersecting && chart.isStale) chart.draw();
  }
}, { rootMargin: "300px" });

// Long curves are noisy, so they are smoothed by default.
function chooseSmoothing() {
  const isLong = runs.some((run) => run.series.some((series) => series.step.length > 100));
  byId("smoothing").value = isLong ? "0.6" : "0";
  byId("smoothing").dispatchEvent(new Event("input"));
}

function listen() {
  document.querySelectorAll("input[name=axis]").forEach((input) => {
    const isKnown = input.value === "step" || runs.some((run) => run.axis[input.value]);
    input.disabled = !isKnown;
    input.addEventListener("change", () => {
      Object.assign(state, { axis: input.value, cursor: null });
      setZoom(null);
    });
  });
  byId("smoothing").addEventListener("input", (event) => {
    state.smoothing = Number(event.target.value);
    byId("smoothing-value").textContent = state.smoothing ? state.smoothing.toFixed(2) : "off";
    changed();
  });
  byId("log").addEventListener("change", (event) => { state.log = event.target.checked; changed(); });
  byId("outliers").addEventListener("change", (event) => { state.withoutOutliers = event.target.checked; changed(); });
  byId("reset").addEventListener("click", () => setZoom(null));
  byId("theme").addEventListener("click", () => setTheme(state.theme === "dark" ? "light" : "dark"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
  let width = byId("charts").clientWidth;
  new ResizeObserver(([{ target }]) => {
    if (target.clientWidth === width) return;
    width = target.clientWidth;
    changed();
  }).observe(byId("charts"));
  let before = state.theme;
  addEventListener("beforeprint", () => {
    before = state.theme;
    setTheme("light");
    charts.forEach((chart) => chart.draw(true));
  });
  addEventListener("afterprint", () => setTheme(before));
}

makeVerdicts();
makeCautions();
makeTexts();
readScheme();
makeLegend();
for (const spec of comparison.charts) {
  const chart = new Chart(spec);
  charts.push(chart);
  byId(spec.is_minor ? "minor-grid" : "chart-grid").append(chart.figure);
  watcher.observe(chart.figure);
  listeners.push(() => chart.draw());
}
makeFigures();
makeShares();
makeSettings();
listen();
state.log = byId("log").checked = comparison.charts.some((spec) => spec.is_log);
chooseSmoothing();
setTheme(state.theme);
// All charts at once, before the page counts as loaded: a printer or a screenshot does not scroll or wait.
charts.forEach((chart) => chart.draw(true));
