// Which model answers: the one that is served, or one of its adapters.

import { call } from "./api.js";
import { setModel } from "./chat.js";
import { announce, byId, figures, make } from "./dom.js";
import * as files from "./files.js";

const select = byId("models");
let listed = "";
let served = [];

/** Show what is served: a name where there is one, a choice where there are several. */
export function offerModels(models) {
  served = models;
  const now = JSON.stringify(models.map((model) => model.id));
  if (now === listed) {
    offerFiles();
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
  offerFiles();
}

/** The files that the chosen model takes. */
const offerFiles = () => files.offer(served.find((model) => model.id === select.value)?.input_modalities ?? ["text"]);

function choose(name) {
  select.value = name;
  setModel(name);
  offerFiles();
  announce(`${name} answers from now on.`);
}

select.onchange = () => choose(select.value);

/** The dialog: each model with what it takes, and the one that answers. */
async function show() {
  const rows = served.map((model) => {
    const here = model.id === (select.value || served[0].id);
    const facts = [model.parent ? `adapter of ${model.parent}` : null,
      model.task === "transcription" ? "speech to text" : `${figures(model.max_model_len)} tokens of context`,
      model.task !== "transcription" && model.input_modalities?.includes("audio") ? "hears sounds" : null,
      model.input_modalities?.includes("image") ? "takes pictures" : null];
    const button = make("button", { type: "button", class: "talk-title", "aria-current": here ? "true" : null },
      model.id, make("small", {}, facts.filter(Boolean).join(" · ")));
    button.onclick = () => {
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
