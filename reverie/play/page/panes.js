// The panes: real, dream (one or several) and difference.
import { element, setText, color, countSteps, fitCanvas } from "./dom.js";

// Columns of dreams by their number, and their total width relative to that of the real frame.
const FANS = { 1: [1, 1], 2: [2, 2], 3: [3, 2], 4: [2, 1], 6: [3, 1.5], 8: [4, 2] };

export class Panes {
  constructor(root) {
    this.root = root;
    this.fan = element("div", { className: "fan" }); // panes of the dreams, next to each other
    this.root.append(this.fan);
    this.panes = new Map();
  }

  // Returns the pane with this name. Panes keep their place, so that the layout is stable.
  get(name, kind, label) {
    if (!this.panes.has(name)) {
      const canvas = element("canvas", { width: 64, height: 64, role: "img" });
      const info = element("span", { className: "info" });
      const caption = element("figcaption", {}, element("strong", { textContent: label }), info);
      const figure = element("figure", { className: `pane ${kind}` }, caption, canvas);
      const pane = { canvas, info, figure };
      this.panes.set(name, pane);
      (kind === "model" ? this.fan : this.root).append(figure); // ordered in the style sheet
    }
    return this.panes.get(name);
  }

  show(header, bitmaps) {
    const counts = { real: 0, model: 0, difference: 0 };
    const seen = new Set();
    const [columns, width] = FANS[header.rollouts] || FANS[1];
    this.fan.style.setProperty("--columns", columns);
    this.fan.style.setProperty("--width", width);
    header.images.forEach((image, index) => {
      const name = `${image.pane}-${counts[image.pane]++}`;
      seen.add(name);
      const several = header.rollouts > 1 && image.pane === "model";
      const labels = { real: "real", model: several ? `dream ${counts.model}` : "dream", difference: "difference" };
      const pane = this.get(name, image.pane, labels[image.pane]);
      setText(pane.figure.querySelector("strong"), labels[image.pane]);
      pane.figure.classList.remove("empty");
      const { canvas } = pane;
      if (canvas.width !== image.width || canvas.height !== image.height) {
        canvas.width = image.width;
        canvas.height = image.height;
        canvas.style.aspectRatio = `${image.width} / ${image.height}`;
      }
      canvas.getContext("2d").drawImage(bitmaps[index], 0, 0);
      bitmaps[index].close();
      canvas.setAttribute("aria-label", `${labels[image.pane]}, step ${header.step}`);
    });
    for (const kind of ["real", "model"]) {
      const values = (header.vectors || {})[kind];
      if (values && !counts[kind]) {
        seen.add(`${kind}-0`);
        this.drawVector(this.get(`${kind}-0`, kind, kind === "real" ? "real" : "dream"), values, kind);
      }
    }
    for (const [name, pane] of this.panes) {
      if (seen.has(name)) continue;
      const extra = Number(name.split("-")[1]) >= Math.max(1, header.rollouts);
      pane.figure.hidden = extra;
      pane.figure.classList.add("empty");
    }
    for (const name of seen) this.panes.get(name).figure.hidden = false;
    this.describe(header);
  }

  describe(header) {
    const real = this.panes.get("real-0");
    if (real) {
      const isEmpty = real.figure.classList.contains("empty");
      const reason = this.startsFromRecordings ? "recorded first frame" : "episode ended before this step";
      setText(real.info, isEmpty ? reason : header.mode.endsWith("model") ? "" : header.end_reason);
    }
    const model = this.panes.get("model-0");
    if (model) {
      const context = header.context ? `, context ${header.context[0]} of ${header.context[1]}` : "";
      setText(model.info, header.age === null ? "" : countSteps(header.step - (header.fork ?? header.step)) + context);
    }
  }

  drawVector(pane, values, kind) {
    const [context, width, height] = fitCanvas(pane.canvas);
    const largest = Math.max(1, ...values.map(Math.abs));
    const bar = width / Math.max(1, values.length);
    context.fillStyle = color("dim");
    context.fillRect(0, height / 2, width, 1);
    context.fillStyle = color(kind === "real" ? "real" : "model");
    values.forEach((value, index) => {
      const size = (value / largest) * height * 0.45;
      context.fillRect(index * bar + 1, height / 2 - Math.max(0, size), Math.max(1, bar - 2), Math.abs(size));
    });
    pane.canvas.setAttribute("aria-label", `${values.length} numbers from ${-largest} to ${largest}`);
    pane.figure.classList.remove("empty");
  }
}
