// A block of code with its language and a button that copies it; text may still be appended.

import { make } from "./dom.js";

const LINES = 200; // Of one element: the browser lays out again only the one that grows.

export const copied = async (button, text, label = "Copy") => {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = label), 1500);
};

export class CodeBlock {
  constructor(language = "") {
    const copy = make("button", { type: "button", class: "quiet" }, "Copy");
    copy.onclick = () => copied(copy, this.code.textContent);
    this.code = make("code");
    this.lines = 0;
    this.element = make("div", { class: "block-code" },
      make("div", {}, make("span", {}, language || "code"), copy),
      make("pre", { tabindex: "0" }, this.code));
  }

  /** Append text; every line after the first begins with its line break. Returns how to undo it. */
  append(text) {
    const undo = [];
    if (!this.tail || (this.lines >= LINES && text.startsWith("\n"))) {
      const [before, { lines }] = [this.tail, this];
      if (before) {
        before.appendData("\n");
        text = text.slice(1);
      }
      this.tail = document.createTextNode("");
      this.lines = 0;
      const part = make("span", {}, this.tail);
      this.code.append(part);
      undo.push(() => {
        part.remove();
        before?.deleteData(before.length - 1, 1);
        Object.assign(this, { tail: before, lines });
      });
    }
    const [node, at, { lines }] = [this.tail, this.tail.length, this];
    node.appendData(text);
    if (text.includes("\n")) this.lines++;
    undo.push(() => {
      node.deleteData(at, text.length);
      this.lines = lines;
    });
    return () => undo.reverse().forEach((back) => back());
  }
}
