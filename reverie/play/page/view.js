// The page of all runs: table, curves, videos and configs. `source` reads from the server,
// or from the data of an exported page.
import { byId, element, listEpisodes, setText, format } from "./dom.js";
import { drawChart, PALETTE } from "./charts.js";
import { Recording } from "./recording.js";

const REFRESH_MS = 3000;
const FEW_MEDIA = 6; // number of images and videos that are shown at first
const MAX_CURVES = 8; // number of runs whose curves are shown at first

// Reads runs from the server.
export class ServerSource {
  constructor(token) { this.token = token; this.isLive = true; }

  async get(path, parameters = {}) {
    const response = await fetch(`${path}?${new URLSearchParams({ ...parameters, token: this.token })}`);
    if (!response.ok) throw new Error((await response.json().catch(() => ({}))).error || response.statusText);
    return response.json();
  }

  runs() { return this.get("/api/runs"); }
  details(id) { return this.get(`/api/runs/${id}`); }
  episodes(id) { return this.get(`/api/runs/${id}/episodes`); }
  series(id, key) { return this.get(`/api/runs/${id}/series`, { key }); }
  difference(a, b) { return this.get("/api/difference", { a, b }); }
  media(id, number, name) { return `/api/runs/${id}/media/${number}?${new URLSearchParams({ token: this.token, name })}`; }
  play(id, episode = {}) { location.search = new URLSearchParams({ token: this.token, play: id, ...episode }); }
}

// Reads runs from the data in an exported page; it has the methods of `ServerSource`.
export class ExportedSource {
  constructor(data) { this.data = data; this.isLive = false; }
  async runs() { return this.data.runs; }
  async details(id) { return this.data.details[id]; }
  async episodes() { return []; }
  async series(id, key) { return (this.data.series[id] || {})[key] || { step: [], value: [] }; }
  async difference(a, b) {
    const [left, right] = [a, b].map((id) => this.data.details[id].config);
    const names = [...new Set([...Object.keys(left), ...Object.keys(right)])];
    return Object.fromEntries(names.filter((name) => left[name] !== right[name]).map((name) => [name, [left[name] ?? "", right[name] ?? ""]]));
  }
  media(id, number) { return this.data.details[id].media[number].file; }
}

export class ViewPage {
  constructor(source) {
    this.source = source;
    this.selected = null; // id of the run whose details are shown
    this.shown = new Set(); // ids of the runs whose curves are shown
    this.rows = new Map(); // elements of the table by id
    this.colors = new Map(); // of the curves, by id
    byId("view").hidden = false;
    byId("open-play").hidden = !source.isLive;
    byId("filter").oninput = () => this.drawTable();
    for (const id of ["metric", "xaxis"]) byId(id).onchange = () => this.updateChart();
    byId("smooth").oninput = () => this.drawChart();
    byId("open-play").onclick = () => source.play(this.selected);
    byId("compare").onchange = () => this.showConfig();
    window.addEventListener("resize", () => this.drawChart());
    window.addEventListener("themechange", () => this.drawChart());
    setText(byId("title"), "Runs");
    setText(byId("connection-status"), source.isLive ? "live" : "exported");
    this.lines = [];
    this.refresh(true);
    if (source.isLive) setInterval(() => { if (!document.hidden) this.refresh(false); }, REFRESH_MS);
  }

  // Reads all runs again; `first` selects what is shown when the page opens.
  async refresh(first) {
    try {
      this.runs = await this.source.runs();
      setText(byId("connection-status"), this.source.isLive ? "live" : "exported");
      byId("connection-status").classList.remove("bad");
    } catch (error) {
      setText(byId("connection-status"), "not connected");
      byId("connection-status").classList.add("bad");
      return;
    }
    if (first) { // scores of different tasks are not comparable
      const task = this.runs[0]?.task;
      this.runs.filter((run) => run.task === task).slice(0, MAX_CURVES).forEach((run) => this.shown.add(run.id));
    }
    this.chooseColors();
    this.drawTable();
    this.fillMetrics();
    await this.updateChart();
    if (!first && this.selected) await this.updateDetails();
    if (first && this.runs.length) await this.select(this.runs[0].id);
  }

  // Runs keep their colors while the order of the list changes.
  chooseColors() {
    for (const { id } of [...this.runs].sort((a, b) => (a.name < b.name ? -1 : 1))) {
      if (!this.colors.has(id)) this.colors.set(id, PALETTE[this.colors.size % PALETTE.length]);
    }
  }

  // Updates the table; elements are kept, so that the focus of the keyboard is not lost.
  drawTable() {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const body = byId("runs").tBodies[0];
    const visible = this.runs.filter((run) => words.every((word) => `${run.name} ${run.task} ${run.agent}`.toLowerCase().includes(word)));
    const nodes = visible.map((run) => {
      if (!this.rows.has(run.id)) {
        const box = element("input", { type: "checkbox", "aria-label": `Show the curve of ${run.name}` });
        box.onchange = () => { if (box.checked) this.shown.add(run.id); else this.shown.delete(run.id); this.updateChart(); };
        const name = element("button", { type: "button", className: "name", textContent: run.name, title: run.name });
        name.onclick = () => this.select(run.id);
        const cells = ["task", "agent", "status", "steps", "score"].map((key) => element("td", { className: ["steps", "score"].includes(key) ? "number" : key === "status" ? "status" : "" }));
        this.rows.set(run.id, { row: element("tr", {}, element("td", {}, box), element("td", {}, name), ...cells), box, cells });
      }
      const { row, box, cells } = this.rows.get(run.id);
      box.checked = this.shown.has(run.id);
      [run.task, run.agent, run.status, run.steps.toLocaleString(), run.score === null ? "–" : format(run.score)].forEach((text, index) => setText(cells[index], text));
      cells[2].className = `status ${run.status}`;
      row.classList.toggle("selected", run.id === this.selected);
      return row;
    });
    if (!visible.length) nodes.push(element("tr", {}, element("td", { colSpan: 7, textContent: this.runs.length ? "No run matches." : "There are no runs in this folder yet." })));
    body.replaceChildren(...nodes);
  }

  // Fills the drop-down list with the metrics of all runs, if their number has changed.
  fillMetrics() {
    const names = [...new Set(this.runs.flatMap((run) => run.metrics))];
    const select = byId("metric");
    const current = select.value || (names.includes("score") ? "score" : names[0]);
    if (select.length === names.length) return;
    select.replaceChildren(...names.map((name) => element("option", { value: name, textContent: name })));
    if (names.includes(current)) select.value = current;
  }

  // Reads the curves of the selected metric and draws them.
  async updateChart() {
    const key = byId("metric").value;
    const axis = byId("xaxis").value;
    if (!key) return this.drawChart();
    const chosen = this.runs.filter((run) => this.shown.has(run.id) && run.metrics.includes(key));
    const series = await Promise.all(chosen.map((run) => this.source.series(run.id, key).catch(() => ({ step: [], value: [] }))));
    this.lines = chosen.map((run, index) => ({ name: run.name, color: this.colors.get(run.id), x: series[index][axis] || series[index].step, y: series[index].value })).filter((line) => line.x.length);
    this.drawChart();
    byId("legend").replaceChildren(...this.lines.map((line) => {
      const mark = element("span");
      mark.style.background = line.color;
      return element("li", {}, mark, line.name);
    }));
  }

  drawChart() { drawChart(byId("chart"), this.lines, Number(byId("smooth").value)); }

  // Shows the details of a run.
  async select(id) {
    this.selected = id;
    this.drawTable();
    const others = this.runs.filter((entry) => entry.id !== id);
    byId("compare").replaceChildren(element("option", { value: "", textContent: "no run" }), ...others.map((entry) => element("option", { value: entry.id, textContent: entry.name })));
    this.detailsText = "";
    this.showsAllMedia = false;
    await this.updateDetails();
  }

  // Shows error, videos and config of the selected run, if they have changed.
  async updateDetails() {
    const id = this.selected;
    const details = await this.source.details(id).catch(() => null);
    const text = JSON.stringify(details);
    if (!details || id !== this.selected || text === this.detailsText) return;
    this.details = details;
    this.detailsText = text;
    const run = this.runs.find((entry) => entry.id === id);
    byId("details").hidden = false;
    setText(byId("details-title"), run.name);
    byId("failure").hidden = !this.details.error;
    setText(byId("failure"), this.details.error || "");
    const media = this.details.media.map((entry, number) => {
      const source = this.source.media(id, number, entry.name);
      const content = entry.kind === "mp4" ? element("video", { src: source, controls: true, loop: true, muted: true }) : element("img", { src: source, alt: entry.name, loading: "lazy" });
      return element("figure", {}, content, element("figcaption", { textContent: entry.name }));
    });
    const all = element("button", { type: "button", textContent: `Show all ${media.length} images and videos` });
    all.onclick = () => { this.showsAllMedia = true; byId("media").replaceChildren(...media); };
    const few = media.length > FEW_MEDIA && !this.showsAllMedia;
    byId("media").replaceChildren(...(few ? [...media.slice(0, FEW_MEDIA), all] : media));
    byId("sessions").replaceChildren(...(this.details.sessions || []).map((session) => new Recording(session).node));
    await this.showConfig();
    const episodes = await this.source.episodes(id).catch(() => []);
    if (id !== this.selected) return;
    byId("run-episodes-box").hidden = !episodes.length;
    listEpisodes(byId("run-episodes"), episodes, ({ source, number }) => this.source.play(id, { source, number }));
  }

  // Shows the config of the selected run, or how it differs from that of another run.
  async showConfig() {
    const other = byId("compare").value;
    const body = byId("config").tBodies[0];
    const names = [this.selected, other].map((id) => this.runs.find((run) => run.id === id)?.name);
    const titles = other ? ["setting", ...names] : ["setting", "value"];
    byId("config").tHead.rows[0].replaceChildren(...titles.map((title) => element("th", { scope: "col", textContent: title })));
    if (other) {
      const table = await this.source.difference(this.selected, other);
      const rows = Object.entries(table).map(([name, values]) => element("tr", { className: "different" }, element("td", { textContent: name }), ...values.map((value) => element("td", { textContent: value }))));
      body.replaceChildren(...(rows.length ? rows : [element("tr", {}, element("td", { textContent: "The configs are equal." }))]));
      return;
    }
    body.replaceChildren(...Object.entries(this.details.config).map(([name, value]) => element("tr", {}, element("td", { textContent: name }), element("td", { textContent: value }))));
  }
}
