// The page of a session.
import { byId, countSteps, element, listEpisodes, setText, format } from "./dom.js";
import { SessionConnection } from "./socket.js";
import { Panes } from "./panes.js";
import { Traces, drawLatents } from "./traces.js";
import { KeyInput, keyName } from "./keys.js";

export class PlayPage {
  constructor(session, token, episode = null) {
    this.data = null; // of the newest view, see `View` in session.py
    this.episode = episode; // a recorded episode to open first: its source and number
    this.hello = null; // first message of the server: what stays the same during a session
    this.hasControls = true;
    this.panes = new Panes(byId("panes"));
    this.traces = new Traces(byId("traces"));
    this.actionRows = []; // for each discrete control, the elements of its values
    byId("play").hidden = false;
    this.keys = new KeyInput("reverie-keys", (held) => this.send({ type: "keys", held }), () => !document.querySelector("dialog[open]"));
    this.keys.onAxes = (axes) => this.moveSliders(axes);
    this.setUpButtons();
    this.connection = new SessionConnection(session, token, {
      status: (text) => this.showStatus(text),
      text: (message) => this.receive(message),
      view: (data, bitmaps) => this.show(data, bitmaps),
    });
  }

  send(message) { this.connection.send(message); }

  showStatus(text) {
    const chip = byId("connection-status");
    setText(chip, text);
    chip.classList.toggle("good", text === "connected");
    chip.classList.toggle("bad", text !== "connected");
    if (text === "refused") this.showMessage("The server refused the connection. Open the address that it printed.", true);
    if (text !== "connected") this.keys.releaseAll();
  }

  showMessage(text, isError = false) {
    setText(byId("message"), text || "");
    byId("message").classList.toggle("error", isError);
  }

  receive(message) {
    if (message.type === "hello") this.start(message);
    else if (message.type === "clients") {
      this.hasControls = message.has_controls;
      byId("control").hidden = message.has_controls;
      if (message.count > 1) setText(byId("connection-status"), `connected, ${message.count} pages`);
      else setText(byId("connection-status"), "connected");
      this.updateDisabled();
    } else if (message.type === "episodes") this.listEpisodes(message.list);
    else if (message.type === "error") this.showMessage(message.message, true);
  }

  start(hello) {
    this.hello = hello;
    setText(byId("title"), `${hello.logdir} · ${hello.task} · ${hello.agent}`);
    document.title = `${hello.task} · Reverie`;
    byId("header").checked = hello.show_header;
    byId("hud").hidden = !hello.show_header;
    byId("modes").replaceChildren(...hello.modes.map((mode) => {
      const button = element("button", { type: "button", role: "radio", textContent: mode.label, "aria-checked": "false" });
      button.dataset.mode = mode.name;
      button.onclick = () => {
        if (mode.reason) setText(byId("reason"), `Not available: ${mode.reason}.`);
        else { setText(byId("reason"), ""); this.send({ type: "mode", mode: mode.name }); }
      };
      if (mode.reason) {
        button.setAttribute("aria-disabled", "true");
        button.title = `Not available: ${mode.reason}`;
        button.style.opacity = 0.45;
      }
      return button;
    }));
    byId("speed").replaceChildren(...hello.speeds.map((speed) => element("option", { value: String(speed), textContent: `${speed}×` })));
    const counts = [1, 2, 3, 4, 6, 8].filter((count) => count <= hello.max_rollouts);
    byId("rollouts").replaceChildren(...counts.map((count) => element("option", { value: String(count), textContent: String(count) })));
    byId("fork").hidden = !hello.max_rollouts;
    for (const id of ["rollouts", "forkevery"]) byId(id).closest("label").hidden = !hello.max_rollouts;
    // without an environment, imagined rollouts start from recorded episodes
    this.panes.startsFromRecordings = Boolean(hello.modes.find((mode) => mode.name === "human-env").reason);
    this.buildControls(hello.controls);
    this.updateDisabled();
    if (this.episode) this.send({ type: "open", ...this.episode });
    this.episode = null;
  }

  // Disables the inputs while another page controls the session.
  updateDisabled() {
    for (const node of byId("play").querySelectorAll("button, select, input")) {
      if (node.id === "header" || node.id === "keysbutton") continue;
      const isRecorded = node.id === "takeover" && this.data?.mode === "recorded";
      node.disabled = !this.hasControls || isRecorded;
    }
  }

  // One row per value of an action: a bar with its probability, and a button that selects
  // the value while it is held.
  buildControls(controls) {
    this.keys.actionKeys = new Set(controls.flatMap((control) => control.key_combinations.flat()));
    this.actionRows = [];
    byId("controls").replaceChildren(...controls.map((control, number) => {
      const box = element("div", { className: "control" });
      if (controls.length > 1 && control.value_names.length) box.append(element("h3", { textContent: control.label }));
      if (!control.value_names.length) {
        box.append(this.slider(control, number));
        return box;
      }
      const rows = control.value_names.map((name, value) => {
        const fill = element("div", { className: "bar-fill" });
        const percent = element("span", { className: "number" });
        const keys = element("span", { className: "keys" });
        const row = element("button", { type: "button", className: "action" }, element("span", { className: "name", textContent: name, title: name }), element("span", { className: "bar-track" }, fill), percent, keys);
        const source = `button ${number} ${value}`;
        const press = (down) => {
          const codes = control.key_combinations[value];
          if (codes.length) this.keys.hold(source, down ? codes : []);
          else this.send({ type: "slider", number, value: down ? value : control.noop });
        };
        row.onpointerdown = (event) => { row.setPointerCapture(event.pointerId); press(true); };
        row.onpointerup = row.onpointercancel = () => press(false);
        row.onkeydown = (event) => { if (event.key === "Enter" && !event.repeat) press(true); };
        row.onkeyup = (event) => { if (event.key === "Enter") press(false); };
        row.onblur = () => press(false);
        return { row, fill, percent, keys, codes: control.key_combinations[value], isDefault: value === control.noop };
      });
      box.append(...rows.map((entry) => entry.row));
      this.actionRows.push(rows);
      return box;
    }));
    this.labelKeys();
  }

  // Shows the physical keys of every action.
  labelKeys() {
    for (const rows of this.actionRows) {
      for (const { keys, codes, isDefault } of rows) {
        keys.replaceChildren(...codes.map((code) => element("kbd", { textContent: keyName(this.keys.toPhysical(code)) })));
        if (!codes.length) setText(keys, isDefault ? "default" : "no key");
        keys.title = isDefault ? "Selected while no key is held" : "";
      }
    }
  }

  // Returns the slider of a continuous control.
  slider(control, number) {
    const value = element("output", { textContent: "0" });
    const input = element("input", { type: "range", min: control.low, max: control.high, step: (control.high - control.low) / 200, value: 0, "aria-label": control.label });
    input.dataset.number = number;
    input.oninput = () => {
      setText(value, format(Number(input.value)));
      this.send({ type: "slider", number, value: Number(input.value) });
    };
    return element("label", { className: "slider" }, control.label, input, value);
  }

  // Moves the first sliders to the positions of the gamepad's axes, from -1 to 1.
  moveSliders(axes) {
    byId("controls").querySelectorAll("input[type=range]").forEach((input, index) => {
      if (index >= axes.length) return;
      const range = (Number(input.max) - Number(input.min)) / 2;
      const axis = Math.abs(axes[index]) < 0.08 ? 0 : axes[index]; // a released stick is not exactly 0
      const next = String(Number(input.min) + range + axis * range);
      if (Math.abs(Number(input.value) - Number(next)) > range / 100) { input.value = next; input.oninput(); }
    });
  }

  setUpButtons() {
    const click = (id, handler) => { byId(id).onclick = handler; };
    click("control", () => this.send({ type: "control" }));
    click("restart", () => this.send({ type: "restart" }));
    click("pause", () => this.send({ type: "pause", on: !this.data?.paused }));
    click("step", () => this.send({ type: "step" }));
    click("fork", () => this.send({ type: "fork", step: this.data?.step ?? 0 }));
    click("takeover", () => this.send({ type: "human", on: !this.data?.human }));
    click("save-episode", () => this.answerSave(true));
    click("discard", () => this.answerSave(false));
    click("keysbutton", () => this.openRemap());
    click("remap-close", () => byId("remap").close());
    click("remap-reset", () => { this.keys.resetMap(); this.openRemap(); });
    byId("scrub").oninput = (event) => this.send({ type: "seek", step: Number(event.target.value) });
    byId("speed").onchange = (event) => this.send({ type: "speed", speed: Number(event.target.value) });
    byId("rollouts").onchange = (event) => this.send({ type: "rollouts", count: Number(event.target.value) });
    byId("forkevery").onchange = (event) => this.send({ type: "fork_every", steps: Number(event.target.value) });
    byId("seed").onchange = (event) => { if (event.target.validity.valid && event.target.value !== "") this.send({ type: "restart", seed: Number(event.target.value) }); };
    byId("ask-to-save").onchange = (event) => this.send({ type: "ask_to_save", on: event.target.checked });
    byId("header").onchange = (event) => { byId("hud").hidden = !event.target.checked; };
    byId("save-dialog").addEventListener("cancel", (event) => event.preventDefault());
    byId("modes").addEventListener("keydown", (event) => {
      if (!["ArrowLeft", "ArrowRight"].includes(event.key) || this.keys.isActionKey(event.code)) return;
      const buttons = [...byId("modes").children];
      const next = buttons.indexOf(document.activeElement) + (event.key === "ArrowRight" ? 1 : -1);
      buttons[(next + buttons.length) % buttons.length].focus();
    });
    const shortcuts = {
      KeyP: () => byId("pause").click(), Period: () => byId("step").click(), KeyR: () => byId("restart").click(),
      KeyF: () => { if (!byId("fork").hidden) byId("fork").click(); }, KeyT: () => byId("takeover").click(), KeyH: () => byId("header").click(),
      Comma: () => this.changeSpeed(-1), Slash: () => this.changeSpeed(1),
    };
    window.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey || event.repeat) return;
      if (byId("save-dialog").open) {
        if (event.code === "KeyY") this.answerSave(true);
        if (event.code === "KeyN") this.answerSave(false);
        return;
      }
      const tag = event.target.tagName;
      if (document.querySelector("dialog[open]") || tag === "SELECT" || (tag === "INPUT" && ["number", "search"].includes(event.target.type))) return;
      if (shortcuts[event.code] && !this.keys.isActionKey(event.code)) {
        event.preventDefault();
        shortcuts[event.code]();
      }
    });
  }

  changeSpeed(direction) {
    const select = byId("speed");
    const index = Math.min(Math.max(select.selectedIndex + direction, 0), select.length - 1);
    if (index !== select.selectedIndex) { select.selectedIndex = index; select.onchange({ target: select }); }
  }

  // Sends the answer to the question whether to save the episode.
  answerSave(save) {
    byId("save-dialog").close();
    this.send({ type: "save_episode", on: save });
  }

  // Opens the dialog in which users choose other keys.
  openRemap() {
    const codes = [...this.keys.actionKeys];
    const actionNames = (code) => this.hello.controls.flatMap((control) => control.value_names.filter((name, value) => control.key_combinations[value].length === 1 && control.key_combinations[value][0] === code)).join(", ") || keyName(code);
    byId("remap-list").replaceChildren(...codes.map((code) => {
      const button = element("button", { type: "button" }, actionNames(code), element("kbd", { textContent: keyName(this.keys.toPhysical(code)) }));
      button.onclick = () => {
        setText(button.querySelector("kbd"), "press a key");
        const assignKey = (event) => {
          event.preventDefault();
          event.stopPropagation();
          window.removeEventListener("keydown", assignKey, true);
          if (event.code !== "Escape") this.keys.remap(code, event.code);
          this.labelKeys();
          this.openRemap();
        };
        window.addEventListener("keydown", assignKey, true);
      };
      return button;
    }));
    if (!byId("remap").open) byId("remap").showModal();
    this.labelKeys();
  }

  listEpisodes(list) {
    if (!list.length) { byId("episodes").replaceChildren("There are no recorded episodes."); return; }
    listEpisodes(byId("episodes"), list, ({ source, number }, button) => {
      for (const other of byId("episodes").querySelectorAll("[aria-current]")) other.removeAttribute("aria-current");
      button.setAttribute("aria-current", "true");
      this.send({ type: "open", source, number });
    });
    this.updateDisabled();
  }

  // Shows a view: its data and its decoded images.
  show(data, bitmaps) {
    if (data.error !== undefined) { this.showMessage(data.error, true); return; }
    const previous = this.data;
    this.data = data;
    this.panes.show(data, bitmaps);
    this.traces.add(data);
    this.showMessage(data.message, /Fix:|Error/.test(data.message));
    if (!previous || previous.mode !== data.mode) {
      for (const button of byId("modes").children) {
        button.setAttribute("aria-checked", String(button.dataset.mode === data.mode));
        if (button.dataset.mode === data.mode) button.scrollIntoView({ block: "nearest", inline: "nearest" });
      }
      byId("episodes-card").hidden = data.mode !== "recorded";
      this.updateDisabled();
      if (data.mode === "recorded") this.send({ type: "episodes" });
    }
    byId("pause").setAttribute("aria-pressed", String(data.paused));
    setText(byId("pause"), data.paused ? "Continue" : "Pause");
    byId("takeover").setAttribute("aria-pressed", String(data.human));
    setText(byId("takeover"), data.human ? "Let the agent act" : "Take over");
    const scrub = byId("scrub");
    scrub.min = data.first;
    scrub.max = data.last;
    if (document.activeElement !== scrub || !data.paused) scrub.value = data.step;
    setText(byId("position"), `${data.step} / ${data.last}`);
    this.sync("speed", String(data.speed));
    this.sync("rollouts", String(data.rollouts));
    this.sync("forkevery", String(data.fork_every));
    if (document.activeElement !== byId("seed")) byId("seed").value = data.seed;
    byId("ask-to-save").checked = data.ask_to_save;
    this.showActions(data);
    this.showHud(data);
    byId("latents-card").hidden = !data.latents;
    if (data.latents) drawLatents(byId("latents"), data);
    if (data.awaits_save_answer && this.hasControls && !byId("save-dialog").open) {
      setText(byId("save-text"), `${countSteps(data.step)}, return ${format(data.mode.endsWith("model") ? data.imagined_return : data.return)}. It is written to the folder of the run.`);
      byId("save-dialog").showModal();
    } else if (!data.awaits_save_answer && byId("save-dialog").open) byId("save-dialog").close();
  }

  // Sets an input to the value of the server, unless the user is changing it.
  sync(id, value) {
    const node = byId(id);
    if (document.activeElement !== node && node.value !== value) node.value = value;
  }

  // Shows the probabilities of all actions, and marks the chosen ones.
  showActions(data) {
    this.actionRows.forEach((rows, group) => {
      const probs = (data.probs || [])[group] || [];
      rows.forEach((entry, value) => {
        const probability = probs[value];
        entry.fill.style.width = probability === undefined ? "0" : `${(100 * probability).toFixed(1)}%`;
        setText(entry.percent, probability === undefined ? "" : `${Math.round(100 * probability)} %`);
        entry.row.classList.toggle("chosen", (data.chosen || [])[group] === value);
      });
    });
  }

  // Fills the header above the images ("heads-up display").
  showHud(data) {
    const inModel = data.mode.endsWith("model");
    const reward = inModel ? data.scalars["predicted reward"] : data.scalars.reward;
    const context = data.context ? `, context ${data.context[0]}/${data.context[1]}` : "";
    const values = {
      episode: data.episode, step: data.step, action: data.action || "–", reward: format(reward),
      return: format(inModel ? data.imagined_return : data.return), fps: data.fps.toFixed(1),
      imagined: data.fork === null ? "–" : countSteps(data.step - data.fork) + context,
    };
    const hud = byId("hud");
    if (!hud.children.length) hud.append(...Object.keys(values).map((name) => element("span", {}, `${name} `, element("b"))));
    Object.values(values).forEach((value, index) => setText(hud.children[index].lastChild, String(value)));
  }
}
