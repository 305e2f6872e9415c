// Which model answers: one of those that are served, or an adapter.

import { call } from "./api.js";
import { setModel } from "./chat.js";
import { announce, byId, figures, make } from "./dom.js";
import * as files from "./files.js";
import * as hear from "./hear.js";
import * as speak from "./speak.js";

const TASKS = { transcription: "speech to text", speech: "text to speech", embedding: "embeddings" };
const select = byId("models");
let listed = "";
let served = [];
let every = []; // With those that only the API asks: voices, embeddings, programs.

/** Show what is served: a name where there is one, a choice where there are several. */
export function offerModels(models, all) {
  served = models;
  every = all;
  const now = JSON.stringify(models.map((model) => model.id));
  if (now === listed) {
    fit();
    return;
  }
  const before = listed && select.value;
  listed = now;
  const several = models.length > 1;
  byId("model").hidden = several;
  byId("model").textContent = models[0].id;
  select.hidden = !several;
  select.replaceChildren(
    ...models.map((model) =>
      make("option", { value: model.id }, model.parent ? `${model.id} (adapter)` : model.id)),
  );
  const there = models.some((model) => model.id === before);
  select.value = there ? before : models[0].id;
  if (before && !there) announce(`${before} is not served any more; ${models[0].id} answers now.`);
  setModel(select.value);
  fit();
}

/** The files that the chosen model takes, and what it is asked by. */
function fit() {
  const model = served.find((one) => one.id === select.value) ?? served[0];
  files.offer(model.input_modalities ?? ["text"]);
  hear.offer(model);
  speak.offer(model, served.every((one) => one.task === "transcription"));
}

function choose(name) {
  select.value = name;
  setModel(name);
  fit();
  announce(`${name} answers from now on.`);
}

select.onchange = () => choose(select.value);

/** The dialog: each model with what it takes, and the one that answers. */
async function show() {
  const rows = every.map((model) => {
    const here = model.id === (select.value || served[0].id);
    const facts = [model.parent ? `adapter of ${model.parent}` : null,
      TASKS[model.task] ?? model.task ?? null,
      model.max_model_len && model.task !== "transcription" ? `${figures(model.max_model_len)} tokens of context` : null,
      model.task !== "transcription" && model.input_modalities?.includes("audio") ? "hears sounds" : null,
      model.input_modalities?.includes("image") ? "takes pictures" : null];
    if (!served.includes(model)) facts.push("asked through the API");
    const button = make(served.includes(model) ? "button" : "p", { type: "button", class: "talk-title", "aria-current": here ? "true" : null },
      model.id, make("small", {}, facts.filter(Boolean).join(" · ")));
    if (served.includes(model)) button.onclick = () => {
      if (served.length > 1) choose(model.id);
      byId("models-dialog").close();
    };
    return make("li", {}, button);
  });
  byId("served").replaceChildren(...rows);
  byId("models-dialog").showModal();
  try {
    const { name, model } = await (await call("v1/license", { quietly: true })).json();
    byId("licence").textContent = `${model}. Licence: ${name}.`;
  } catch {
    byId("licence").textContent = "";
  }
}

byId("show-models").onclick = show;
