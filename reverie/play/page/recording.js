// A recorded session of an exported page: plays its steps without a server.
import { element, setText, format } from "./dom.js";

export class Recording {
  constructor(session) {
    this.session = session;
    this.step = 0;
    this.figures = session.panes.map((pane) => {
      const canvas = element("canvas", { width: pane.width, height: pane.height, role: "img", "aria-label": pane.label });
      return element("figure", { className: `pane ${pane.kind}` }, element("figcaption", { textContent: pane.label }), canvas);
    });
    this.button = element("button", { type: "button", textContent: "Pause" });
    this.scrub = element("input", { type: "range", min: 0, max: session.steps.length - 1, value: 0, "aria-label": "Step" });
    this.text = element("output");
    this.button.onclick = () => { this.paused = !this.paused; setText(this.button, this.paused ? "Continue" : "Pause"); };
    this.scrub.oninput = () => { this.paused = true; setText(this.button, "Continue"); this.show(Number(this.scrub.value)); };
    const transport = element("div", { className: "transport" }, this.button, this.scrub, this.text);
    this.node = element("div", {}, element("h3", { textContent: session.title }), element("div", { className: "panes" }, ...this.figures), transport);
    this.images = session.sprite_sheets.map((source) => Object.assign(new Image(), { src: source }));
    this.show(0);
    this.images.forEach((image) => { image.onload = () => this.show(this.step); });
    this.timer = setInterval(() => { if (!this.paused && this.node.isConnected) this.show((this.step + 1) % session.steps.length); }, 1000 / session.fps);
  }

  show(step) {
    this.step = step;
    this.scrub.value = step;
    const { panes, steps } = this.session;
    panes.forEach((pane, index) => {
      const context = this.figures[index].querySelector("canvas").getContext("2d");
      const image = this.images[index];
      context.clearRect(0, 0, pane.width, pane.height);
      if (image.complete && steps[step].shown[index]) context.drawImage(image, 0, step * pane.height, pane.width, pane.height, 0, 0, pane.width, pane.height);
    });
    const { scalars, action } = steps[step];
    setText(this.text, `step ${steps[step].step} · ${action || "–"} · reward ${format(scalars.reward)} · predicted ${format(scalars["predicted reward"])}`);
  }
}
