// The panes: real frame, imagined frames (one per rollout) and difference.
import { element, setText, color, countSteps, fitCanvas, format } from "./dom.js";

// Layout by number of rollouts: columns of the grid, and its width relative to the real frame.
const ROLLOUT_LAYOUTS = { 1: [1, 1], 2: [2, 2], 3: [3, 2], 4: [2, 1], 6: [3, 1.5], 8: [4, 2] };

export class Panes {
  constructor(root) {
    this.root = root;
    this.rollouts = element("div", { className: "rollouts" }); // panes of the rollouts, next to each other
    this.root.append(this.rollouts);
    this.panes = new Map();
  }

  // Returns the pane with this name (kind and number), and creates it if there is none. Panes are
  // not removed, so that the layout is stable.
  get(name, kind, label) {
    if (!this.panes.has(name)) {
      const canvas = element("canvas", { width: 64, height: 64, role: "img" });
      const info = element("span", { className: "info" });
      const caption = element("figcaption", {}, element("strong", { textContent: label }), info);
      const figure = element("figure", { className: `pane ${kind}` }, caption, canvas);
      const pane = { canvas, info, figure };
      this.panes.set(name, pane);
      if (kind === "real") this.root.prepend(figure);
      else (kind === "model" ? this.rollouts : this.root).append(figure);
    }
    return this.panes.get(name);
  }

  // Draws the images or vectors of a view; panes without one are dimmed or hidden.
  show(data, bitmaps) {
    const counts = { real: 0, model: 0, difference: 0 };
    const drawn = new Set();
    const [columns, width] = ROLLOUT_LAYOUTS[data.rollouts] || ROLLOUT_LAYOUTS[1];
    this.rollouts.style.setProperty("--columns", columns);
    this.rollouts.style.setProperty("--width", width);
    data.images.forEach((image, index) => {
      const name = `${image.pane}-${counts[image.pane]++}`;
      drawn.add(name);
      const several = data.rollouts > 1 && image.pane === "model";
      const labels = { real: "real", model: several ? `imagined ${counts.model}` : "imagined", difference: "difference" };
      const pane = this.get(name, image.pane, labels[image.pane]);
      setText(pane.figure.querySelector("strong"), labels[image.pane]);
      pane.figure.classList.remove("empty");
      const { canvas } = pane;
      if (canvas.width !== image.width || canvas.height !== image.height) {
        canvas.width = image.width;
        canvas.height = image.height;
        canvas.style.aspectRatio = `${image.width} / ${image.height}`;
        canvas.style.imageRendering = image.width > 160 ? "auto" : ""; // only small images are enlarged without interpolation
      }
      canvas.getContext("2d").drawImage(bitmaps[index], 0, 0);
      bitmaps[index].close();
      canvas.setAttribute("aria-label", `${labels[image.pane]}, step ${data.step}`);
    });
    for (const kind of ["real", "model"]) {
      const values = (data.vectors || {})[kind];
      if (values && !counts[kind]) {
        drawn.add(`${kind}-0`);
        // the real values are drawn next to the imagined ones
        const real = kind === "model" ? data.vectors.real : undefined;
        this.drawVector(this.get(`${kind}-0`, kind, kind === "real" ? "real" : "imagined"), values, kind, real);
      }
    }
    for (const [name, pane] of this.panes) {
      if (drawn.has(name)) continue;
      const extra = Number(name.split("-")[1]) >= Math.max(1, data.rollouts);
      pane.figure.hidden = extra;
      pane.figure.classList.add("empty");
    }
    for (const name of drawn) this.panes.get(name).figure.hidden = false;
    this.updateCaptions(data);
  }

  updateCaptions(data) {
    const real = this.panes.get("real-0");
    if (real) {
      const isEmpty = real.figure.classList.contains("empty");
      // an empty pane still shows its last image, dimmed; without an environment, that is the
      // recorded frame from which the rollouts start
      const reason = this.startsFromRecordings ? "recorded first frame" : "episode ended before this step";
      setText(real.info, isEmpty ? reason : data.mode.endsWith("model") ? "" : data.end_reason);
    }
    const model = this.panes.get("model-0");
    if (model) {
      const context = data.context ? `, context ${data.context[0]} of ${data.context[1]}` : "";
      setText(model.info, data.imagined_steps === null ? "" : countSteps(data.step - (data.fork ?? data.step)) + context);
    }
  }

  // Draws one bar per number; `real` are the real numbers, drawn to the left of the imagined ones.
  drawVector(pane, values, kind, real) {
    const [context, width, height, ratio] = fitCanvas(pane.canvas);
    const scale = ratio * parseFloat(getComputedStyle(document.documentElement).fontSize) / 15;
    const series = [...(real ? [[real, "real"]] : []), [values, kind]];
    const largest = Math.max(1, ...series.flatMap(([numbers]) => numbers.map(Math.abs)));
    const slot = width / Math.max(1, values.length);
    const gap = Math.min(slot * 0.2, 12 * scale);
    const barWidth = (slot - gap) / series.length;
    context.fillStyle = color("line");
    context.fillRect(0, height / 2, width, scale);
    series.forEach(([numbers, name], place) => {
      context.fillStyle = color(name);
      numbers.forEach((value, index) => {
        const size = (value / largest) * height * 0.42;
        context.fillRect(index * slot + gap / 2 + place * barWidth, height / 2 - Math.max(0, size), Math.max(1, barWidth - scale), Math.abs(size));
      });
    });
    context.font = `${11 * scale}px ui-monospace, monospace`;
    context.textAlign = "center";
    context.fillStyle = color("dim");
    if (slot > 44 * scale) values.forEach((value, index) => context.fillText(format(value), (index + 0.5) * slot, height - 6 * scale));
    pane.canvas.classList.add("vector");
    pane.canvas.setAttribute("aria-label", `${values.length} numbers: ${values.slice(0, 8).map(format).join(", ")}`);
    pane.figure.classList.remove("empty");
  }
}
