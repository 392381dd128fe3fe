// Line charts.
import { color, fitCanvas, format } from "./dom.js";

export const PALETTE = ["#5ab0ff", "#ffb454", "#5fd38d", "#ff7b72", "#9b8cff", "#3fc1c9", "#e57fd0", "#c0a36e"];

// Exponential moving average with bias correction, as in Adam.
export function smooth(values, weight) {
  let total = 0, norm = 0;
  return values.map((value) => {
    total = weight * total + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return total / norm;
  });
}

// Returns about `count` round numbers between `low` and `high`: multiples of 1, 2 or 5 times a power of ten.
function ticks(low, high, count) {
  const minStep = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(minStep));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= minStep);
  const result = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) result.push(value);
  return result;
}

// Formats a tick without trailing zeros.
function tickLabel(value) {
  const rounded = Number(value.toPrecision(4));
  return Number.isInteger(rounded) ? format(rounded) : format(rounded).replace(/(\.\d*?)0+$/, "$1");
}

// Draws smoothed lines over pale raw ones. `lines` have a name, a color, and arrays x and y;
// `weight` is that of `smooth`.
export function drawChart(canvas, lines, weight) {
  const [context, width, height, ratio] = fitCanvas(canvas);
  const scale = ratio * parseFloat(getComputedStyle(document.documentElement).fontSize) / 16;
  const points = lines.flatMap((line) => line.x.map((x, index) => [x, line.y[index]]));
  context.font = `${12 * scale}px system-ui, sans-serif`;
  context.fillStyle = color("dim");
  if (!points.length) {
    context.fillText("Select runs and a metric.", 12 * scale, 24 * scale);
    return;
  }
  const left = 58 * scale, bottom = 26 * scale, top = 8 * scale, right = 8 * scale;
  let [low, high] = [Infinity, -Infinity];
  let [first, last] = [Infinity, -Infinity];
  for (const [x, y] of points) {
    low = Math.min(low, y); high = Math.max(high, y);
    first = Math.min(first, x); last = Math.max(last, x);
  }
  if (high - low < 1e-9) { low -= 0.5; high += 0.5; }
  if (last - first < 1e-9) last = first + 1;
  const toX = (value) => left + ((value - first) / (last - first)) * (width - left - right);
  const toY = (value) => height - bottom - ((value - low) / (high - low)) * (height - bottom - top);
  context.strokeStyle = color("line");
  context.lineWidth = scale;
  context.textAlign = "right";
  for (const value of ticks(low, high, 5)) {
    context.beginPath();
    context.moveTo(left, toY(value));
    context.lineTo(width - right, toY(value));
    context.stroke();
    context.fillText(tickLabel(value), left - 6 * scale, toY(value) + 4 * scale);
  }
  context.textAlign = "center";
  for (const value of ticks(first, last, 6)) context.fillText(tickLabel(value), toX(value), height - 8 * scale);
  lines.forEach((line) => {
    const plot = (values, alpha, size) => {
      context.globalAlpha = alpha;
      context.strokeStyle = line.color;
      context.lineWidth = size * scale;
      context.beginPath();
      values.forEach((value, index) => {
        if (index) context.lineTo(toX(line.x[index]), toY(value));
        else context.moveTo(toX(line.x[index]), toY(value));
      });
      context.stroke();
      context.globalAlpha = 1;
    };
    if (weight > 0) plot(line.y, 0.2, 1);
    plot(smooth(line.y, weight), 1, 2);
  });
  canvas.setAttribute("aria-label", lines.map((line) => `${line.name}: last ${format(line.y[line.y.length - 1])}`).join("; "));
}
