// From values to pixels: round ticks, smoothing, and where a value stands in a sorted list.

function niceStep(span, count) {
  const rough = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const factor = [1, 2, 2.5, 5, 10].find((one) => one * power >= rough * 0.999) ?? 10;
  return factor * power;
}

function ticksOf(low, high, count) {
  if (!(high > low)) return [low];
  const step = niceStep(high - low, count);
  const ticks = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) ticks.push(at * step);
  return ticks;
}

function timeTicks(low, high, count) {
  const units = [1, 60, 3600].filter((unit) => high >= unit * 1.5);
  const unit = units.length ? units[units.length - 1] : 1;
  return ticksOf(low / unit, high / unit, count).map((tick) => tick * unit);
}

function logTicks(low, high) {
  const ticks = [];
  const decades = Math.log10(high / low);
  const factors = decades > 3 ? [1] : decades > 1 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
    for (const factor of factors) {
      const tick = factor * 10 ** power;
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  }
  return ticks.length > 1 ? ticks : ticksOf(low, high, 4);
}

// The exponential mean of TensorBoard: without the pull towards nought at the beginning.
function smooth(values, weight) {
  if (!weight) return values;
  let last = 0;
  let seen = 0;
  return values.map((value) => {
    if (value === null) return null;
    last = last * weight + (1 - weight) * value;
    seen += 1;
    return last / (1 - weight ** seen);
  });
}

// Index of the last entry that is not above x; -1 where all are.
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
