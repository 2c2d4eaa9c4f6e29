// One chart: curves, axes, crosshair and zoom by uPlot; a readout, keys, and a description in words.

const FROM_ZERO = new Set(["tokens/s", "share", "GiB", "s"]);
const SECONDS_STEPS = [1, 2, 5, 10, 15, 30, ...[1, 2, 5, 10, 15, 30].map((n) => n * 60), ...[1, 2, 3, 6, 12, 24, 48, 96].map((n) => n * 3600)];
const FONT = "11px system-ui, sans-serif";
const MAX_READOUT = 12; // runs
const MAX_SPOKEN = 5;
const CROWDED = 12; // runs; more are drawn with thin lines and without bands
const charts = [];
let scheme = {};

function readScheme() {
  const style = getComputedStyle(document.documentElement);
  scheme = Object.fromEntries(["quiet", "grid", "line", "limit"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.figureSpec = comparison.figures.find(({ key }) => key === spec.figure) ?? null;
    const id = `chart-${charts.length}`;
    const unit = unitWords(spec.unit);
    this.description = make("p", { class: "quiet", id: `${id}-description` });
    this.readout = make("div", { class: "readout", hidden: "", "aria-hidden": "true" });
    this.canvas = make("div", { class: "canvas", "aria-hidden": "true" });
    this.plot = make(
      "div",
      { class: "plot", tabindex: "0", role: "application", "aria-roledescription": "chart", "data-metric": spec.metric,
        "aria-labelledby": `${id}-title`, "aria-describedby": `${id}-description keys` },
      this.canvas, this.readout,
    );
    this.details = make("details", {}, make("summary", { text: "Values" }));
    this.details.addEventListener("toggle", () => this.fillDetails());
    const heading = make("h3", { id: `${id}-title`, text: spec.title });
    if (unit) heading.append(make("span", { class: "unit", text: ` ${unit}` }));
    this.isNear = false;
    this.isStale = true;
    this.figure = make("figure", { id }, make("figcaption", {}, heading, this.description), this.plot, this.details);
    this.plot.addEventListener("pointerleave", () => this.leave());
    this.plot.addEventListener("keydown", (event) => this.press(event));
    this.plot.addEventListener("focus", () => { if (state.cursor === null) this.moveTo(this.range[1], true); });
    this.plot.addEventListener("blur", () => this.leave());
  }

  // -- drawing ----------------------------------------------------------------------------------------------------

  // Charts out of sight are drawn when they come near.
  draw(isPrinted = false) {
    this.isStale = !this.isNear && !isPrinted;
    if (this.isStale) return;
    this.shown = shownCurves(this.spec);
    this.range = axisRange();
    this.lines = this.findLines();
    this.values = this.valueRange();
    const tables = this.shown.map((curve) => [xsOf(curve), ysOf(curve, this.spec)]);
    const data = tables.length ? uPlot.join(tables) : [[]];
    this.uplot?.destroy();
    this.uplot = new uPlot(this.options(), data, this.canvas);
    this.describe();
    this.fillDetails();
    this.drawCursor();
  }

  options() {
    const { width, height } = this.plot.getBoundingClientRect();
    const axis = { stroke: scheme.quiet, font: FONT, ticks: { show: false }, border: { show: false } };
    return {
      width, height,
      padding: [10, 14, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: false, range: () => this.range },
        y: { distr: this.isLog() ? 3 : 1, range: () => this.values },
      },
      axes: [
        { ...axis, size: 26, gap: 7, space: 65, grid: { show: false }, border: { show: true, stroke: scheme.line, width: 1 },
          incrs: state.axis === "seconds" ? SECONDS_STEPS : state.axis === "step" ? integerSteps() : undefined,
          values: (_, ticks) => ticks.map((tick) => (state.axis === "seconds" ? formatSeconds(tick) : formatCount(tick))) },
        { ...axis, size: 58, gap: 7, space: 36, grid: { stroke: scheme.grid, width: 1 },
          values: (_, ticks) => ticks.map((tick) => (tick === null || (this.isLog() && !/^[125](\.0+)?e/.test(tick.toExponential(3))) ? "" : this.spec.unit === "GiB" ? formatCount(tick) : formatValue(tick, this.spec.unit))) },
      ],
      series: [{}, ...this.shown.map((curve) => this.seriesOf(curve))],
      cursor: {
        y: false,
        drag: { x: true, y: false, setScale: false },
        points: { size: 9, width: 0 },
        dataIdx: (uplot, series, hovered) => this.indexAt(uplot, series, hovered),
      },
      hooks: {
        drawAxes: [(uplot) => this.drawBelow(uplot)],
        setCursor: [(uplot) => this.follow(uplot)],
        setSelect: [(uplot) => this.zoomTo(uplot)],
        ready: [(uplot) => uplot.over.addEventListener("dblclick", () => setZoom(null))],
      },
    };
  }

  seriesOf(curve) {
    const isPicked = state.picked === curve.index;
    const colour = colourOf(curve.index, state.theme);
    return {
      stroke: colour,
      width: isPicked ? 3 : this.shown.length > CROWDED ? 1.3 : 1.8,
      dash: dashOf(curve.index),
      alpha: state.picked === null || isPicked ? 1 : 0.12,
      points: { show: true, fill: colour, filter: (uplot, series, isShown) => (isShown ? this.markedIndices(uplot, series, curve) : []), paths: (uplot, series, from, to, indices) => markPaths(uplot, series, indices, curve.index) },
    };
  }

  // Every point of a short curve; of a long one five, at different places for each run.
  markedIndices(uplot, series, curve) {
    const values = uplot.data[series];
    const [low, high] = this.range;
    const indices = [];
    uplot.data[0].forEach((x, index) => { if (x >= low && x <= high && values[index] !== null && values[index] !== undefined) indices.push(index); });
    if (indices.length <= (this.shown.length > CROWDED ? 12 : 30)) return indices;
    const gap = indices.length / 5;
    return [0, 1, 2, 3, 4].map((n) => indices[Math.floor(gap * (n + 0.15 + (0.7 * (curve.index % 10)) / 10))]);
  }

  // GPU memory, once for each size; the predicted peak of each run.
  findLines() {
    if (this.spec.metric !== "memory/peak_allocated_gib") return [];
    const sizes = new Map();
    for (const { run } of this.shown) {
      if (run.card_gib === null) continue;
      const size = run.card_gib.toFixed(1);
      sizes.set(size, (sizes.get(size) ?? new Set()).add(run.card.replace(/^(GeForce|Tesla) /, "")));
    }
    const limits = [...sizes].map(([size, names]) => ({ value: Number(size), label: `${[...names].join(", ")}: ${size} GiB` }));
    const predicted = this.shown.filter(({ run }) => run.predicted_gib !== null).map(({ run, index }) => ({ value: run.predicted_gib, run: index }));
    return [...predicted, ...limits];
  }

  isLog() {
    return state.log && this.spec.metric.endsWith("/loss") && this.shown.every((curve) => curve.series.mean.every((value) => value === null || value > 0));
  }

  valueRange() {
    const inRange = [];
    for (const curve of this.shown) {
      const xs = xsOf(curve);
      const { low, high, mean } = curve.series;
      const sources = isSmoothed(this.spec) || state.withoutOutliers ? [ysOf(curve, this.spec)] : [low ?? mean, high ?? mean];
      xs.forEach((x, index) => {
        if (x < this.range[0] || x > this.range[1]) return;
        for (const values of sources) if (values[index] !== null) inRange.push(values[index]);
      });
    }
    if (!inRange.length) return this.isLog() ? [0.1, 1] : [0, 1];
    let [least, most] = state.withoutOutliers ? [percentile(inRange, 0.02), percentile(inRange, 0.98)]
      : inRange.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
    for (const line of this.lines) [least, most] = [Math.min(least, line.value), Math.max(most, line.value)];
    if (this.isLog()) return [least / 1.04, most * 1.04];
    if (FROM_ZERO.has(this.spec.unit) && least >= 0) return [0, most > 0 ? most * 1.08 : 1];
    const margin = (most - least || Math.abs(most) || 1) * 0.06;
    return [least - margin, most + margin];
  }

  // Below the curves: the spread of each curve, or its unsmoothed values; memory limits and predictions.
  drawBelow(uplot) {
    const { ctx, bbox } = uplot;
    const ratio = devicePixelRatio || 1;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const curve of this.shown) {
      const isPicked = state.picked === curve.index;
      if (this.shown.length > CROWDED && !isPicked) continue;
      const { low, high, mean } = curve.series;
      const fade = state.picked === null || isPicked ? 1 : 0.12;
      ctx.strokeStyle = ctx.fillStyle = colourOf(curve.index, state.theme);
      ctx.lineWidth = ratio;
      ctx.globalAlpha = fade * (low ? 0.16 : 0.22);
      if (low) ctx.fill(tracePath(uplot, xsOf(curve), high, low));
      else if (isSmoothed(this.spec)) ctx.stroke(tracePath(uplot, xsOf(curve), mean));
    }
    for (const { value, run, label } of this.lines) {
      const isLimit = run === undefined;
      const y = Math.round(uplot.valToPos(value, "y", true));
      ctx.globalAlpha = isLimit ? 1 : state.picked !== null && state.picked !== run ? 0.15 : 0.75;
      ctx.strokeStyle = ctx.fillStyle = isLimit ? scheme.limit : colourOf(run, state.theme);
      ctx.lineWidth = (isLimit ? 2 : 1) * ratio;
      ctx.setLineDash((isLimit ? [8, 5] : [2, 4]).map((length) => length * ratio));
      ctx.stroke(new Path2D(`M${bbox.left} ${y}H${bbox.left + bbox.width}`));
      if (!label) continue;
      const isAtTop = y < bbox.top + 16 * ratio;
      ctx.font = `${11 * ratio}px system-ui, sans-serif`;
      ctx.textAlign = "right";
      ctx.textBaseline = isAtTop ? "top" : "bottom";
      ctx.fillText(label, bbox.left + bbox.width - 2 * ratio, y + (isAtTop ? 5 : -3) * ratio);
    }
    ctx.restore();
  }

  // -- crosshair and zoom -----------------------------------------------------------------------------------------

  // Index in the joined data of a run's point nearest to the crosshair.
  indexAt(uplot, series, hovered) {
    if (!series || state.cursor === null) return hovered;
    const curve = this.shown[series - 1];
    const index = this.nearest(curve, state.cursor);
    return index === null ? null : uplot.valToIdx(xsOf(curve)[index]);
  }

  drawCursor() {
    if (this.isStale || !this.uplot) return;
    const isInside = state.cursor !== null && state.cursor >= this.range[0] && state.cursor <= this.range[1];
    const left = isInside ? this.uplot.valToPos(state.cursor, "x") : -10;
    this.uplot.setCursor({ left, top: isInside ? this.pointer ?? 0 : -10 }, false);
    if (isInside && this.isActive) this.showReadout(this.readAt(state.cursor), left);
    else this.readout.hidden = true;
  }

  // The pointer moves over this chart: the crosshair follows in all of them.
  follow(uplot) {
    const { event } = uplot.cursor;
    if (!event || uplot.cursor.left < 0) return;
    if (!event.movementX && !event.movementY) return this.drawCursor(); // the chart was redrawn below a resting pointer
    this.pointer = uplot.cursor.top;
    this.moveTo(uplot.posToVal(uplot.cursor.left, "x"), false);
  }

  zoomTo(uplot) {
    const { left, width } = uplot.select;
    if (width > 6) setZoom([uplot.posToVal(left, "x"), uplot.posToVal(left + width, "x")]);
    if (width) uplot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  // Index of a run's point nearest to x; null if the run ended long before, or begins long after.
  nearest(curve, x) {
    const xs = xsOf(curve);
    const reach = (this.range[1] - this.range[0]) / 50;
    return x < xs[0] - reach || x > xs[xs.length - 1] + reach ? null : nearestIndex(xs, x);
  }

  readAt(x) {
    const read = [];
    for (const curve of this.shown) {
      const index = this.nearest(curve, x);
      const value = index === null ? null : ysOf(curve, this.spec)[index];
      if (value === null) continue;
      read.push({ curve, value, low: curve.series.low?.[index] ?? null, high: curve.series.high?.[index] ?? null });
    }
    return read.sort((a, b) => b.value - a.value);
  }

  showReadout(read, left) {
    const distance = ({ value }) => Math.abs(this.uplot.valToPos(value, "y") - this.pointer);
    const near = state.picked !== null ? state.picked : this.pointer === undefined || !read.length ? null
      : read.reduce((a, b) => (distance(a) <= distance(b) ? a : b)).curve.index;
    const from = Math.max(0, Math.min(read.findIndex(({ curve }) => curve.index === near) - MAX_READOUT / 2, read.length - MAX_READOUT));
    const items = read.slice(from, from + MAX_READOUT).map(({ curve, value, low, high }) => {
      const hasSpread = low !== null && low !== high && !isSmoothed(this.spec) && read.length <= 6;
      const spread = hasSpread ? ` (${formatValue(low, this.spec.unit)} … ${formatValue(high, this.spec.unit)})` : "";
      return make("li", { class: curve.index === near ? "near" : "" }, makeSwatch(curve.index, state.theme),
        make("span", { text: formatValue(value, this.spec.unit) + spread }), make("bdi", { text: curve.run.name }));
    });
    const more = read.length - items.length;
    this.readout.replaceChildren(
      make("p", { text: formatPlace(state.cursor, state.axis) + (read.length ? "" : ": no values") }),
      make("ul", {}, ...items),
      more > 0 ? make("p", { text: `and ${more} more` }) : "",
    );
    this.readout.hidden = false;
    const { width } = this.plot.getBoundingClientRect();
    const x = left + this.uplot.over.offsetLeft;
    this.readout.style.left = x > width / 2 ? "auto" : `${x + 12}px`;
    this.readout.style.right = x > width / 2 ? `${width - x + 12}px` : "auto";
  }

  moveTo(x, isSpoken) {
    this.isActive = true;
    state.cursor = Math.min(Math.max(x, this.range[0]), this.range[1]);
    charts.forEach((chart) => chart.drawCursor());
    if (isSpoken) this.speak();
  }

  leave() {
    this.isActive = false;
    this.pointer = undefined;
    if (document.activeElement === this.plot) return;
    state.cursor = null;
    charts.forEach((chart) => chart.drawCursor());
  }

  // For screen readers.
  speak() {
    const read = this.readAt(state.cursor).filter(({ curve }) => state.picked === null || curve.index === state.picked);
    const words = read.slice(0, MAX_SPOKEN).map(({ curve, value }) => `${curve.run.name} ${formatValue(value, this.spec.unit)}`);
    const more = read.length > MAX_SPOKEN ? `; and ${read.length - MAX_SPOKEN} more, arrow up and down select one` : "";
    byId("live").textContent = `${formatPlace(state.cursor, state.axis)}: ${words.join("; ") || "no values"}${more}`;
  }

  press(event) {
    const [low, high] = axisRange();
    const stride = (event.shiftKey ? 0.1 : 0.01) * (high - low);
    const by = state.axis === "step" && !event.shiftKey ? Math.max(1, Math.round(stride)) : stride;
    const x = state.cursor ?? high;
    const zoomBy = (factor) => {
      const [least, most] = fullRange();
      const zoom = [Math.max(least, x - (x - low) * factor), Math.min(most, x + (high - x) * factor)];
      setZoom(zoom[0] <= least && zoom[1] >= most ? null : zoom);
    };
    const actions = {
      ArrowLeft: () => this.moveTo(x - by, true),
      ArrowRight: () => this.moveTo(x + by, true),
      Home: () => this.moveTo(low, true),
      End: () => this.moveTo(high, true),
      ArrowUp: () => this.pickNext(-1),
      ArrowDown: () => this.pickNext(1),
      "+": () => zoomBy(0.5),
      "=": () => zoomBy(0.5),
      "-": () => zoomBy(2),
      0: () => setZoom(null),
      Escape: () => { pick(null); this.plot.blur(); },
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  }

  pickNext(by) {
    const shown = this.shown.map(({ index }) => index);
    if (!shown.length) return;
    const at = shown.indexOf(state.picked);
    pick(shown[at < 0 ? (by > 0 ? 0 : shown.length - 1) : (at + by + shown.length) % shown.length]);
    this.isActive = true;
    this.speak();
  }

  // -- results, as in the table of results ------------------------------------------------------------------------

  resultOf(curve) {
    return this.figureSpec ? this.figureSpec.values[curve.index] : lastNumber(curve.series.mean);
  }

  resultWords() {
    if (!this.figureSpec || this.spec.is_sparse) return "final";
    if (this.figureSpec.key.startsWith("peak")) return "peak";
    return this.figureSpec.note.includes("median") ? "median" : this.figureSpec.note || "final";
  }

  // -- words ------------------------------------------------------------------------------------------------------

  describe() {
    const ends = this.shown.map((curve) => ({ curve, value: this.resultOf(curve) })).filter(({ value }) => value !== null);
    ends.sort((a, b) => a.value - b.value);
    const format = ({ curve, value }) => `${formatResult(this.figureSpec ?? this.spec, value)} (${shorten(curve.run.name)})`;
    const what = this.resultWords();
    const notes = [];
    if (ends.length > 1) notes.push(`${what} ${format(ends[0])} to ${format(ends[ends.length - 1])}`);
    else if (ends.length) notes.push(`${what} ${formatResult(this.figureSpec ?? this.spec, ends[0].value)}`);
    if (this.isLog()) notes.push("logarithmic");
    if (this.lines.length) notes.push("dashed: GPU memory; dotted: predicted");
    const without = curves.get(this.spec.metric).filter((curve) => xsOf(curve) === null).map((curve) => curve.run.name);
    if (without.length) notes.push(`${without.length > 3 ? `${without.length} runs` : without.join(", ")}: ${AXIS_TITLES[state.axis]} not recorded`);
    const count = this.shown.length === runs.length ? `${runs.length} runs` : `${this.shown.length} of ${runs.length} runs`;
    this.description.textContent = [`By ${AXIS_TITLES[state.axis]}, ${runs.length === 1 ? "1 run" : count}`, ...notes].join("; ");
  }

  fillDetails() {
    if (!this.details.open) return;
    const rows = curves.get(this.spec.metric).map(({ run, index, series }) => {
      const [lows, highs] = [series.low ?? series.mean, series.high ?? series.mean].map((values) => values.filter((value) => value !== null));
      const result = this.resultOf({ index, series });
      const cells = [result, Math.min(...lows), Math.max(...highs), series.step[series.step.length - 1]];
      const words = [formatResult(this.figureSpec ?? this.spec, result), ...cells.slice(1, 3).map((value) => formatValue(value, this.spec.unit)), cells[3].toLocaleString("en")];
      return { run: index, name: run.name, cells: cells.map((sort, column) => ({ sort, text: words[column] })) };
    });
    const heads = [this.resultWords(), "minimum", "maximum", "last step"].map((title) => ({ title, isNumber: true }));
    const table = makeTable(`${capitalise(this.spec.title)}: values`, heads, rows);
    this.details.replaceChildren(this.details.firstChild, make("div", { class: "scroll" }, table));
  }
}

function integerSteps() {
  return [...Array(10).keys()].flatMap((power) => [1, 2, 5].map((factor) => factor * 10 ** power));
}

function markPaths(uplot, series, indices, run) {
  const path = new Path2D();
  const size = 3.2 * (devicePixelRatio || 1);
  for (const index of indices ?? []) {
    addMark(path, markOf(run), uplot.valToPos(uplot.data[0][index], "x", true), uplot.valToPos(uplot.data[series][index], "y", true), size);
  }
  return { fill: path, stroke: null };
}

// The line breaks where a value is missing. With lower values, the area between both.
function tracePath(uplot, xs, ys, lower = null) {
  const path = new Path2D();
  const point = (index, values) => [uplot.valToPos(xs[index], "x", true), uplot.valToPos(values[index], "y", true)];
  let isOpen = false;
  ys.forEach((y, index) => {
    if (y !== null) path[isOpen ? "lineTo" : "moveTo"](...point(index, ys));
    isOpen = y !== null;
  });
  for (let index = ys.length - 1; lower && index >= 0; index -= 1) {
    if (lower[index] !== null) path.lineTo(...point(index, lower));
  }
  return path;
}

function lastNumber(values) {
  return values.findLast((value) => value !== null) ?? null;
}
