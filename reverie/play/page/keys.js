// Input from keyboard, buttons of the page and gamepads. The server defines the default keys of
// every action and receives only these. Users can replace a default key by another, physical key.

const NAMES = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", Space: "Space", Period: ".", Comma: ",", Slash: "/" };

// Returns the label of a key, from its `KeyboardEvent.code`.
export function keyName(code) {
  return NAMES[code] || code.replace(/^Key|^Digit/, "");
}

export class KeyInput {
  // `onChange` is called with all held keys; keys are ignored while `isActive` returns false.
  constructor(storageKey, onChange, isActive) {
    this.storageKey = storageKey;
    this.onChange = onChange;
    this.isActive = isActive;
    this.onAxes = null; // if set, called with the axes of the gamepad in every animation frame
    this.held = new Map(); // held default keys, by input source
    this.actionKeys = new Set(); // default keys of all actions
    this.remapped = {}; // physical keys by default key, where they differ
    try { this.remapped = JSON.parse(localStorage.getItem(storageKey) || "{}"); } catch { /* no storage */ }
    window.addEventListener("keydown", (event) => this.onKey(event, true));
    window.addEventListener("keyup", (event) => this.onKey(event, false));
    window.addEventListener("blur", () => this.releaseAll());
    document.addEventListener("visibilitychange", () => { if (document.hidden) this.releaseAll(); });
    this.pollGamepad = this.pollGamepad.bind(this);
    window.addEventListener("gamepadconnected", () => requestAnimationFrame(this.pollGamepad));
  }

  toPhysical(code) { return this.remapped[code] || code; }

  // Replaces a default key by a physical one, which no longer replaces any other key.
  remap(code, physical) {
    for (const [key, value] of Object.entries(this.remapped)) if (value === physical) delete this.remapped[key];
    if (physical === code) delete this.remapped[code];
    else this.remapped[code] = physical;
    this.store();
  }

  resetMap() { this.remapped = {}; this.store(); }

  store() {
    try { localStorage.setItem(this.storageKey, JSON.stringify(this.remapped)); } catch { /* no storage */ }
  }

  // The inverse of `toPhysical`; null for a default key that another key replaces.
  toDefault(physical) {
    for (const [code, value] of Object.entries(this.remapped)) if (value === physical) return code;
    return this.remapped[physical] ? null : physical;
  }

  // True if a physical key selects an action.
  isActionKey(physical) { return this.actionKeys.has(this.toDefault(physical)); }

  onKey(event, down) {
    if (event.ctrlKey || event.altKey || event.metaKey || !this.isActive()) return;
    const tag = event.target.tagName;
    const typing = tag === "SELECT" || (tag === "INPUT" && event.target.type !== "checkbox");
    if (down && typing) return;
    const code = this.toDefault(event.code);
    if (!code || !this.actionKeys.has(code)) return;
    event.preventDefault(); // arrows and space do not scroll or press buttons
    if (down && event.repeat) return;
    this.hold(`key ${event.code}`, down ? [code] : []);
  }

  // Sets the default keys that one source of input holds: a key, a button or the gamepad.
  hold(source, codes) {
    if (codes.length) this.held.set(source, codes);
    else if (!this.held.delete(source)) return;
    this.onChange([...new Set([...this.held.values()].flat())]);
  }

  releaseAll() {
    if (!this.held.size) return;
    this.held.clear();
    this.onChange([]);
  }

  // Reads the first gamepad in every animation frame; browsers send no events for its buttons.
  pollGamepad() {
    const pad = [...navigator.getGamepads()].find(Boolean);
    if (!pad) {
      this.gamepadKeys = "";
      this.hold("gamepad", []);
      return;
    }
    const codes = [];
    // standard mapping: axes 0 and 1 are the left stick, 12 to 15 the direction pad
    const pressed = (index) => pad.buttons[index] && pad.buttons[index].pressed;
    if (pad.axes[0] < -0.5 || pressed(14)) codes.push("ArrowLeft");
    if (pad.axes[0] > 0.5 || pressed(15)) codes.push("ArrowRight");
    if (pad.axes[1] < -0.5 || pressed(12)) codes.push("ArrowUp");
    if (pad.axes[1] > 0.5 || pressed(13)) codes.push("ArrowDown");
    if (pressed(0)) codes.push("Space");
    const text = codes.join();
    if (text !== this.gamepadKeys) {
      this.gamepadKeys = text;
      this.hold("gamepad", codes.filter((code) => this.actionKeys.has(code)));
    }
    if (this.onAxes) this.onAxes(pad.axes);
    requestAnimationFrame(this.pollGamepad);
  }
}
