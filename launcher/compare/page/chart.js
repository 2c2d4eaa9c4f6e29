// One chart: two canvases, so that the crosshair moves without drawing the curves again; a readout; keys.

const EDGE = { left: 58, right: 14, top: 10, bottom: 26 };
const FROM_ZERO = new Set(["tokens/s", "share", "GiB", "s"]);
const charts = [];
let scheme = {};

function readScheme() {
  const style = getComputedStyle(document.documentElement);
  scheme = Object.fromEntries(
    ["--ink", "--quiet", "--grid", "--line", "--panel", "--limit", "--accent"].map((name) => [name.slice(2), style.getPropertyValue(name)]),
  );
}

class Chart {
  constructor(spec) {
    this.spec = spec;
    const id = `chart-${charts.length}`;
    const unit = unitWords(spec.unit);
    this.description = make("p", { class: "quiet", id: `${id}-told` });
    this.base = make("canvas", { "aria-hidden": "true", "data-metric": spec.metric });
    this.over = make("canvas", { "aria-hidden": "true" });
    this.readout = make("div", { class: "readout", hidden: "", "aria-hidden": "true" });
    this.plot = make(
      "div",
      { class: "plot", tabindex: "0", role: "application", "aria-roledescription": "chart",
        "aria-labelledby": `${id}-title`, "aria-describedby": `${id}-told keys` },
      this.base, this.over, this.readout,
    );
    this.details = make("details", {}, make("summary", { text: "Values at the end" }));
    this.details.addEventListener("toggle", () => this.fillDetails());
    const heading = make("h3", { id: `${id}-title`, text: spec.title });
    if (unit) heading.append(make("span", { class: "unit", text: ` ${unit}` }));
    this.isNear = false;
    this.isStale = true;
    this.figure = make("figure", { id }, make("figcaption", {}, heading, this.description), this.plot, this.details);
  }

  // -- drawing ----------------------------------------------------------------------------------------------------

  resize() {
    const { width, height } = this.plot.getBoundingClientRect();
    const ratio = window.devicePixelRatio || 1;
    for (const canvas of [this.base, this.over]) {
      const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
      if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    this.width = width;
    this.height = height;
  }

  // Charts out of sight are drawn when they come near.
  draw(isPrinted = false) {
    this.isStale = !this.isNear && !isPrinted;
    if (this.isStale) return;
    this.resize();
    this.shown = shownCurves(this.spec);
    this.range = axisRange();
    this.lines = this.findLines();
    this.values = this.valueRange();
    const context = this.base.getContext("2d");
    context.clearRect(0, 0, this.width, this.height);
    this.drawFrame(context);
    context.save();
    context.beginPath();
    context.rect(EDGE.left - 5, EDGE.top - 5, this.width - EDGE.left - EDGE.right + 10, this.height - EDGE.top - EDGE.bottom + 9);
    context.clip();
    this.lines.forEach((line) => this.drawLine(context, line));
    const order = [...this.shown].sort((a, b) => (a.index === state.picked) - (b.index === state.picked));
    order.forEach((curve) => this.drawCurve(context, curve));
    context.restore();
    this.lines.forEach((line) => this.labelLine(context, line));
    this.describe();
    if (this.details.open) this.fillDetails();
    this.drawCursor();
  }

  // The card's memory, once for each kind of card; the prediction of each run.
  findLines() {
    if (this.spec.metric !== "memory/peak_allocated_gib") return [];
    const cards = new Map();
    for (const { run } of this.shown) {
      if (run.card_gib === null) continue;
      const size = run.card_gib.toFixed(1);
      cards.set(size, (cards.get(size) ?? new Set()).add(run.card.replace(/^(GeForce|Tesla) /, "")));
    }
    const limits = [...cards].map(([size, titles]) => ({ value: Number(size), label: `${[...titles].join(", ")}: ${size} GiB`, colour: scheme.limit }));
    const predicted = this.shown.filter(({ run }) => run.predicted_gib !== null)
      .map(({ run, index }) => ({ value: run.predicted_gib, run: index, colour: colourOf(index, state.theme) }));
    return [...predicted, ...limits];
  }

  isLog() {
    return state.log && this.spec.metric.endsWith("/loss");
  }

  valueRange() {
    const seen = [];
    for (const curve of this.shown) {
      const places = placesOf(curve);
      const { low, high, mean } = curve.series;
      const wide = isSmoothed(this.spec) || state.withoutOutliers ? [valuesOf(curve, this.spec)] : [low ?? mean, high ?? mean];
      for (let at = 0; at < places.length; at += 1) {
        if (places[at] < this.range[0] || places[at] > this.range[1]) continue;
        for (const values of wide) if (values[at] !== null) seen.push(values[at]);
      }
    }
    if (!seen.length) return [0, 1];
    let [least, most] = state.withoutOutliers ? [percentile(seen, 0.02), percentile(seen, 0.98)]
      : seen.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
    for (const line of this.lines) [least, most] = [Math.min(least, line.value), Math.max(most, line.value)];
    if (this.isLog() && least > 0) return [least / 1.04, most * 1.04];
    if (FROM_ZERO.has(this.spec.unit) && least >= 0) return [0, most > 0 ? most * 1.08 : 1];
    const room = (most - least || Math.abs(most) || 1) * 0.06;
    return [least - room, most + room];
  }

  x(place) {
    const [low, high] = this.range;
    return EDGE.left + ((place - low) / (high - low)) * (this.width - EDGE.left - EDGE.right);
  }

  y(value) {
    let [low, high] = this.values;
    if (this.isLog() && low > 0) [low, high, value] = [Math.log(low), Math.log(high), Math.log(Math.max(value, 1e-30))];
    return this.height - EDGE.bottom - ((value - low) / (high - low)) * (this.height - EDGE.top - EDGE.bottom);
  }

  drawFrame(context) {
    const right = this.width - EDGE.right;
    const bottom = this.height - EDGE.bottom;
    context.font = "11px system-ui, sans-serif";
    context.lineWidth = 1;
    context.strokeStyle = scheme.grid;
    context.fillStyle = scheme.quiet;
    context.textAlign = "right";
    context.textBaseline = "middle";
    const [low, high] = this.values;
    const rows = this.isLog() && low > 0 ? logTicks(low, high) : ticksOf(low, high, 5);
    for (const tick of rows) {
      const y = Math.round(this.y(tick)) + 0.5;
      context.beginPath();
      context.moveTo(EDGE.left, y);
      context.lineTo(right, y);
      context.stroke();
      context.fillText(this.spec.unit === "GiB" ? formatCount(tick) : formatValue(Number(tick.toPrecision(10)), this.spec.unit), EDGE.left - 7, y);
    }
    context.textAlign = "center";
    context.textBaseline = "top";
    const count = Math.max(2, Math.floor((right - EDGE.left) / 65));
    const columns = state.axis === "seconds" ? timeTicks(...this.range, count) : ticksOf(...this.range, count);
    for (const tick of columns) {
      if (state.axis === "step" && !Number.isInteger(Number(tick.toPrecision(10)))) continue;
      const words = state.axis === "seconds" ? formatSeconds(Number(tick.toPrecision(6))) : formatCount(tick);
      context.fillText(words, Math.min(this.x(tick), right - 10), bottom + 7);
    }
    context.strokeStyle = scheme.line;
    context.beginPath();
    context.moveTo(EDGE.left, bottom + 0.5);
    context.lineTo(right, bottom + 0.5);
    context.stroke();
  }

  drawLine(context, line) {
    const isFaint = line.run !== undefined && state.picked !== null && state.picked !== line.run;
    const y = Math.round(this.y(line.value)) + (line.run === undefined ? 0 : 0.5);
    context.save();
    context.globalAlpha = isFaint ? 0.15 : line.run === undefined ? 1 : 0.75;
    context.strokeStyle = line.colour;
    context.lineWidth = line.run === undefined ? 2 : 1;
    context.setLineDash(line.run === undefined ? [8, 5] : [2, 4]);
    context.beginPath();
    context.moveTo(EDGE.left, y);
    context.lineTo(this.width - EDGE.right, y);
    context.stroke();
    context.restore();
  }

  labelLine(context, line) {
    if (!line.label) return;
    context.fillStyle = line.colour;
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "right";
    const y = this.y(line.value);
    context.textBaseline = y < EDGE.top + 16 ? "top" : "bottom";
    context.fillText(line.label, this.width - EDGE.right - 2, y + (y < EDGE.top + 16 ? 5 : -3));
  }

  drawCurve(context, curve) {
    const places = placesOf(curve);
    const values = valuesOf(curve, this.spec);
    const { low, high, mean } = curve.series;
    const [begin, end] = [Math.max(0, indexBefore(places, this.range[0])), Math.min(places.length, indexBefore(places, this.range[1]) + 2)];
    const isPicked = state.picked === curve.index;
    const isCrowded = this.shown.length > 12;
    context.save();
    context.strokeStyle = context.fillStyle = colourOf(curve.index, state.theme);
    context.lineJoin = "round";
    const alpha = state.picked === null || isPicked ? 1 : 0.12;
    if (low && (isPicked || !isCrowded)) {
      context.globalAlpha = alpha * 0.16;
      this.trace(context, places, high, begin, end, low);
      context.fill();
    } else if (isSmoothed(this.spec) && (isPicked || !isCrowded)) {
      context.globalAlpha = alpha * 0.22;
      context.lineWidth = 1;
      this.trace(context, places, mean, begin, end);
      context.stroke();
    }
    context.globalAlpha = alpha;
    context.lineWidth = isPicked ? 3 : isCrowded ? 1.3 : 1.8;
    context.setLineDash(dashOf(curve.index));
    this.trace(context, places, values, begin, end);
    context.stroke();
    this.drawMarks(context, curve, places, values, begin, end);
    context.restore();
  }

  // Where a value is no number, the line breaks. With a lower edge, the area between.
  trace(context, places, values, begin, end, lower = null) {
    context.beginPath();
    let isOn = false;
    for (let at = begin; at < end; at += 1) {
      if (values[at] === null) { isOn = false; continue; }
      if (isOn) context.lineTo(this.x(places[at]), this.y(values[at]));
      else context.moveTo(this.x(places[at]), this.y(values[at]));
      isOn = true;
    }
    for (let at = end - 1; lower && at >= begin; at -= 1) {
      if (lower[at] !== null) context.lineTo(this.x(places[at]), this.y(lower[at]));
    }
  }

  // Every point of a short curve; of a long one a few, at other places for each run.
  drawMarks(context, curve, places, values, begin, end) {
    context.setLineDash([]);
    const mark = markOf(curve.index);
    const size = this.spec.is_sparse ? 3.4 : 3;
    if (end - begin <= (this.shown.length > 12 ? 12 : 30)) {
      for (let at = begin; at < end; at += 1) if (values[at] !== null) drawMark(context, mark, this.x(places[at]), this.y(values[at]), size);
      return;
    }
    const gap = (end - begin) / 5;
    for (let at = begin + gap * (0.15 + (0.7 * (curve.index % 10)) / 10); at < end; at += gap) {
      const index = Math.floor(at);
      if (values[index] !== null) drawMark(context, mark, this.x(places[index]), this.y(values[index]), size);
    }
  }
}

function lastNumber(values) {
  for (let at = values.length - 1; at >= 0; at -= 1) if (values[at] !== null) return values[at];
  return null;
}

function setZoom(zoom) {
  state.zoom = zoom && zoom[1] > zoom[0] ? zoom : null;
  byId("reset").disabled = state.zoom === null;
  changed();
}

function pick(index) {
  state.picked = index;
  changed();
}
