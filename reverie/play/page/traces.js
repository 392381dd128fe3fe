// Traces of scalars over the steps of an episode, and the grid of latents.
import { element, setText, color, format, fitCanvas } from "./dom.js";

const ROWS = [ // label, and the scalars that are drawn over each other
  ["reward", ["reward", "predicted reward"]],
  ["continue", ["continue"]],
  ["value", ["value"]],
  ["entropy", ["entropy"]],
  ["KL", ["KL"]],
  ["boundary", ["boundary"]],
];
const MAX_STEPS = 240; // that are drawn
const MIN_STEPS = 30; // width of a trace at the start of an episode

export class Traces {
  constructor(root) {
    this.root = root;
    this.rows = new Map(); // elements by label
    this.scalars = new Map(); // by step
    this.episode = null; // episode and mode of the traces
  }

  // Adds the scalars of a view (`View.data` in session.py) and draws all traces.
  add(data) {
    const key = `${data.episode}/${data.mode}`;
    if (key !== this.episode) {
      this.scalars.clear();
      this.episode = key;
    }
    this.scalars.set(data.step, data.scalars);
    for (const step of this.scalars.keys()) if (step < data.step - MAX_STEPS) this.scalars.delete(step);
    this.draw(data);
  }

  draw(data) {
    for (const [name, keys] of ROWS) {
      const present = keys.some((key) => key in data.scalars) || this.rows.has(name);
      if (present) this.drawRow(name, keys, data);
    }
  }

  drawRow(name, keys, data) {
    if (!this.rows.has(name)) {
      const canvas = element("canvas", { role: "img" });
      const values = keys.map((key) => element("span", { className: `value ${key === "reward" ? "real" : key.startsWith("predicted") ? "model" : ""}` }));
      const row = element("div", { className: "trace" }, element("span", { textContent: name }), canvas, element("span", { className: "values" }, ...values));
      this.rows.set(name, { canvas, values, row });
      const order = ROWS.map((entry) => entry[0]);
      const sorted = [...this.rows].sort((a, b) => order.indexOf(a[0]) - order.indexOf(b[0]));
      this.root.append(...sorted.map((entry) => entry[1].row));
    }
    const { canvas, values } = this.rows.get(name);
    keys.forEach((key, index) => setText(values[index], key in data.scalars ? `${format(data.scalars[key])} ` : index ? "" : "– "));
    const steps = [...this.scalars.keys()].sort((a, b) => a - b);
    const [context, width, height, scale] = fitCanvas(canvas);
    const all = steps.flatMap((step) => keys.map((key) => this.scalars.get(step)[key]).filter((value) => value !== undefined));
    if (!all.length) return;
    let low = Math.min(0, ...all);
    let high = Math.max(...all);
    if (high - low < 0.02) [low, high] = [low - 0.01, high + 0.01]; // do not magnify small changes of a constant
    if (name === "continue" || name === "boundary") [low, high] = [0, 1];
    const first = steps[0];
    const last = Math.max(steps[steps.length - 1], first + MIN_STEPS);
    const x = (step) => ((step - first) / (last - first)) * (width - 6) + 3;
    const y = (value) => height - 4 - ((value - low) / (high - low)) * (height - 8);
    context.strokeStyle = color("line");
    context.beginPath();
    context.moveTo(0, y(0));
    context.lineTo(width, y(0));
    context.stroke();
    keys.forEach((key) => {
      context.strokeStyle = color(key.startsWith("predicted") ? "model" : key === "reward" ? "real" : "accent");
      context.fillStyle = context.strokeStyle;
      context.lineWidth = 1.5 * scale;
      context.beginPath();
      let drawing = false;
      for (const step of steps) {
        const value = this.scalars.get(step)[key];
        if (value === undefined) { drawing = false; continue; }
        if (drawing) context.lineTo(x(step), y(value));
        else context.moveTo(x(step), y(value));
        drawing = true;
      }
      context.stroke();
      const value = data.scalars[key];
      if (value !== undefined) {
        context.beginPath();
        context.arc(x(data.step), y(value), 2.5 * scale, 0, 2 * Math.PI);
        context.fill();
      }
    });
    canvas.setAttribute("aria-label", `${name}: ${format(data.scalars[keys[0]])}`);
  }
}

// Draws one pixel per categorical latent: its column is the latent, its row the sampled class.
export function drawLatents(canvas, data) {
  const { latents, classes } = data;
  canvas.width = latents.length;
  canvas.height = classes;
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = color("accent");
  latents.forEach((value, index) => context.fillRect(index, value, 1, 1));
}
