// What is looked at, and the curves as the charts need them: places by the chosen axis, values smoothed, both kept.

const comparison = JSON.parse(byId("data").textContent);
const runs = comparison.runs;
const state = {
  axis: "step",
  smoothing: 0,
  log: false,
  withoutOutliers: false,
  hidden: new Set(),
  zoom: null, // [from, to] of the chosen axis
  cursor: null, // of the chosen axis
  picked: null, // index of a run that stands out
  theme: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light",
};
const AXIS_TITLES = { step: "step", tokens: "tokens", seconds: "wall-clock time" };
const UNSMOOTHED = new Set(["train/learning_rate"]);

const curves = new Map(); // metric -> the runs' curves
for (const chart of comparison.charts) {
  const found = [];
  runs.forEach((run, index) => {
    const series = run.series.find((one) => one.metric === chart.metric);
    if (series) found.push({ index, run, series, places: {}, smoothed: {} });
  });
  curves.set(chart.metric, found);
}

// Places of a curve's points; null where the run does not know that axis.
function placesOf(curve) {
  const axis = state.axis;
  if (!(axis in curve.places)) {
    const { step, [axis]: along } = curve.run.axis;
    if (axis === "step") curve.places.step = curve.series.step;
    else curve.places[axis] = along ? curve.series.step.map((at) => interpolate(step, along, at)) : null;
  }
  return curve.places[axis];
}

function valuesOf(curve, chart) {
  const weight = chart.is_sparse || UNSMOOTHED.has(chart.metric) ? 0 : state.smoothing;
  if (curve.smoothed.weight !== weight) curve.smoothed = { weight, values: smooth(curve.series.mean, weight) };
  return curve.smoothed.values;
}

function isSmoothed(chart) {
  return state.smoothing > 0 && !chart.is_sparse && !UNSMOOTHED.has(chart.metric);
}

function shownCurves(chart) {
  return curves.get(chart.metric).filter((curve) => !state.hidden.has(curve.index) && placesOf(curve) !== null);
}

// The same for all charts, so that a place in one is that place in all.
function axisRange() {
  return state.zoom ?? wholeRange();
}

function wholeRange() {
  let low = Infinity;
  let high = -Infinity;
  for (const chart of comparison.charts) {
    for (const curve of shownCurves(chart)) {
      const places = placesOf(curve);
      low = Math.min(low, places[0]);
      high = Math.max(high, places[places.length - 1]);
    }
  }
  if (low > high) return [0, 1];
  if (state.axis !== "step") low = Math.min(low, 0);
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

const listeners = [];
let isQueued = false;

// All changes of one frame are drawn once.
function changed() {
  if (isQueued) return;
  isQueued = true;
  requestAnimationFrame(() => {
    isQueued = false;
    performance.mark("redraw-begins");
    listeners.forEach((listener) => listener());
    performance.measure("redraw", "redraw-begins");
  });
}
