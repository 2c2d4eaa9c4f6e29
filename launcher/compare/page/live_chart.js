// A chart's crosshair, its readout, pointer and keys, and its words.

const MOST_READ = 12; // runs in a readout
const MOST_SPOKEN = 5;

class LiveChart extends Chart {
  constructor(spec) {
    super(spec);
    this.listen();
  }

  listen() {
    this.over.addEventListener("pointermove", (event) => this.point(event));
    this.over.addEventListener("pointerleave", () => this.leave());
    this.over.addEventListener("pointerdown", (event) => this.grab(event));
    this.over.addEventListener("pointerup", (event) => this.release(event));
    this.over.addEventListener("dblclick", () => setZoom(null));
    this.plot.addEventListener("keydown", (event) => this.press(event));
    this.plot.addEventListener("focus", () => { if (state.cursor === null) this.moveTo(this.range[1], true); });
    this.plot.addEventListener("blur", () => this.leave());
  }

  // -- the crosshair ----------------------------------------------------------------------------------------------

  drawCursor() {
    if (this.isStale) return;
    const context = this.over.getContext("2d");
    context.clearRect(0, 0, this.width, this.height);
    if (this.grabbed !== undefined && this.dragged !== undefined) {
      context.fillStyle = scheme.accent;
      context.globalAlpha = 0.15;
      context.fillRect(Math.min(this.grabbed, this.dragged), EDGE.top, Math.abs(this.dragged - this.grabbed), this.height - EDGE.top - EDGE.bottom);
      context.globalAlpha = 1;
    }
    if (state.cursor === null || state.cursor < this.range[0] || state.cursor > this.range[1]) {
      this.readout.hidden = true;
      return;
    }
    const x = Math.round(this.x(state.cursor)) + 0.5;
    context.strokeStyle = scheme.quiet;
    context.beginPath();
    context.moveTo(x, EDGE.top);
    context.lineTo(x, this.height - EDGE.bottom);
    context.stroke();
    const read = this.readAt(state.cursor);
    for (const one of read) {
      if (state.picked !== null && one.curve.index !== state.picked) continue;
      context.fillStyle = colourOf(one.curve.index, state.theme);
      drawMark(context, markOf(one.curve.index), this.x(one.place), this.y(one.value), 4.5);
    }
    if (this.isActive) this.showReadout(read, x);
    else this.readout.hidden = true;
  }

  // What each run has nearest to a place; a run that ended long before has nothing there.
  readAt(place) {
    const reach = (this.range[1] - this.range[0]) / 50;
    const read = [];
    for (const curve of this.shown) {
      const places = placesOf(curve);
      const values = valuesOf(curve, this.spec);
      const at = nearestIndex(places, place);
      const isInside = place >= places[0] - reach && place <= places[places.length - 1] + reach;
      if (isInside && values[at] !== null) {
        const { low, high } = curve.series;
        read.push({ curve, place: places[at], value: values[at], low: low ? low[at] : null, high: high ? high[at] : null });
      }
    }
    return read.sort((a, b) => b.value - a.value);
  }

  showReadout(read, x) {
    const near = state.picked !== null ? state.picked : this.pointer === undefined || !read.length ? null
      : read.reduce((a, b) => (Math.abs(this.y(a.value) - this.pointer) <= Math.abs(this.y(b.value) - this.pointer) ? a : b)).curve.index;
    const from = Math.max(0, Math.min(read.findIndex((one) => one.curve.index === near) - MOST_READ / 2, read.length - MOST_READ));
    const items = read.slice(from, from + MOST_READ).map(({ curve, value, low, high }) => {
      const spread = low !== null && low !== high && !isSmoothed(this.spec) ? ` (${formatValue(low, this.spec.unit)} … ${formatValue(high, this.spec.unit)})` : "";
      const item = make("li", {}, makeSwatch(curve.index, state.theme),
        make("span", { text: formatValue(value, this.spec.unit) + (read.length <= 6 ? spread : "") }), make("bdi", { text: curve.run.name }));
      if (curve.index === near) item.className = "near";
      return item;
    });
    const more = read.length - items.length;
    this.readout.replaceChildren(
      make("p", { text: formatPlace(state.cursor, state.axis) + (read.length ? "" : ": no values") }),
      make("ul", {}, ...items),
      more > 0 ? make("p", { text: `and ${more} more` }) : "",
    );
    this.readout.hidden = false;
    const isRight = x > this.width / 2;
    this.readout.style.left = isRight ? "auto" : `${x + 12}px`;
    this.readout.style.right = isRight ? `${this.width - x + 12}px` : "auto";
  }

  moveTo(place, isSpoken) {
    this.isActive = true;
    state.cursor = Math.min(Math.max(place, this.range[0]), this.range[1]);
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

  speak() {
    const read = this.readAt(state.cursor);
    const told = state.picked === null ? read : read.filter((one) => one.curve.index === state.picked);
    const words = told.slice(0, MOST_SPOKEN).map(({ curve, value }) => `${curve.run.name} ${formatValue(value, this.spec.unit)}`);
    const more = told.length > MOST_SPOKEN ? `; and ${told.length - MOST_SPOKEN} more, arrow up and down pick one` : "";
    byId("live").textContent = `${formatPlace(state.cursor, state.axis)}: ${words.join("; ") || "no values"}${more}`;
  }

  // -- pointer and keys -------------------------------------------------------------------------------------------

  placeAt(x) {
    const inside = Math.min(Math.max(x, EDGE.left), this.width - EDGE.right);
    return this.range[0] + ((inside - EDGE.left) / (this.width - EDGE.left - EDGE.right)) * (this.range[1] - this.range[0]);
  }

  point(event) {
    this.pointer = event.offsetY;
    if (this.grabbed !== undefined) this.dragged = event.offsetX;
    this.moveTo(this.placeAt(event.offsetX), false);
  }

  grab(event) {
    if (event.button !== 0 || event.pointerType === "touch") return;
    this.grabbed = event.offsetX;
    this.over.setPointerCapture(event.pointerId);
  }

  release(event) {
    const [from, to] = [this.grabbed, event.offsetX];
    this.grabbed = this.dragged = undefined;
    if (from !== undefined && Math.abs(to - from) > 6) setZoom([this.placeAt(Math.min(from, to)), this.placeAt(Math.max(from, to))]);
    else this.drawCursor();
  }

  press(event) {
    const [low, high] = this.range;
    const stride = (event.shiftKey ? 0.1 : 0.01) * (high - low);
    const by = state.axis === "step" && !event.shiftKey ? Math.max(1, Math.round(stride)) : stride;
    const at = state.cursor ?? high;
    const zoomBy = (factor) => {
      const [least, most] = wholeRange();
      const zoom = [Math.max(least, at - (at - low) * factor), Math.min(most, at + (high - at) * factor)];
      setZoom(zoom[0] <= least && zoom[1] >= most ? null : zoom);
    };
    const actions = {
      ArrowLeft: () => this.moveTo(at - by, true),
      ArrowRight: () => this.moveTo(at + by, true),
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
    const shown = this.shown.map((curve) => curve.index);
    if (!shown.length) return;
    const at = shown.indexOf(state.picked);
    pick(shown[at < 0 ? (by > 0 ? 0 : shown.length - 1) : (at + by + shown.length) % shown.length]);
    this.isActive = true;
    this.speak();
  }

  // -- words ------------------------------------------------------------------------------------------------------

  describe() {
    const all = curves.get(this.spec.metric);
    const ends = this.shown.map((curve) => ({ curve, value: lastNumber(curve.series.mean) })).filter((one) => one.value !== null);
    ends.sort((a, b) => a.value - b.value);
    const notes = [];
    if (ends.length > 1) {
      const tell = ({ curve, value }) => `${formatValue(value, this.spec.unit)} (${shorten(curve.run.name)})`;
      notes.push(`at the end ${tell(ends[0])} to ${tell(ends[ends.length - 1])}`);
    } else if (ends.length) {
      notes.push(`at the end ${formatValue(ends[0].value, this.spec.unit)}`);
    }
    if (this.lines.length) notes.push("dashed: the card's memory; dotted: predicted");
    const without = all.filter((curve) => placesOf(curve) === null).map((curve) => curve.run.name);
    if (without.length) notes.push(`${without.length > 3 ? `${without.length} runs` : without.join(", ")}: ${AXIS_TITLES[state.axis]} not recorded`);
    const count = this.shown.length === runs.length ? `${runs.length} runs` : `${this.shown.length} of ${runs.length} runs`;
    this.description.textContent = `By ${AXIS_TITLES[state.axis]}, ${runs.length === 1 ? "1 run" : count}${notes.length ? "; " : ""}${notes.join("; ")}`;
  }

  fillDetails() {
    if (!this.details.open) return;
    const rows = curves.get(this.spec.metric).map(({ run, index, series }) => {
      const numbers = [series.low ?? series.mean, series.high ?? series.mean].map((values) => values.filter((value) => value !== null));
      const cells = [lastNumber(series.mean), Math.min(...numbers[0]), Math.max(...numbers[1]), series.step[series.step.length - 1]];
      const words = [...cells.slice(0, 3).map((value) => formatValue(value, this.spec.unit)), cells[3].toLocaleString("en")];
      return { run: index, name: run.name, cells: cells.map((sort, at) => ({ sort, text: words[at] })) };
    });
    const heads = ["last", "least", "greatest", "step of the last"].map((title) => ({ title, isNumber: true }));
    const table = makeTable(`${capitalise(this.spec.title)}: values`, heads, rows);
    this.details.replaceChildren(this.details.firstChild, make("div", { class: "scroll" }, table));
  }
}
