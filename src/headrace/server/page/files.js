// Files for the next message: texts as they are, sounds where the model hears, pictures and videos
// where it sees. They are read here and sent with the message; the server keeps none.

import { announce, byId, make } from "./dom.js";
import { asUrl, isPicture, picture } from "./pictures.js";

const MOST_TEXT = 1 << 20;
const MOST_SOUND = 12 << 20; // Bytes; base64 makes a third more of them.
const SOUNDS = /\.(?:wav|mp3|flac|ogg|opus|m4a|webm)$/i;

let waiting = []; // {name, part}
let takes = ["text"];
let changed = () => {};

/** `inputs`: what the chosen model takes. */
export const offer = (inputs) => (takes = inputs);

export const size = (bytes) =>
  bytes < 1000 ? `${bytes} B` : bytes < 1e6 ? `${(bytes / 1000).toFixed(1)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;

const isSound = (file) => /^(?:audio|video)\//.test(file.type) || SOUNDS.test(file.name);

/** A text in a fence that nothing in it ends. */
function fenced(name, text) {
  let fence = "```";
  while (text.includes(fence)) fence += "`";
  const kind = /\.([\w+#-]{1,12})$/.exec(name)?.[1] ?? "";
  return `File: ${name}\n\n${fence}${kind}\n${text.replace(/\n$/, "")}\n${fence}`;
}

function base64(bytes) {
  let text = "";
  for (let at = 0; at < bytes.length; at += 8192) text += String.fromCharCode(...bytes.subarray(at, at + 8192));
  return btoa(text);
}

/** The part of a message; throws a sentence where the file cannot be one. */
async function part(file) {
  const name = file.name.replace(/[\u0000-\u001f\u007f]/g, " ").slice(0, 120);
  if (isPicture(file)) {
    if (!takes.includes("image")) throw new Error(`${name}: this model takes no pictures.`);
    return picture(file, name, size);
  }
  if (file.type.startsWith("video/") && takes.includes("video")) {
    if (file.size > MOST_SOUND) throw new Error(`${name} has ${size(file.size)}; at most ${size(MOST_SOUND)} are taken.`);
    return { name, part: { type: "video_url", video_url: { url: await asUrl(file) } } };
  }
  if (isSound(file)) {
    if (!takes.includes("audio")) throw new Error(`${name}: this model does not hear. A speech model writes down what is said: headrace serve whisper-base.`);
    if (file.size > MOST_SOUND) throw new Error(`${name} has ${size(file.size)}; at most ${size(MOST_SOUND)} are taken.`);
    const data = base64(new Uint8Array(await file.arrayBuffer()));
    return { name, part: { type: "input_audio", input_audio: { data, format: /\.mp3$/i.test(name) ? "mp3" : "wav" } } };
  }
  if (file.size > MOST_TEXT) throw new Error(`${name} has ${size(file.size)}; at most ${size(MOST_TEXT)} are taken.`);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    text = "\0";
  }
  if (text.includes("\0")) throw new Error(`${name} is no text (UTF-8).`);
  return { name, part: { type: "text", text: fenced(name, text.replaceAll("\r\n", "\n")) } };
}

/** A picture of a part that is one; else null. */
export const shown = ({ name, part }) => (part.type === "image_url"
  ? make("img", { class: "thumb", src: part.image_url.url, alt: name }) : null);

function draw() {
  byId("files").hidden = !waiting.length;
  byId("files").replaceChildren(...waiting.map((one) => {
    const remove = make("button", { type: "button", class: "quiet", "aria-label": `Remove ${one.name}` }, "×");
    remove.onclick = () => {
      waiting = waiting.filter((other) => other !== one);
      draw();
      byId("message").focus();
    };
    return make("li", {}, shown(one), make("span", {}, one.name), remove);
  }));
  changed();
}

/** Add files; what cannot be added is said. */
export async function add(files) {
  const problems = [];
  for (const file of [...files].slice(0, 16)) {
    try {
      waiting.push(await part(file));
    } catch (error) {
      problems.push(error.name === "NotReadableError" ? `${file.name} cannot be read.` : error.message);
    }
  }
  if (files.length > 16) problems.push("At most 16 files at once.");
  byId("file-problem").textContent = problems.join(" ");
  if (!problems.length) announce(`${waiting.length} ${waiting.length === 1 ? "file" : "files"} attached.`);
  draw();
}

/** The parts that wait, which are then gone. */
export function taken() {
  const parts = waiting.map((one) => one.part);
  clear();
  return parts;
}

export function clear() {
  waiting = [];
  byId("file-problem").textContent = "";
  draw();
}

export const any = () => waiting.length > 0;

/** {name, text, part} of a file in a message. */
function file(part) {
  if (part.type === "input_audio") return { name: "Sound", text: "", part };
  if (part.type === "image_url") return { name: "Picture", text: "", part };
  if (part.type === "video_url") return { name: "Video", text: "", part };
  const [, name = "Text", , text = part.text ?? ""] = /^File: ([^\n]*)\n\n(`{3,})[^\n]*\n([^]*)\n\2$/.exec(part.text ?? "") ?? [];
  return { name, text, part };
}

/** {text, files}: what was typed in a message, and its files as {name, text, part}. */
export function split(content) {
  if (!Array.isArray(content)) return { text: String(content ?? ""), files: [] };
  return { text: content.at(-1)?.text ?? "", files: content.slice(0, -1).map(file) };
}

/** Put the files of a message back, to be sent again. */
export function restore(files) {
  waiting = files.map(({ name, part }) => ({ name, part }));
  draw();
}

/** `take(files)` is called with what is dropped, pasted or chosen. */
export function start(take, onChange = () => {}) {
  changed = onChange;
  const chooser = byId("chooser");
  byId("attach").onclick = () => chooser.click();
  chooser.onchange = () => {
    take([...chooser.files]);
    chooser.value = "";
  };
  const carries = (event) => event.dataTransfer?.types.includes("Files");
  let over = 0;
  const mark = () => document.body.classList.toggle("dropping", over > 0);
  document.addEventListener("dragenter", (event) => carries(event) && (over++, mark()));
  document.addEventListener("dragleave", (event) => carries(event) && (over--, mark()));
  document.addEventListener("dragover", (event) => carries(event) && event.preventDefault());
  document.addEventListener("drop", (event) => {
    if (!carries(event)) return;
    event.preventDefault();
    over = 0;
    mark();
    location.hash = "#chat";
    take([...event.dataTransfer.files]);
  });
  byId("message").addEventListener("paste", (event) => {
    if (!event.clipboardData?.files.length) return;
    event.preventDefault();
    take([...event.clipboardData.files]);
  });
}
