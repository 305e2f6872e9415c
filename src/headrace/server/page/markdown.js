// Markdown as DOM nodes, while it comes: every line is read once, so an answer of a megabyte takes
// time in proportion to its length. What a model writes is never parsed as HTML. The same text gives
// the same nodes, in whatever pieces it came.

import { CodeBlock } from "./code.js";
import { make } from "./dom.js";
import { inline } from "./inline.js";
import { formula } from "./math.js";

const DEPTH = 12; // Of quotes and lists in each other; what is deeper stays text.
const LONG = 4096; // Characters of a line, and of a piece of a paragraph, that are read at once.
const COLUMNS = 64;

const BLANK = /^[ \t]*$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const UNDERLINE = /^ {0,3}(=+|-+)[ \t]*$/;
const FENCE = /^( {0,3})(?:(`{3,})([^`]*)|(~{3,})(.*))$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:([ \t]+)(.*))?$/;
const QUOTE = /^ {0,3}>[ \t]?/;
const MATH = /^ {0,3}(\$\$|\\\[)(.*)$/;
// A line that has not ended and may yet become anything is not shown.
const UNDECIDED = /^(?:[-=*_+#`~|:$\\> \t]*|[ \t>]*(?:\d{1,9}[.)]?|[-*+] \[[ xX]?))$/;

/** The cells of a row of a table. */
function cells(line) {
  const found = [""];
  const text = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  for (let at = 0; at < text.length; at++) {
    if (text[at] === "\\" && text[at + 1] === "|") found[found.length - 1] += text[++at];
    else if (text[at] === "|") found.push("");
    else found[found.length - 1] += text[at];
  }
  return found.map((cell) => cell.trim());
}

const width = (text) => /^ */.exec(text)[0].length;

export class Markdown {
  constructor(element) {
    this.frames = [{ element, list: null }]; // The element itself, then quotes and items.
    this.leaf = null; // What the next line may continue.
    this.rest = ""; // Of the line that has not ended.
    this.within = false; // The line that comes is too long: its begin has been read.
    this.shown = null; // How to take back the nodes of that line.
  }

  /** Append text; `end`: no more comes. */
  write(text, end = false) {
    this.takeBack();
    const lines = (this.rest + text.replaceAll("\r", "")).split("\n");
    this.rest = lines.pop();
    for (const line of lines) this.line(line, true);
    while (this.rest.length >= LONG) {
      this.line(this.rest.slice(0, LONG), false);
      this.rest = this.rest.slice(LONG);
    }
    if (end) {
      if (this.rest) this.line(this.rest, true);
      this.rest = "";
      this.close();
    } else this.preview();
  }

  /** A line, or a piece of one that is too long. */
  line(text, ended) {
    for (let at = 0; at < text.length || at === 0; at += LONG) {
      const piece = text.slice(at, at + LONG);
      if (this.within) this.more(piece);
      else this.read(piece);
      this.within = true;
    }
    this.within = !ended;
  }

  /** Show the line that has not ended, for as long as nothing else comes. */
  preview() {
    if (this.rest && (this.within || !UNDECIDED.test(this.rest))) {
      this.shown = [];
      this.kept = { frames: this.frames.map((frame) => ({ ...frame })), leaf: this.leaf && { ...this.leaf } };
      if (this.within) this.more(this.rest);
      else this.read(this.rest);
    }
    this.show(true);
  }

  takeBack() {
    if (!this.shown) return;
    for (const undo of this.shown.reverse()) undo();
    this.shown = null;
    Object.assign(this, this.kept);
    this.kept = null;
    if (this.leaf) this.leaf.changed = true;
  }

  append(node, parent = this.frames.at(-1).element) {
    parent.append(node);
    this.shown?.push(() => node.remove());
    return node;
  }

  /** A node in the innermost frame that is no item: a list that was open there ends. */
  add(node) {
    this.close();
    this.frames.at(-1).list = null;
    return this.append(node);
  }

  close() {
    this.show(false);
    // A formula whose end never came is shown as its source.
    if (this.leaf?.kind === "math") this.append(make("p", {}, this.leaf.text));
    this.leaf = null;
  }


  /** Draw the paragraph that grew. */
  show(open) {
    const { leaf } = this;
    if (leaf?.kind !== "text" || !(leaf.changed || (leaf.held && !open))) return;
    leaf.changed = false;
    let { text } = leaf;
    // The head of what becomes a table is shown with its second line.
    if (open && !leaf.later) text = text.replace(/(?:^|\n)[ \t]*\|[^\n]*$/, "");
    leaf.held = text !== leaf.text;
    leaf.element.hidden = !text && !leaf.later;
    leaf.piece.replaceChildren(...inline(text.trimEnd()));
  }

  /** What follows in a line that is too long. */
  more(text) {
    const { leaf } = this;
    if (leaf?.block) this.keep(leaf.block.append(text));
    else if (leaf?.kind === "text") this.grow(text);
    else if (leaf?.kind === "table" && leaf.last) this.append(document.createTextNode(text), leaf.last);
    else if (leaf?.kind === "math") leaf.text += text;
    else if (!BLANK.test(text)) this.paragraph(text);
  }

  keep(undo) {
    this.shown?.push(undo);
  }

  paragraph(text, element = make("p")) {
    const piece = make("span");
    element.append(piece);
    this.add(element);
    this.leaf = { kind: "text", element, piece, text: "", later: false, changed: true };
    this.grow(text);
  }

  /** Append to the paragraph. A long one is drawn in pieces, each of them once. */
  grow(text) {
    const { leaf } = this;
    leaf.text += text;
    leaf.changed = true;
    while (!this.shown && leaf.text.length > 2 * LONG) {
      const space = leaf.text.slice(LONG, 2 * LONG).search(/\s/);
      const cut = space < 0 ? 2 * LONG : LONG + space + 1;
      leaf.piece.replaceChildren(...inline(leaf.text.slice(0, cut)));
      leaf.piece = make("span");
      leaf.element.append(leaf.piece);
      leaf.element.hidden = false;
      leaf.text = leaf.text.slice(cut);
      leaf.later = true;
    }
  }

  /** A line from its begin. */
  read(line) {
    let text = line.replace(/^[ \t]+/, (space) => space.replaceAll("\t", "    "));
    let level = 1;
    for (; level < this.frames.length; level++) {
      const frame = this.frames[level];
      if (frame.quote) {
        const mark = QUOTE.exec(text);
        if (!mark) break;
        text = text.slice(mark[0].length);
      } else if (BLANK.test(text)) {
        if (!frame.element.hasChildNodes()) break; // An item without content ends at once.
      } else if (width(text) >= frame.indent) text = text.slice(frame.indent);
      else break;
    }
    const whole = level === this.frames.length;
    if (this.leaf && whole && this.goesOn(text)) return;
    if (BLANK.test(text)) {
      // A blank line ends a quote, and the paragraphs in items; the items go on.
      while (this.frames.length > level && this.frames.slice(level).some((frame) => frame.quote)) this.pop();
      if (!whole || ["text", "table", "math"].includes(this.leaf?.kind)) this.close();
      return;
    }
    if (!whole && this.leaf?.kind === "text" && !this.begins(text, true)) return this.grow(`\n${text.trimStart()}`);
    while (this.frames.length > level) this.pop();
    this.open(text);
  }

  pop() {
    this.close();
    this.frames.pop();
  }

  /** Does this line begin something that may end a paragraph? */
  begins(text) {
    if (HEADING.test(text) || RULE.test(text) || FENCE.test(text) || QUOTE.test(text) || MATH.test(text)) return true;
    const item = ITEM.exec(text);
    return Boolean(item && item[4]);
  }

  /** The line as one more of the open leaf; false where it is not. */
  goesOn(text) {
    const { leaf } = this;
    if (leaf.kind === "fence") {
      const end = /^ {0,3}(`{3,}|~{3,})[ \t]*$/.exec(text);
      if (end && end[1][0] === leaf.mark[0] && end[1].length >= leaf.mark.length) {
        this.leaf = null;
      } else {
        this.keep(leaf.block.append((leaf.fresh ? "" : "\n") + text.slice(Math.min(width(text), leaf.indent))));
        leaf.fresh = false;
      }
      return true;
    }
    if (leaf.kind === "math") return this.inMath(text);
    if (leaf.kind === "code") {
      if (BLANK.test(text)) {
        leaf.blanks++;
        return true;
      }
      if (width(text) < 4) return false;
      for (; leaf.blanks > 0; leaf.blanks--) this.keep(leaf.block.append("\n"));
      this.keep(leaf.block.append(`\n${text.slice(4)}`));
      return true;
    }
    if (BLANK.test(text)) return false;
    if (leaf.kind === "table") {
      if (this.begins(text) || !text.includes("|")) return false;
      this.row(text);
      return true;
    }
    const under = UNDERLINE.exec(text);
    if (under && !leaf.later) {
      leaf.element.replaceWith(make("h4", {}, ...inline(leaf.text.trim())));
      this.leaf = null;
      return true;
    }
    if (text.includes("|") && this.table(text)) return true;
    if (this.begins(text)) return false;
    this.grow(`\n${text.trimStart()}`);
    return true;
  }

  /** The paragraph's last line becomes the head of a table, if it has as many cells. */
  table(delimiters) {
    const { leaf } = this;
    const marks = cells(delimiters);
    if (!marks.every((mark) => /^:?-+:?$/.test(mark))) return false;
    const begin = leaf.text.lastIndexOf("\n") + 1;
    const head = cells(leaf.text.slice(begin));
    if (!leaf.text.slice(begin).includes("|") || head.length !== marks.length || head.length > COLUMNS) return false;
    const before = leaf.text.slice(0, begin).trim();
    if (before || leaf.later) {
      leaf.text = before;
      leaf.changed = true;
      this.close();
    } else leaf.element.remove();
    this.leaf = null;
    const aligns = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "middle" : "n") : null));
    const body = make("tbody");
    const row = make("tr", {}, ...head.map((cell, place) => make("th", { scope: "col", class: aligns[place] }, ...inline(cell))));
    this.add(make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" },
      make("table", {}, make("thead", {}, row), body)));
    this.leaf = { kind: "table", body, aligns, last: null };
    return true;
  }

  row(text) {
    const { leaf } = this;
    const found = cells(text).slice(0, leaf.aligns.length);
    const row = make("tr", {}, ...found.map((cell, place) => make("td", { class: leaf.aligns[place] }, ...inline(cell))));
    const missing = leaf.aligns.length - found.length;
    if (missing) row.append(make("td", { colspan: missing > 1 ? missing : null }));
    leaf.last = this.append(row, leaf.body).lastChild;
  }

  inMath(text) {
    const { leaf } = this;
    if (BLANK.test(text)) return BLANK.test(leaf.text.slice(2));
    const end = text.indexOf(leaf.end);
    if (end < 0) {
      leaf.text += `\n${text}`;
      return true;
    }
    const rest = text.slice(end + 2).trim();
    this.formula(`${leaf.text.slice(2)}\n${text.slice(0, end)}`);
    if (rest) this.paragraph(rest);
    return true;
  }

  formula(source) {
    if (this.leaf?.kind === "math") this.leaf = null;
    this.add(make("div", { class: "formula", tabindex: "0", role: "group", "aria-label": "Formula" }, formula(source, true)));
  }

  /** What a line begins in the innermost frame. */
  open(text) {
    for (;;) {
      const deep = this.frames.length > DEPTH;
      const quote = deep ? null : QUOTE.exec(text);
      const item = deep || RULE.test(text) ? null : ITEM.exec(text);
      if (width(text) >= 4 || !(quote || item)) break;
      if (quote) {
        const element = this.add(make("blockquote"));
        this.frames.push({ element, quote: true, list: null });
        text = text.slice(quote[0].length);
      } else {
        this.item(item);
        text = item[3] && width(item[3]) > 4 ? " ".repeat(width(item[3]) - 1) + (item[4] ?? "") : item[4] ?? "";
        const task = /^\[([ xX])\][ \t]+/.exec(text);
        if (task) text = text.slice(task[0].length);
      }
      if (BLANK.test(text)) return;
    }
    this.block(text);
  }

  item([all, before, mark, space, content]) {
    const ordered = mark.length > 1;
    const kind = ordered ? mark.at(-1) : mark;
    this.close();
    const frame = this.frames.at(-1);
    if (frame.list?.kind !== kind) {
      const element = this.append(make(ordered ? "ol" : "ul", ordered ? { start: parseInt(mark, 10) } : {}));
      frame.list = { kind, element };
    }
    const element = make("li");
    const task = /^\[([ xX])\][ \t]+\S/.exec(content ?? "");
    if (task) {
      element.className = "task";
      const done = task[1] !== " ";
      element.append(make("span", { class: "tick", role: "img", "aria-label": done ? "done" : "to do" }, done ? "☑" : "☐"), " ");
    }
    this.append(element, frame.list.element);
    const gap = space && content && width(space) <= 4 ? width(space.replaceAll("\t", "    ")) : 1;
    this.frames.push({ element, indent: before.length + mark.length + gap, list: null });
  }

  block(text) {
    if (width(text) >= 4) {
      const block = new CodeBlock();
      this.add(block.element);
      this.leaf = { kind: "code", block, blanks: 0 };
      this.keep(block.append(text.slice(4)));
      return;
    }
    const heading = HEADING.exec(text);
    if (heading) {
      const words = (heading[2] ?? "").trim();
      let end = words.length;
      while (words[end - 1] === "#") end--;
      const bare = !end || words[end - 1].trim() ? words : words.slice(0, end).trim();
      this.add(make("h4", { class: heading[1].length > 2 ? "minor" : null }, ...inline(end ? bare : "")));
      return;
    }
    if (RULE.test(text)) {
      this.add(make("hr"));
      return;
    }
    const fence = FENCE.exec(text);
    if (fence) {
      const block = new CodeBlock(/^[\w+#.-]{1,30}/.exec((fence[3] ?? fence[5]).trim())?.[0]);
      this.add(block.element);
      this.leaf = { kind: "fence", block, mark: fence[2] ?? fence[4], indent: fence[1].length, fresh: true };
      return;
    }
    const math = MATH.exec(text);
    if (math) {
      const end = math[1] === "$$" ? "$$" : "\\]";
      const at = math[2].indexOf(end);
      if (at < 0) {
        this.close();
        this.leaf = { kind: "math", end, text: math[1] + math[2] };
      } else if (BLANK.test(math[2].slice(at + 2))) this.formula(math[2].slice(0, at));
      else this.paragraph(text.trimStart());
      return;
    }
    this.paragraph(text.trimStart());
  }
}

/** Draw a whole text into an element. */
export const render = (element, text) => new Markdown(element).write(text, true);
