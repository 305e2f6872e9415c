// Text within a block as DOM nodes: emphasis, code, links, formulas. Nothing is parsed as HTML, and
// no address is opened or loaded by itself.

import { make } from "./dom.js";
import { formula } from "./math.js";

const DEPTH = 12; // Of emphasis in emphasis; what is deeper stays text.
const SAFE = new Set(["http:", "https:", "mailto:"]);
const PUNCTUATION = /[\p{P}\p{S}]/u;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const TAGS = { 1: "em", 2: "strong" };

/** The address if a link may open it; null otherwise. */
export function safe(address) {
  try {
    const url = new URL(address);
    return SAFE.has(url.protocol) ? url : null;
  } catch {
    return null;
  }
}

const whole = (address) => (/^www\./i.test(address) ? `https:${"//"}${address}` : address);

function link(address, children, label) {
  const url = safe(address);
  if (!url) return [...children, ` (${address.length > 80 ? `${address.slice(0, 80)}…` : address})`];
  const made = make("a", { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
  // A label that names one site and leads to another is shown with the other.
  const named = /^\s*(?:https?:\/\/|www\.)\S+/i.test(label) ? safe(whole(label.trim())) : null;
  return named && named.host !== url.host ? [made, ` (${url.host})`] : [made];
}

/** Where the runs of backticks are, by length: each end of a code span is found once. */
function ticks(text) {
  const places = new Map();
  for (const run of text.matchAll(/`+/g)) {
    const all = places.get(run[0].length) ?? [];
    all.push(run.index);
    places.set(run[0].length, all);
  }
  return (length, after) => {
    const all = places.get(length) ?? [];
    while (all.length && all[0] < after) all.shift();
    return all[0] ?? -1;
  };
}

/** The place of `mark` from `from` on; a search that failed is not made again. */
function finder(text) {
  const none = new Set();
  return (mark, from) => {
    if (none.has(mark)) return -1;
    const at = text.indexOf(mark, from);
    if (at < 0) none.add(mark);
    return at;
  };
}

class Inline {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.parts = []; // {nodes, depth}, {mark, count, original, opens, closes} or {bracket}.
    this.brackets = []; // Places of the brackets that may still begin a link.
    this.plain = "";
    this.tick = ticks(text);
    this.find = finder(text);
  }

  flush() {
    if (this.plain) this.parts.push({ nodes: [this.plain], depth: 0 });
    this.plain = "";
  }

  put(nodes, depth = 0) {
    this.flush();
    this.parts.push({ nodes, depth });
  }

  parse() {
    const special = /[\\`*_~[\]!<&$\nhw]/g;
    while (this.at < this.text.length) {
      special.lastIndex = this.at;
      const found = special.exec(this.text);
      const end = found ? found.index : this.text.length;
      this.plain += this.text.slice(this.at, end);
      this.at = end;
      if (found && !this.step(found[0])) this.plain += this.text[this.at++];
    }
    this.flush();
    return this.emphasis(0).flatMap((part) => part.nodes);
  }

  /** One special character; false where it is only itself. */
  step(character) {
    switch (character) {
      case "\\": return this.escape();
      case "`": return this.code();
      case "*": case "_": case "~": return this.mark(character);
      case "!":
        if (this.text[this.at + 1] !== "[") return false;
        return this.opened("![");
      case "[": return this.opened("[");
      case "]": return this.bracket();
      case "<": return this.angle();
      case "&": return this.entity();
      case "$": return this.dollars();
      case "\n":
        this.plain = this.plain.trimEnd();
        this.put([make("br"), "\n"]);
        this.at++;
        while (this.text[this.at] === " ") this.at++;
        return true;
      default: return this.address();
    }
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === "(" || next === "[") {
      const end = this.find(next === "(" ? "\\)" : "\\]", this.at + 2);
      if (end > 0) {
        this.put([formula(this.text.slice(this.at + 2, end), next === "[")]);
        this.at = end + 2;
        return true;
      }
    }
    if (next === "\n") {
      this.at++;
      return true;
    }
    if (!next || !/[!-/:-@[-`{-~]/.test(next)) return false;
    this.plain += next;
    this.at += 2;
    return true;
  }

  code() {
    let length = 1;
    while (this.text[this.at + length] === "`") length++;
    const end = this.tick(length, this.at + length);
    if (end < 0) {
      this.plain += "`".repeat(length);
      this.at += length;
      return true;
    }
    let body = this.text.slice(this.at + length, end).replaceAll("\n", " ");
    if (/^ .* $/.test(body) && body.trim()) body = body.slice(1, -1);
    this.put([make("code", {}, body)]);
    this.at = end + length;
    return true;
  }

  mark(character) {
    let count = 1;
    while (this.text[this.at + count] === character) count++;
    const before = this.at ? this.text[this.at - 1] : " ";
    const after = this.text[this.at + count] ?? " ";
    const [spaceBefore, spaceAfter] = [!before.trim(), !after.trim()];
    const [pointBefore, pointAfter] = [PUNCTUATION.test(before), PUNCTUATION.test(after)];
    const left = !spaceAfter && (!pointAfter || spaceBefore || pointBefore);
    const right = !spaceBefore && (!pointBefore || spaceAfter || pointAfter);
    const word = character === "_";
    const opens = left && (!word || !right || pointBefore);
    const closes = right && (!word || !left || pointAfter);
    this.flush();
    const usable = (opens || closes) && (character !== "~" || count === 2);
    if (usable) this.parts.push({ mark: character, count, original: count, opens, closes });
    else this.parts.push({ nodes: [character.repeat(count)], depth: 0 });
    this.at += count;
    return true;
  }

  /** Pair the marks from place `from` on; returns the parts, all with nodes. */
  emphasis(from) {
    const parts = this.parts.splice(from);
    const bottom = new Map(); // Below this place no opener of a kind is left.
    for (let at = 0; at < parts.length; at++) {
      const closer = parts[at];
      if (!closer.closes || !closer.count) continue;
      const kind = `${closer.mark}${closer.opens}${closer.original % 3}`;
      let open = at - 1;
      const lowest = bottom.get(kind) ?? 0;
      for (; open >= lowest; open--) {
        const opener = parts[open];
        if (opener.mark !== closer.mark || !opener.opens || !opener.count) continue;
        const odd = (opener.closes || closer.opens) && (opener.original + closer.original) % 3 === 0 &&
          (opener.original % 3 || closer.original % 3);
        if (closer.mark === "~" || !odd) break;
      }
      if (open < lowest) {
        bottom.set(kind, at);
        continue;
      }
      const opener = parts[open];
      const inner = parts.splice(open + 1, at - open - 1);
      const depth = 1 + inner.reduce((most, part) => Math.max(most, part.depth ?? 0), 0);
      const used = Math.min(2, opener.count, closer.count);
      const nodes = inner.flatMap((part) => part.nodes ?? [this.source(part)]);
      const tag = closer.mark === "~" ? "del" : TAGS[used];
      const ends = closer.mark.repeat(used);
      const whole = depth > DEPTH ? { nodes: [ends, ...nodes, ends], depth: depth - 1 } : { nodes: [make(tag, {}, ...nodes)], depth };
      opener.count -= used;
      closer.count -= used;
      parts.splice(open + 1, 0, whole);
      at = open + 2;
      for (const [name, place] of bottom) if (place > open) bottom.set(name, open + 1);
      // What is left of the closer may close another opener, or open.
      if (closer.count) at--;
      if (!opener.count) {
        parts.splice(open, 1);
        at--;
      }
    }
    return parts.map((part) => (part.nodes ? part : { nodes: [this.source(part)], depth: 0 }));
  }

  source(part) {
    return part.bracket ?? part.mark.repeat(part.count);
  }

  opened(bracket) {
    this.flush();
    this.brackets.push(this.parts.length);
    this.parts.push({ bracket });
    this.at += bracket.length;
    return true;
  }

  /** A closing bracket: a link, a picture (as a link), or text. */
  bracket() {
    this.flush();
    const open = this.brackets.pop();
    const target = open === undefined ? null : this.target(this.at + 1);
    if (!target) return false;
    const image = this.parts[open].bracket === "![";
    const inner = this.emphasis(open + 1);
    this.parts.pop();
    const nodes = inner.flatMap((part) => part.nodes);
    const label = nodes.map((node) => node.textContent ?? node).join("");
    const depth = inner.reduce((most, part) => Math.max(most, part.depth), 0) + 1;
    this.parts.push({ nodes: link(target.address, nodes.length ? nodes : [image ? "picture" : target.address], label), depth });
    // A link holds no link: a bracket that was opened before it is text.
    if (!image) this.brackets = this.brackets.filter((place) => this.parts[place].bracket === "![");
    this.at = target.end;
    return true;
  }

  /** {address, end} of `(address "title")` at a place. */
  target(from) {
    if (this.text[from] !== "(") return null;
    let at = from + 1;
    while (/[ \n]/.test(this.text[at] ?? "")) at++;
    let address = "";
    if (this.text[at] === "<") {
      const end = this.text.indexOf(">", at);
      if (end < 0 || end - at > 2000) return null;
      address = this.text.slice(at + 1, end);
      at = end + 1;
    } else {
      const begin = at;
      for (let open = 0; at < this.text.length && at - begin < 2000; at++) {
        const character = this.text[at];
        if (character === " " || character === "\n") break;
        if (character === "(") open++;
        if (character === ")" && open-- === 0) break;
      }
      address = this.text.slice(begin, at);
    }
    const title = /^\s+(?:"[^"\n]{0,500}"|'[^'\n]{0,500}')/.exec(this.text.slice(at, at + 510));
    if (title) at += title[0].length;
    while (/[ \n]/.test(this.text[at] ?? "")) at++;
    return this.text[at] === ")" && address ? { address, end: at + 1 } : null;
  }

  angle() {
    const found = /^<(?:(br)\s*\/?|((?:https?:\/\/|mailto:)[^\s<>]{1,2000}))>/i.exec(this.text.slice(this.at, this.at + 2010));
    if (!found) return false;
    this.put(found[1] ? [make("br")] : link(found[2], [found[2]], found[2]));
    this.at += found[0].length;
    return true;
  }

  entity() {
    const found = /^&(?:(amp|lt|gt|quot|apos|nbsp)|#(\d{1,7})|#x([0-9a-f]{1,6}));/i.exec(this.text.slice(this.at, this.at + 12));
    if (!found) return false;
    const code = found[2] ? Number(found[2]) : parseInt(found[3], 16);
    const known = found[1] ? ENTITIES[found[1].toLowerCase()] : code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : "\ufffd";
    this.plain += known;
    this.at += found[0].length;
    return true;
  }

  dollars() {
    const double = this.text[this.at + 1] === "$";
    if (double) {
      const end = this.find("$$", this.at + 2);
      if (end < 0) return false;
      this.put([formula(this.text.slice(this.at + 2, end), true)]);
      this.at = end + 2;
      return true;
    }
    // Prices are no formulas: no space inside the dollars, no digit after them.
    if (!/\S/.test(this.text[this.at + 1] ?? " ") || /[\w$]/.test(this.text[this.at - 1] ?? " ")) return false;
    let end = this.at;
    do end = this.text.indexOf("$", end + 1);
    while (end > 0 && this.text[end - 1] === "\\" && end - this.at < 1000);
    if (end < 0 || end - this.at > 1000 || !/\S/.test(this.text[end - 1]) || /\d/.test(this.text[end + 1] ?? "")) return false;
    const body = this.text.slice(this.at + 1, end);
    if (body.includes("\n\n")) return false;
    this.put([formula(body)]);
    this.at = end + 1;
    return true;
  }

  /** A bare address. */
  address() {
    if (!/^(?:http|www\.)/.test(this.text.slice(this.at, this.at + 4)) || /[\w@/]/.test(this.text[this.at - 1] ?? "")) return false;
    const found = /^(?:https?:\/\/|www\.)[^\s<>`"|\\]{1,2000}/.exec(this.text.slice(this.at, this.at + 2010));
    if (!found) return false;
    let address = found[0];
    const count = (character) => address.split(character).length - 1;
    for (;;) {
      const last = address.at(-1);
      if (last === ")" ? count(")") > count("(") : ".,;:!?'*_~]".includes(last)) address = address.slice(0, -1);
      else break;
    }
    const full = whole(address);
    if (!/^https?:\/\/[^/.]|^https?:\/\/\[/.test(full) || !safe(full)) return false;
    this.put(link(full, [address], address));
    this.at += address.length;
    return true;
  }
}

/** Nodes and strings of a piece of text. */
export const inline = (text) => new Inline(text).parse();
