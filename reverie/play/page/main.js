// Chooses the page: a session, or the list of runs.
import { byId, setText, setUpTheme } from "./dom.js";
import { PlayPage } from "./play.js";
import { ViewPage, ServerSource, ExportedSource } from "./view.js";

async function start() {
  setUpTheme();
  if (window.REVERIE_EXPORT) {
    byId("home").removeAttribute("href");
    window.page = new ViewPage(new ExportedSource(window.REVERIE_EXPORT));
    return;
  }
  const parameters = new URLSearchParams(location.search);
  const token = parameters.get("token") || "";
  const response = await fetch(`/api/info?${new URLSearchParams({ token })}`);
  const info = await response.json();
  const session = parameters.get("play") || "";
  byId("home").href = info.view ? `/?${new URLSearchParams({ token })}` : "#";
  if (info.view && !session) window.page = new ViewPage(new ServerSource(token));
  else {
    const source = parameters.get("source");
    window.page = new PlayPage(session, token, source && { source, number: Number(parameters.get("number")) });
  }
}

start().catch((error) => setText(byId("connection-status"), `error: ${error.message}`));
