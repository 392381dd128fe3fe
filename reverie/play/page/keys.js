// Input from keyboard, buttons of the page and gamepads. Every action has default keys, which
// the server knows. Users can map a default key to another, physical key of their keyboard.

const NAMES = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", Space: "Space", Period: ".", Comma: ",", Slash: "/" };

export function keyName(code) {
  return NAMES[code] || code.replace(/^Key|^Digit/, "");
}

export class KeyInput {
  constructor(storageKey, onChange, isActive) {
    this.storageKey = storageKey;
    this.onChange = onChange;
    this.isActive = isActive;
    this.sources = new Map(); // held default keys, by input source
    this.used = new Set(); // default keys of all actions
    this.map = {}; // from default to physical keys
    try { this.map = JSON.parse(localStorage.getItem(storageKey) || "{}"); } catch { /* no storage */ }
    window.addEventListener("keydown", (event) => this.onKey(event, true));
    window.addEventListener("keyup", (event) => this.onKey(event, false));
    window.addEventListener("blur", () => this.releaseAll());
    document.addEventListener("visibilitychange", () => { if (document.hidden) this.releaseAll(); });
    this.pollGamepad = this.pollGamepad.bind(this);
    window.addEventListener("gamepadconnected", () => requestAnimationFrame(this.pollGamepad));
  }

  toPhysical(code) { return this.map[code] || code; }

  remap(code, physical) {
    for (const [key, value] of Object.entries(this.map)) if (value === physical) delete this.map[key];
    if (physical === code) delete this.map[code];
    else this.map[code] = physical;
    this.store();
  }

  resetMap() { this.map = {}; this.store(); }

  store() {
    try { localStorage.setItem(this.storageKey, JSON.stringify(this.map)); } catch { /* no storage */ }
  }

  // The inverse of `toPhysical`; null for a key that is mapped to another one.
  toDefault(physical) {
    for (const [code, value] of Object.entries(this.map)) if (value === physical) return code;
    return this.map[physical] ? null : physical;
  }

  // True if a physical key selects an action.
  isActionKey(physical) { return this.used.has(this.toDefault(physical)); }

  onKey(event, down) {
    if (event.ctrlKey || event.altKey || event.metaKey || !this.isActive()) return;
    const tag = event.target.tagName;
    const typing = tag === "SELECT" || (tag === "INPUT" && event.target.type !== "checkbox");
    if (down && typing) return;
    const code = this.toDefault(event.code);
    if (!code || !this.used.has(code)) return;
    event.preventDefault(); // arrows and space do not scroll or press buttons
    if (down && event.repeat) return;
    this.hold(`key ${event.code}`, down ? [code] : []);
  }

  // Sets the default keys that one source of input holds: a key, a button or the gamepad.
  hold(source, codes) {
    if (codes.length) this.sources.set(source, codes);
    else if (!this.sources.delete(source)) return;
    this.onChange([...new Set([...this.sources.values()].flat())]);
  }

  releaseAll() {
    if (!this.sources.size) return;
    this.sources.clear();
    this.onChange([]);
  }

  pollGamepad() {
    const pad = [...navigator.getGamepads()].find(Boolean);
    if (!pad) {
      this.padText = "";
      this.hold("gamepad", []);
      return;
    }
    const codes = [];
    const pressed = (index) => pad.buttons[index] && pad.buttons[index].pressed;
    if (pad.axes[0] < -0.5 || pressed(14)) codes.push("ArrowLeft");
    if (pad.axes[0] > 0.5 || pressed(15)) codes.push("ArrowRight");
    if (pad.axes[1] < -0.5 || pressed(12)) codes.push("ArrowUp");
    if (pad.axes[1] > 0.5 || pressed(13)) codes.push("ArrowDown");
    if (pressed(0)) codes.push("Space");
    const text = codes.join();
    if (text !== this.padText) {
      this.padText = text;
      this.hold("gamepad", codes.filter((code) => this.used.has(code)));
    }
    if (this.onAxes) this.onAxes(pad.axes);
    requestAnimationFrame(this.pollGamepad);
  }
}
