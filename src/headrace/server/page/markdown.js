// A little Markdown as DOM nodes: paragraphs, lists, headings, code, emphasis. What a model writes
// is never parsed as HTML.

import { make } from "./dom.js";

const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|(?<![\w*])\*([^*\s][^*\n]*)\*(?!\w)/g;

function inline(parent, text) {
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    parent.append(text.slice(end, found.index));
    const [all, code, strong, em] = found;
    parent.append(make(code ? "code" : strong ? "strong" : "em", {}, code ?? strong ?? em));
    end = found.index + all.length;
  }
  parent.append(text.slice(end));
  return parent;
}

export function codeBlock(language, text) {
  const copy = make("button", { type: "button", class: "quiet" }, "Copy");
  copy.onclick = async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  };
  const pre = make("pre", { tabindex: "0" }, make("code", {}, text));
  return make("div", { class: "block-code" }, make("div", {}, language || "code", copy), pre);
}

/** Nodes for a text, which may be unfinished. */
export function render(text) {
  const nodes = [];
  const lines = text.split("\n");
  let paragraph = [];
  let list = null;
  const flush = () => {
    if (paragraph.length) nodes.push(inline(make("p"), paragraph.join("\n").trim()));
    paragraph = [];
    list = null;
  };
  for (let at = 0; at < lines.length; at++) {
    const line = lines[at];
    const fence = /^\s*(```+|~~~+)\s*([\w+#.-]*)/.exec(line);
    if (fence) {
      flush();
      const body = [];
      while (++at < lines.length && !lines[at].trim().startsWith(fence[1])) body.push(lines[at]);
      nodes.push(codeBlock(fence[2], body.join("\n")));
      continue;
    }
    const heading = /^#{1,6}\s+(.*)/.exec(line);
    const item = /^\s*(?:([-*+])|(\d+)[.)])\s+(.*)/.exec(line);
    if (heading) {
      flush();
      nodes.push(inline(make("h4"), heading[1]));
    } else if (item) {
      const kind = item[1] ? "ul" : "ol";
      if (list?.localName !== kind) {
        flush();
        list = make(kind, kind === "ol" ? { start: item[2] } : {});
        nodes.push(list);
      }
      list.append(inline(make("li"), item[3]));
    } else if (!line.trim()) {
      if (paragraph.length) flush();
    } else if (list && /^\s/.test(line)) {
      inline(list.lastChild, "\n" + line.trim());
    } else {
      if (list) flush();
      paragraph.push(line);
    }
  }
  flush();
  return nodes;
}
