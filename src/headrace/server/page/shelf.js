// The dialog with the conversations that this browser keeps: open, export, delete.

import { byId, make } from "./dom.js";
import { fileName, save } from "./save.js";
import * as talks from "./talks.js";

const day = (time) => new Date(time).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });

/** `open(talk)` shows one; `gone(id)` is told of one that was deleted; `here()` gives the open id. */
export function start({ open, gone, here }) {
  const dialog = byId("shelf");
  const list = byId("talks");

  function draw() {
    const kept = talks.all();
    byId("no-talks").hidden = kept.length > 0;
    list.replaceChildren(...kept.map((talk) => {
      const name = fileName(talk.title);
      const button = (label, act, attributes = {}) => {
        const made = make("button", { type: "button", class: "quiet", "aria-label": `${label}: ${talk.title}`, ...attributes }, label);
        made.onclick = act;
        return made;
      };
      const title = make("button", { type: "button", class: "talk-title", "aria-current": talk.id === here() ? "true" : null },
        talk.title, make("small", {}, day(talk.changed)));
      title.onclick = () => {
        dialog.close();
        open(talk);
      };
      return make("li", {}, title,
        button("Markdown", () => save(`${name}.md`, "text/markdown", talks.asText(talk))),
        button("JSON", () => save(`${name}.json`, "application/json", talks.asJson(talk))),
        button("Delete", () => {
          talks.remove(talk.id);
          gone(talk.id);
          draw();
          (list.querySelector("button") ?? byId("shelf-close")).focus();
        }));
    }));
  }

  byId("show-talks").onclick = () => {
    draw();
    dialog.showModal();
  };
}
