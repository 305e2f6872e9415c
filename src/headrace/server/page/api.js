// Calls to this server: the key, errors as sentences, events as an async generator.
// The key lives in sessionStorage alone: it goes when the tab goes.

const KEY = "headrace.key";
let asking = null;

export class Refused extends Error {
  constructor(message, status, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export const key = () => sessionStorage.getItem(KEY);
export const hasKey = () => key() !== null;

/** fetch with the key; asks for one where the server wants it. Throws Refused. */
export async function call(path, { body, form, signal, quietly = false } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    if (body) headers["content-type"] = "application/json";
    const response = await fetch(new URL(path, document.baseURI), {
      method: body || form ? "POST" : "GET",
      headers,
      body: form ?? (body && JSON.stringify(body)),
      signal,
      credentials: "omit",
      cache: "no-store",
    });
    if (response.ok) return response;
    const refused = await refusal(response);
    if (response.status !== 401 || (quietly && !key && asking === null && dismissed)) throw refused;
    if (!(await askForKey())) throw refused;
  }
}

async function refusal(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    // A sentence, unless it begins with the name of a field.
    message = (await response.json()).error.message.replace(/^[a-z](?=[a-z]* )/, (letter) => letter.toUpperCase());
  } catch {
    // Not ours: a proxy's page, say. The status has to do.
  }
  return new Refused(message, response.status, Number(response.headers.get("retry-after")) || 0);
}

let dismissed = false;

function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key");
    const form = document.getElementById("key-form");
    form.reset();
    form.onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, form.elements.key.value.trim());
      form.reset();
      dialog.close("given");
    };
    document.getElementById("key-cancel").onclick = () => dialog.close("cancelled");
    dialog.onclose = () => {
      asking = null;
      dismissed = dialog.returnValue !== "given";
      resolve(!dismissed);
    };
    dialog.returnValue = "";
    dialog.showModal();
  });
  return asking;
}

/** The events of a response: {event, data} with data as sent. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        let event = "message";
        const data = [];
        for (const line of block.split("\n")) {
          if (line.startsWith("event: ")) event = line.slice(7);
          else if (line.startsWith("data: ")) data.push(line.slice(6));
        }
        if (data.length) yield { event, data: data.join("\n") };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
