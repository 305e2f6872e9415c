// Which model answers: the one that is served, or one of its adapters.

import { announce, byId, make } from "./dom.js";
import { setModel } from "./chat.js";

const select = byId("models");
let listed = "";

/** Show what is served: a name where there is one, a choice where there are several. */
export function offerModels(models) {
  const now = JSON.stringify(models.map((model) => model.id));
  if (now === listed) return;
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
}

select.onchange = () => {
  setModel(select.value);
  announce(`${select.value} answers from now on.`);
};
