// The conversation: what was said, what is being said, and how fast.

import { Refused, call, events } from "./api.js";
import { CodeBlock, copied } from "./code.js";
import { announce, byId, figures, make, seconds } from "./dom.js";
import * as files from "./files.js";
import { Markdown } from "./markdown.js";
import { fileName, save } from "./save.js";
import * as settings from "./settings.js";
import * as shelf from "./shelf.js";
import * as talks from "./talks.js";
import { TokenView } from "./tokens.js";

const turns = byId("turns");
const scroller = byId("scroller");
const message = byId("message");
const send = byId("send");

const history = []; // {message, turn}: what is sent again, and where it is seen.
let running = null; // AbortController of the answer that comes.
let model = "";
let id = talks.fresh(); // Of the conversation, under which this browser keeps it.

export function setModel(name) {
  model = name;
}

const messages = () => {
  const system = settings.system();
  const said = history.map((entry) => entry.message);
  return system ? [{ role: "system", content: system }, ...said] : said;
};

let following = true;
let lastTop = 0;
// What grows by more than that at once, as a picture that loads, is no one who scrolled up.
scroller.addEventListener("scroll", () => {
  const atEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 120;
  if (atEnd || scroller.scrollTop < lastTop) following = atEnd;
  lastTop = scroller.scrollTop;
});
turns.addEventListener("load", follow, true);

function follow() {
  if (following) scroller.scrollTop = scroller.scrollHeight;
}

function toEnd() {
  following = true;
  follow();
}

function addTurn(role, label) {
  byId("empty").hidden = true;
  const body = make("div", { class: "body" });
  const turn = make("li", { class: `turn ${role}` }, make("h3", {}, label), body);
  turns.append(turn);
  return { turn, body };
}

function say(role, content, more = {}) {
  const { turn, body } = addTurn("user", role === "tool" ? "Tool" : "You");
  const { text, files: attached } = files.split(content);
  body.append(...attached.map((file) => (file.part.type === "text"
    ? make("details", { class: "file" }, make("summary", {}, `${file.name} · ${files.size(new Blob([file.text]).size)}`), make("pre", { tabindex: "0" }, file.text))
    : make("p", { class: "file" }, files.shown(file) ?? file.name))), text);
  const entry = { message: { role, content, ...more }, turn };
  history.push(entry);
  if (role === "user") {
    const edit = make("button", { type: "button", class: "quiet", "aria-label": `Edit: ${text.slice(0, 80)}` }, "Edit");
    edit.onclick = () => branch(entry);
    turn.append(edit);
  }
  kept();
  toEnd();
}

/** One answer: its text, reasoning, calls, tokens, times. */
class Answer {
  constructor(structured) {
    Object.assign(this, addTurn("assistant", model || "Model"));
    this.turn.classList.add("busy");
    this.structured = structured;
    this.text = "";
    this.thought = "";
    this.calls = [];
    this.begin = performance.now();
    this.first = 0;
    this.last = 0;
    this.count = 0;
    this.usage = null;
    this.finish = null;
    this.view = null;
    this.shown = null;
    this.foot = make("div", { class: "foot" });
    this.turn.append(this.foot);
    this.said = make("div", { class: "said" });
    this.drawing = structured ? new CodeBlock("json") : new Markdown(this.said);
    if (structured) this.said.append(this.drawing.element);
    this.fresh = { text: "", thought: "" }; // What came and is not drawn yet.
    this.frame = 0; // The drawing that is asked for.
    this.rests = 0; // Until then no drawing begins.
  }

  take(chunk) {
    if (chunk.error) throw new Refused(chunk.error.message, 500, 0);
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices ?? []) {
      const { delta } = choice;
      const content = choice.logprobs?.content;
      if (delta.content || delta.reasoning_content || delta.tool_calls || content?.length) {
        this.last = performance.now();
        this.first ||= this.last;
        this.count += content?.length ?? 1;
      }
      this.add(delta.content ?? "", delta.reasoning_content ?? "");
      for (const { index, id, function: called } of delta.tool_calls ?? []) {
        const call = (this.calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } });
        call.function.name += called?.name ?? "";
        call.function.arguments += called?.arguments ?? "";
      }
      if (content?.length) {
        this.view ??= new TokenView();
        this.view.add(content);
      }
      this.finish = choice.finish_reason ?? this.finish;
    }
    // At most one drawing per frame, however fast the tokens come; where the browser takes long to
    // lay out what is there, fewer.
    this.frame ||= requestAnimationFrame((now) => this.due(now));
  }

  add(text, thought = "") {
    this.text += text;
    this.fresh.text += text;
    this.thought += thought;
    this.fresh.thought += thought;
  }

  due(now) {
    if (now < this.rests) {
      this.frame = requestAnimationFrame((later) => this.due(later));
      return;
    }
    this.frame = 0;
    const begin = performance.now();
    this.draw();
    const end = performance.now();
    this.rests = end + Math.min(1000, 3 * (end - begin));
  }

  /** Append what came since the last drawing; `whole`: no more comes. */
  write(whole) {
    if (this.fresh.text && this.structured) this.drawing.append(this.fresh.text);
    else if (!this.structured && !this.whole) this.drawing.write(this.fresh.text, whole);
    this.fresh.text = "";
    this.whole = whole;
  }

  drawThought() {
    if (!this.thought) return;
    if (!this.reasoning) {
      this.thinking = document.createTextNode("");
      this.reasoning = make("details", { class: "reasoning", open: "" }, make("summary", {}, "Reasoning"), this.thinking);
    }
    this.thinking.appendData(this.fresh.thought);
    this.fresh.thought = "";
    // It closes once, as the answer begins; a reader may open it again.
    if (this.text && !this.answered) this.reasoning.open = !(this.answered = true);
  }

  draw() {
    this.drawThought();
    const shows = this.shown === "tokens" ? this.view.element : this.text ? this.said : null;
    if (shows === this.said) this.write(!this.turn.classList.contains("busy"));
    const nodes = [this.reasoning, shows, ...this.calls.map((call) => this.card(call))].filter(Boolean);
    if (this.calls.length || nodes.some((node, place) => this.body.childNodes[place] !== node) ||
        this.body.childNodes.length !== nodes.length) {
      this.body.replaceChildren(...nodes);
    }
    this.drawFoot();
    follow();
  }

  card(call) {
    const card = make("div", { class: "call" },
      make("strong", {}, call.function.name), make("pre", {}, call.function.arguments));
    if (!running && !history.some((entry) => entry.message.tool_call_id === call.id)) {
      const input = make("input", { name: "result", placeholder: "What the function returns", "aria-label": `Result of ${call.function.name}` });
      const form = make("form", {}, input, make("button", { class: "quiet" }, "Send result"));
      form.onsubmit = (event) => {
        event.preventDefault();
        say("tool", input.value, { tool_call_id: call.id });
        form.remove();
        const open = this.calls.some((other) => !history.some((entry) => entry.message.tool_call_id === other.id));
        if (!open) answer();
      };
      card.append(form);
    }
    return card;
  }

  /** Tokens per second and the like; figures that are not there yet are left out. */
  numbers() {
    const tokens = this.usage?.completion_tokens ?? this.count;
    const parts = [];
    if (this.first) parts.push(["First token", seconds((this.first - this.begin) / 1000)]);
    const span = (this.last - this.first) / 1000;
    if (tokens > 1 && span > 0) {
      parts.push(["Between tokens", seconds(span / (tokens - 1))]);
      parts.push(["Speed", `${figures((tokens - 1) / span)} tokens/s`]);
    }
    if (tokens) parts.push(["Tokens", String(tokens)]);
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      parts.push(["Prompt", `${this.usage.prompt_tokens}${cached ? ` (${cached} cached)` : ""}`]);
    }
    return parts;
  }

  drawFoot(problem) {
    const nodes = this.numbers().map(([name, value]) => make("span", {}, `${name} `, make("b", {}, value)));
    if (!running && this.structured && this.text) {
      let valid = true;
      try { JSON.parse(this.text); } catch { valid = false; }
      nodes.push(make("span", { class: valid ? "badge" : "badge no" }, valid ? "valid JSON" : "not complete JSON"));
    }
    if (this.finish === "length") nodes.push(make("span", {}, "cut at the token limit"));
    // The next question and its answer draw this foot once more: the problem is kept for them.
    this.problem = problem ?? this.problem;
    if (this.problem) nodes.push(make("span", { class: this.problem === "stopped" ? "" : "failed" }, this.problem));
    // The row is there while another answer comes, unseen: nothing above that one may move.
    if (!running || !this.turn.classList.contains("busy")) nodes.push(this.acts());
    this.foot.replaceChildren(...nodes);
  }

  acts() {
    const acts = make("span", { class: running ? "acts waits" : "acts" });
    const button = (label, act, attributes = {}) => {
      const made = make("button", { type: "button", class: "quiet", ...attributes }, label);
      made.onclick = () => act(made);
      acts.append(made);
    };
    if (this.view) {
      button("Tokens", () => {
        this.shown = this.shown === "tokens" ? null : "tokens";
        this.draw();
        // The foot was drawn again: the button that was pressed is a new one.
        this.foot.querySelector("[aria-pressed]").focus();
      }, { "aria-pressed": String(this.shown === "tokens") });
    }
    if (this.text) {
      button("Copy", (made) => copied(made, this.text), { "aria-label": "Copy the answer" });
    }
    // Unseen where it would not do, but there: a row that wraps must not become a shorter one.
    const last = turns.lastElementChild === this.turn;
    button("Again", () => again(), last ? {} : { class: "quiet waits" });
    return acts;
  }

  end(problem) {
    this.turn.classList.remove("busy");
    const made = { role: "assistant", content: this.text || null };
    if (this.calls.length) made.tool_calls = this.calls;
    if (this.text || this.calls.length) history.push({ message: made, turn: this.turn, answer: this });
    if (this.view && !this.structured && !this.calls.length) this.shown = "tokens";
    kept();
    // A drawing later than this one would take from the form of a call what was typed into it.
    cancelAnimationFrame(this.frame);
    this.draw();
    this.drawFoot(problem);
    const spoken = problem ?? "Answer complete";
    announce(`${spoken}. ${this.usage?.completion_tokens ?? this.count} tokens. ${this.text.slice(0, 400)}`);
  }
}

function kept() {
  if (!history.length) return;
  talks.keep(id, history.map((entry) => entry.message));
  talks.remember(id);
}

function clear() {
  running?.abort();
  history.length = 0;
  turns.replaceChildren();
  byId("empty").hidden = false;
  id = talks.fresh();
  talks.remember(id);
}

/** Show one that is kept. */
function open(talk) {
  clear();
  id = talk.id;
  for (const message of talk.messages) {
    if (message.role === "assistant") {
      const shown = new Answer(false);
      shown.add(String(message.content ?? ""));
      shown.calls = message.tool_calls ?? [];
      shown.turn.classList.remove("busy");
      history.push({ message, turn: shown.turn, answer: shown });
    } else if (message.role === "user" || message.role === "tool") {
      const { role, content, ...more } = message;
      say(role, Array.isArray(content) ? content : String(content ?? ""), more);
    }
  }
  for (const { answer: shown } of history) shown?.draw();
  kept();
  toEnd();
}

/** The conversation as far as before this message, as one of its own; the old one stays kept. */
function branch(entry) {
  const before = history.slice(0, history.indexOf(entry)).map((other) => other.message);
  open({ id: talks.fresh(), messages: before });
  const { text, files: attached } = files.split(entry.message.content);
  message.value = text;
  files.restore(attached);
  grow();
  message.focus();
}

function setRunning(controller) {
  running = controller;
  send.textContent = controller ? "Stop" : "Send";
  send.classList.toggle("stop", Boolean(controller));
  for (const { answer } of history) answer?.drawFoot();
}

export function body() {
  const options = settings.options();
  if (options === null) return null;
  return { model, messages: messages(), ...options };
}

async function answer() {
  const request = body();
  if (request === null || running) return;
  const controller = new AbortController();
  setRunning(controller);
  const reply = new Answer(Boolean(request.response_format));
  toEnd();
  announce("Answering");
  let problem;
  try {
    const response = await call("v1/chat/completions", {
      body: { ...request, stream: true, stream_options: { include_usage: true } },
      signal: controller.signal,
    });
    for await (const { data } of events(response)) {
      if (data === "[DONE]") break;
      reply.take(JSON.parse(data));
    }
  } catch (error) {
    problem = error.name === "AbortError" ? "stopped"
      : error instanceof Refused ? error.message
      : "The connection was lost before the answer was complete.";
  }
  setRunning(null);
  reply.end(problem);
}

function again() {
  if (running) return;
  if (history.at(-1)?.message.role === "assistant") history.pop();
  turns.lastElementChild?.remove();
  if (history.length) answer();
}

function submit(text) {
  if (byId("chat").classList.contains("hearing")) return;
  if (!(text.trim() || files.any()) || running || settings.options() === null) return;
  settings.openSettings(false);
  // An answer that failed without a word is not part of the conversation.
  say("user", files.any() ? [...files.taken(), { type: "text", text }] : text);
  message.value = "";
  grow();
  answer();
}

/** Browsers without field-sizing. */
function grow() {
  if (CSS.supports("field-sizing", "content")) return;
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight + 2}px`;
}

// What a conversation is saved as.
const FILES = {
  markdown: { kind: "md", type: "text/markdown", write: talks.asText },
  json: { kind: "json", type: "application/json", write: talks.asJson },
};

export function start() {
  byId("composer").onsubmit = (event) => {
    event.preventDefault();
    if (running) running.abort();
    else submit(message.value);
  };
  message.oninput = grow;
  message.onkeydown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!running) submit(message.value);
    }
  };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) running.abort();
  });
  for (const button of document.querySelectorAll(".start")) {
    button.onclick = () => submit(button.textContent);
  }
  byId("clear").onclick = () => {
    clear();
    message.focus();
  };
  shelf.start({ open, here: () => id, gone: (gone) => gone === id && clear() });
  const last = talks.find(talks.lastOpen());
  if (last?.messages?.length) open(last);
  let language = "curl";
  const talk = () => talks.titled(id, history.map((entry) => entry.message));
  const show = () => {
    byId("download").hidden = !FILES[language];
    if (FILES[language]) {
      byId("snippet").textContent = FILES[language].write(talk());
      return true;
    }
    const request = body();
    if (request === null) return false;
    if (!request.messages.length) request.messages.push({ role: "user", content: message.value || "Hello" });
    if (language === "python") request.stream = true;
    byId("snippet").textContent = settings.snippets[language](request);
    return true;
  };
  byId("show-code").onclick = () => show() && byId("code").showModal();
  for (const button of document.querySelectorAll("[data-language]")) {
    button.onclick = () => {
      language = button.dataset.language;
      for (const other of document.querySelectorAll("[data-language]")) {
        other.setAttribute("aria-pressed", String(other === button));
      }
      show();
    };
  }
  byId("copy").onclick = () => copied(byId("copy"), byId("snippet").textContent);
  byId("download").onclick = () => {
    const { kind, type, write } = FILES[language];
    save(`${fileName(talk().title)}.${kind}`, type, write(talk()));
  };
}
