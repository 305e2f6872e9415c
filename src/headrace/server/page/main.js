// The page: two views, the state of the server, the start.

import { call } from "./api.js";
import * as board from "./board.js";
import * as chat from "./chat.js";
import { byId } from "./dom.js";
import * as files from "./files.js";
import * as hear from "./hear.js";
import { offerModels } from "./models.js";
import * as settings from "./settings.js";

function route() {
  const live = location.hash === "#live";
  byId("chat").hidden = live;
  byId("live").hidden = !live;
  for (const [id, here] of [["to-chat", !live], ["to-live", live]]) {
    if (here) byId(id).setAttribute("aria-current", "page");
    else byId(id).removeAttribute("aria-current");
  }
  document.title = live ? "Live · Headrace" : "Headrace";
  board.show(live && !document.hidden);
}

function state(kind, text) {
  byId("dot").className = `dot ${kind}`;
  const notice = byId("notice");
  notice.hidden = kind === "ready";
  if (notice.textContent !== text) notice.textContent = text;
}

/** Ask how the server is: often while it starts, seldom once it serves. */
async function follow() {
  let known = false;
  for (;;) {
    let wait = 15000;
    try {
      // The models first: a user's key opens them, the statistics are the operator's. Adapters
      // come and go while the server runs.
      const served = (await (await call("v1/models", { quietly: known })).json()).data;
      const asked = served.filter((model) => !model.task || model.task === "transcription");
      const models = asked.length ? asked.sort((a, b) => (a.task === "transcription") - (b.task === "transcription")) : served;
      offerModels(models, served);
      if (!known) {
        known = true;
        if (models[0].task !== "transcription") board.facts().then((server) => settings.offer(server?.features ?? ["grammar"]));
      }
      const health = await fetch(new URL("health", document.baseURI), { cache: "no-store" });
      if (health.ok) state("ready", "");
      else {
        state("", `Not ready: ${(await health.json()).message}.`);
        wait = 2000;
      }
    } catch (error) {
      state(error.status ? "" : "down", error.status ? `${error.message}.` : "The server cannot be reached.");
      wait = 2000;
    }
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

settings.start();
chat.start();
board.start();
hear.start();
files.start((taken) => (byId("hear").hidden ? files.add(taken) : hear.take(taken)));
addEventListener("hashchange", route);
document.addEventListener("visibilitychange", route);
route();
follow();
