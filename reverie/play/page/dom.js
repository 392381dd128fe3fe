// Small helpers for the document.

export function byId(id) { return document.getElementById(id); }

// Creates an element; `properties` that the element does not have become attributes. So does
// `list`, which is a read-only property of inputs.
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in node && name !== "list") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// Sets the text of an element only if it differs, so that screen readers do not repeat it.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Returns a color of the theme: a custom property of style.css.
export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Formats a number with few digits; a dash if there is none.
export function format(value) {
  if (value === undefined || value === null || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 100000)) return value.toExponential(1);
  return Number.isInteger(value) ? String(value) : value.toFixed(size < 10 ? 3 : 1);
}

// Restores the saved theme, and switches between dark and light with its button.
export function setUpTheme() {
  const root = document.documentElement;
  try {
    const saved = localStorage.getItem("reverie-theme");
    if (saved) root.dataset.theme = saved;
  } catch { /* no storage */ }
  byId("theme").addEventListener("click", () => {
    const dark = getComputedStyle(root).colorScheme === "dark";
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("reverie-theme", root.dataset.theme); } catch { /* no storage */ }
    window.dispatchEvent(new Event("themechange"));
  });
}

// Fit the bitmap of a canvas to its size on the screen. Returns its context, width and height,
// and the number of bitmap pixels per CSS pixel.
export function fitCanvas(canvas) {
  const scale = window.devicePixelRatio || 1;
  const width = Math.max(1, Math.round(canvas.clientWidth * scale));
  const height = Math.max(1, Math.round(canvas.clientHeight * scale));
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
  }
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, width, height);
  return [context, width, height, scale];
}

// A list of recorded episodes; `open` is called with the entry that the user selects.
export function listEpisodes(list, entries, open) {
  list.replaceChildren(...entries.map((entry) => {
    const button = element("button", { type: "button" }, element("span", { className: "name", textContent: entry.name, title: entry.name }), element("small", { textContent: `${entry.source}, ${countSteps(entry.rows - 1)}` }));
    button.onclick = () => open(entry, button);
    return element("li", {}, button);
  }));
}

export function countSteps(count) {
  return count === 1 ? "1 step" : `${count} steps`;
}
