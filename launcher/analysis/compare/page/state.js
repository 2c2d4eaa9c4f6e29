// What is shown, and the curves as the charts need them: x values of the chosen axis and smoothed y values, cached.

const comparison = JSON.parse(byId("data").textContent);
const runs = comparison.runs;
const state = {
  axis: "step",
  smoothing: 0,
  log: false,
  withoutOutliers: false,
  hidden: new Set(), // indices of runs
  zoom: null, // [from, to] of the chosen axis
  cursor: null, // x of the crosshair
  picked: null, // index of the highlighted run
  theme: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light",
};
const AXIS_TITLES = { step: "step", tokens: "tokens", seconds: "wall-clock time" };
const UNSMOOTHED = new Set(["train/learning_rate"]);

const curves = new Map(); // metric -> the runs' curves
for (const chart of comparison.charts) {
  const ofMetric = runs.map((run, index) => ({ index, run, series: run.series.find(({ metric }) => metric === chart.metric), xs: {}, smoothed: {} }));
  curves.set(chart.metric, ofMetric.filter(({ series }) => series));
}

// x values of a curve; null if the run does not record that axis.
function xsOf(curve) {
  const axis = state.axis;
  if (!(axis in curve.xs)) {
    const { step, [axis]: values } = curve.run.axis;
    if (axis === "step") curve.xs.step = curve.series.step;
    else curve.xs[axis] = values ? curve.series.step.map((x) => interpolate(step, values, x)) : null;
  }
  return curve.xs[axis];
}

function isSmoothed(chart) {
  return state.smoothing > 0 && !chart.is_sparse && !UNSMOOTHED.has(chart.metric);
}

function ysOf(curve, chart) {
  const weight = isSmoothed(chart) ? state.smoothing : 0;
  if (curve.smoothed.weight !== weight) curve.smoothed = { weight, values: smooth(curve.series.mean, weight) };
  return curve.smoothed.values;
}

function shownCurves(chart) {
  return curves.get(chart.metric).filter((curve) => !state.hidden.has(curve.index) && xsOf(curve) !== null);
}

// The same for all charts, so that they can be read one below the other.
function axisRange() {
  return state.zoom ?? fullRange();
}

function fullRange() {
  let low = Infinity;
  let high = -Infinity;
  for (const chart of comparison.charts) {
    for (const curve of shownCurves(chart)) {
      const xs = xsOf(curve);
      low = Math.min(low, xs[0]);
      high = Math.max(high, xs[xs.length - 1]);
    }
  }
  if (low > high) return [0, 1];
  if (state.axis !== "step") low = Math.min(low, 0);
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

const listeners = [];
let isQueued = false;

// Redraws once per frame, whatever has changed.
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

function setZoom(zoom) {
  state.zoom = zoom && zoom[1] > zoom[0] ? zoom : null;
  byId("reset").disabled = state.zoom === null;
  changed();
}

function pick(index) {
  state.picked = index;
  changed();
}

// TensorBoard's exponential moving average, with its correction of the bias towards zero at the beginning.
function smooth(values, weight) {
  if (!weight) return values;
  let last = 0;
  let count = 0;
  return values.map((value) => {
    if (value === null) return null;
    last = last * weight + (1 - weight) * value;
    count += 1;
    return last / (1 - weight ** count);
  });
}

// Index of the last entry that is not above x; -1 if all are.
function indexBefore(sorted, x) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= x) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

function nearestIndex(sorted, x) {
  const before = indexBefore(sorted, x);
  if (before < 0) return 0;
  if (before + 1 >= sorted.length) return sorted.length - 1;
  return x - sorted[before] <= sorted[before + 1] - x ? before : before + 1;
}

function interpolate(xs, ys, x) {
  const before = indexBefore(xs, x);
  if (before < 0) return ys[0];
  if (before + 1 >= xs.length) return ys[ys.length - 1];
  return ys[before] + ((ys[before + 1] - ys[before]) * (x - xs[before])) / (xs[before + 1] - xs[before]);
}

function percentile(values, fraction) {
  const sorted = Float64Array.from(values).sort();
  return sorted[Math.round(fraction * (sorted.length - 1))];
}
