// Sound files to text: segments as they are decoded, then captions to save.

import { Refused, call, events } from "./api.js";
import * as captions from "./captions.js";
import { copied } from "./code.js";
import { announce, byId, make } from "./dom.js";
import { save } from "./save.js";

let model = null;
let running = null; // AbortController of the file in work.
let segments = [];
let name = "speech";

const languages = new Intl.DisplayNames(["en"], { type: "language", fallback: "code" });
const label = (code) => {
  try {
    return languages.of(code);
  } catch {
    return code;
  }
};

/** Show what this model can be asked; nothing for a model that writes. */
export function offer(offered) {
  const hears = offered.task === "transcription";
  byId("hear").hidden = !hears;
  if (!hears || JSON.stringify(offered) === JSON.stringify(model)) return;
  model = offered;
  const known = (offered.languages ?? []).map((code) => [code, label(code)]).sort((a, b) => a[1].localeCompare(b[1]));
  const select = byId("language");
  const before = select.value;
  select.replaceChildren(make("option", { value: "" }, "Detect"), ...known.map(([code, text]) => make("option", { value: code }, text)));
  select.value = known.some(([code]) => code === before) ? before : "";
  byId("hear-options").hidden = known.length < 2;
}

const short = (seconds) => captions.clock(seconds, ".").replace(/^00:/, "").replace(/\.\d+$/, "");

function show(pieces) {
  segments.push(...pieces);
  byId("segments").append(...pieces.map((piece) =>
    make("li", {}, make("span", { class: "time" }, short(piece.start)), make("span", {}, piece.text.trim()))));
  const area = byId("scroller");
  if (area.scrollHeight - area.scrollTop - area.clientHeight < 160) area.scrollTop = area.scrollHeight;
}

function state(text, failed = false) {
  byId("hear-state").textContent = text;
  byId("hear-state").classList.toggle("failed", failed);
}

function setRunning(controller) {
  running = controller;
  byId("hear-stop").hidden = !controller;
  byId("hear-save").hidden = Boolean(controller) || !segments.length;
}

/** Transcribe the first of these files. */
export async function take([file]) {
  if (!file || running) return;
  segments = [];
  name = file.name.replace(/\.[^.]*$/, "") || "speech";
  byId("segments").replaceChildren();
  const controller = new AbortController();
  setRunning(controller);
  state(`${file.name} is being transcribed…`);
  const form = new FormData();
  const translate = byId("translate").checked;
  const language = byId("language").value;
  if (language) form.append("language", language);
  form.append("model", model.id);
  form.append("response_format", "verbose_json");
  form.append("stream", "true");
  form.append("file", file);
  try {
    const response = await call(`v1/audio/${translate ? "translations" : "transcriptions"}`, { form, signal: controller.signal });
    let end = null;
    for await (const { data } of events(response)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(event.error.message, 500, 0);
      if (event.segments && event.type.endsWith("delta")) show(event.segments);
      if (event.type?.endsWith("done")) end = event;
    }
    if (!end) throw new Error("cut");
    const spoken = end.language ? `, ${end.language}` : "";
    state(segments.length ? `${file.name}: ${short(end.duration)}${spoken}` : `Nothing is said in ${file.name}.`);
    announce(`Transcribed. ${captions.text(segments).slice(0, 400)}`);
  } catch (error) {
    const why = error.name === "AbortError" ? "stopped" : error instanceof Refused ? error.message
      : "the connection was lost before the end";
    state(`${file.name}: ${why}`, error.name !== "AbortError");
    announce(why);
  }
  setRunning(null);
}

export function start() {
  byId("hear-choose").onclick = () => byId("chooser").click();
  byId("hear-stop").onclick = () => running?.abort();
  byId("hear-copy").onclick = () => copied(byId("hear-copy"), captions.text(segments).trimEnd());
  for (const [id, kind, type] of [["hear-text", "text", "txt"], ["hear-srt", "srt", "srt"], ["hear-vtt", "vtt", "vtt"]]) {
    byId(id).onclick = () => save(`${name}.${type}`, type === "vtt" ? "text/vtt" : "text/plain", captions[kind](segments));
  }
}
