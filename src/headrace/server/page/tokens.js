// The token view: each token coloured by how sure the model was, with its rivals on hover, touch
// or arrow keys.

import { announce, make, percent } from "./dom.js";

const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
const chance = (logprob) => Math.exp(Math.min(0, logprob));

/** An element over `logprobs.content` entries; `add` appends further ones. */
export class TokenView {
  constructor() {
    this.entries = [];
    this.at = -1;
    this.pop = make("div", { class: "pop", hidden: "" });
    this.element = make("div", {
      class: "tokens", tabindex: "0", role: "group",
      "aria-label": "Tokens, coloured by probability. Arrow keys move from one to the next.",
    }, this.pop);
    this.element.onpointerover = this.element.onclick = (event) => {
      const place = event.target.dataset?.place;
      if (place !== undefined) this.show(Number(place));
    };
    // A finger leaves as it lifts; what it touched stays until the focus goes.
    this.element.onpointerleave = (event) => event.pointerType === "mouse" && this.hide();
    this.element.onblur = () => this.hide();
    this.element.onkeydown = (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") this.hide();
      if (!step || !this.entries.length) return;
      event.preventDefault();
      this.show(Math.min(this.entries.length - 1, Math.max(0, this.at + step)), true);
    };
  }

  add(entries) {
    for (const entry of entries) {
      const span = make("span", { class: "tok", "data-place": this.entries.length }, entry.token);
      span.style.setProperty("--p", chance(entry.logprob).toFixed(3));
      this.entries.push({ ...entry, span });
      this.element.insertBefore(span, this.pop);
    }
  }

  hide() {
    this.entries[this.at]?.span.classList.remove("at");
    this.pop.hidden = true;
  }

  show(place, aloud = false) {
    this.hide();
    this.at = place;
    const { span, token, logprob, top_logprobs: top = [] } = this.entries[place];
    span.classList.add("at");
    const rivals = top.some((other) => other.token === token) ? top : [{ token, logprob }, ...top];
    this.pop.replaceChildren(
      ...rivals.map((other) => {
        const row = make("div", { class: other.token === token ? "chosen" : "" },
          make("span", { class: "t" }, visible(other.token)),
          make("span", { class: "n" }, percent(chance(other.logprob))));
        row.style.setProperty("--p", chance(other.logprob).toFixed(3));
        return row;
      }),
    );
    this.pop.hidden = false;
    const box = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const frame = this.element.getBoundingClientRect();
    const left = Math.min(box.left - frame.left, frame.width - this.pop.offsetWidth);
    this.pop.style.left = `${Math.max(0, left)}px`;
    this.pop.style.top = `${box.bottom - frame.top + 6}px`;
    if (aloud) {
      const others = rivals.filter((other) => other.token !== token).slice(0, 2);
      announce(`${visible(token)}, ${percent(chance(logprob))}; then ${others
        .map((other) => `${visible(other.token)} ${percent(chance(other.logprob))}`).join(", ")}`);
    }
  }
}
