// The microphone: samples to a session of /v1/realtime, words into the message as they are heard.

import { key } from "./api.js";
import { announce, byId } from "./dom.js";

const RATE = 24000;
const LAST_WORDS = 8000; // Milliseconds that the end of what was said may take.
const button = byId("speak");
const message = byId("message");
const keys = byId("keys");
const written = [message.placeholder, keys.textContent];
let asked = null; // The name of the model that hears.
let session = null;

/** Show what a model that hears can be asked: to listen, and nothing else. `alone`: none writes. */
export function offer(model, alone) {
  const hears = model.task === "transcription";
  asked = model.id;
  button.hidden = !hears;
  byId("chat").classList.toggle("hearing", hears);
  byId("to-live").hidden = alone;
  [message.placeholder, keys.textContent] = hears
    ? ["What you say into the microphone is written here", "Speak begins and ends; the text can be changed and copied"]
    : written;
}

function show(on) {
  button.setAttribute("aria-pressed", String(on));
  button.textContent = on ? "Stop" : "Speak";
}

function write(said, live) {
  message.value = [said, live].filter(Boolean).join(" ");
  message.dispatchEvent(new Event("input"));
}

async function listen() {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
  const audio = new AudioContext({ sampleRate: RATE });
  const url = new URL(`v1/realtime?intent=transcription&model=${encodeURIComponent(asked)}`, document.baseURI);
  url.protocol = url.protocol.replace("http", "ws");
  const secret = key();
  const socket = new WebSocket(url, ["realtime", ...(secret ? [`openai-insecure-api-key.${secret}`] : [])]);
  let said = message.value.trim();
  let words = "";
  let timer = 0;
  const end = (why) => {
    if (session === null) return;
    session = null;
    clearTimeout(timer);
    for (const track of stream.getTracks()) track.stop();
    audio.close();
    socket.close();
    show(false);
    if (why) announce(why);
  };
  const tell = (event) => socket.readyState === WebSocket.OPEN && socket.send(JSON.stringify(event));
  session = {
    stop() {
      for (const track of stream.getTracks()) track.stop();
      if (!words) return end("");
      tell({ type: "input_audio_buffer.commit" });
      timer = setTimeout(() => end(""), LAST_WORDS);
      session.stopping = true;
    },
  };
  socket.onclose = (event) => end(event.reason || (event.code === 1000 ? "" : "The session has ended."));
  socket.onmessage = ({ data }) => {
    const event = JSON.parse(data);
    if (event.type.endsWith("transcription.delta")) {
      words += event.delta;
      write(said, [words, event.unstable].filter(Boolean).join(" "));
    } else if (event.type.endsWith("transcription.completed")) {
      said = [said, event.transcript].filter(Boolean).join(" ");
      words = "";
      write(said, "");
      if (session?.stopping) end("");
    } else if (event.type.endsWith("transcription.failed") || event.type === "error") {
      announce(event.error.message);
      if (session?.stopping) end("");
    }
  };
  await audio.audioWorklet.addModule(new URL("capture.js", import.meta.url));
  const capture = new AudioWorkletNode(audio, "capture");
  capture.port.onmessage = ({ data }) => {
    let text = "";
    for (const byte of new Uint8Array(data)) text += String.fromCharCode(byte);
    tell({ type: "input_audio_buffer.append", audio: btoa(text) });
  };
  audio.createMediaStreamSource(stream).connect(capture);
}

button.onclick = async () => {
  if (session) return session.stop();
  show(true);
  try {
    await listen();
  } catch (error) {
    show(false);
    announce(error.name === "NotAllowedError" ? "The microphone is not allowed." : `The microphone cannot be used: ${error.message}`);
  }
};
