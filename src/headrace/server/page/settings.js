// The settings form: what it says becomes a request, and the request becomes code to copy.

import { byId } from "./dom.js";
import * as talks from "./talks.js";

const form = byId("form");
const field = (name) => form.elements[name];

const SCHEMA = {
  type: "object",
  properties: {
    title: { type: "string" },
    year: { type: "integer" },
    tags: { type: "array", items: { type: "string" }, maxItems: 4 },
  },
  required: ["title", "year", "tags"],
  additionalProperties: false,
};
const TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather of a place, now.",
      parameters: {
        type: "object",
        properties: { place: { type: "string" } },
        required: ["place"],
      },
    },
  },
];
const pretty = (value) => JSON.stringify(value, null, 2);

/** The JSON in a field; says what is wrong under it. undefined: empty or wrong. */
function parsed(name, check) {
  const text = field(name).value.trim();
  const problem = byId(`${name}-problem`);
  problem.textContent = "";
  field(name).removeAttribute("aria-invalid");
  if (!text) return undefined;
  try {
    const value = JSON.parse(text);
    const wrong = check(value);
    if (!wrong) return value;
    problem.textContent = wrong;
  } catch (error) {
    problem.textContent = error.message;
  }
  field(name).setAttribute("aria-invalid", "true");
  return null;
}
const schemaValue = () =>
  parsed("schema", (value) => (typeof value === "object" && value ? "" : "A schema is an object."));
const toolsValue = () => parsed("tools", (value) => (Array.isArray(value) ? "" : "Tools are a list."));

/** The request's fields besides its messages; null where a field is wrong (it says so). */
export function options() {
  const body = {};
  for (const name of ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_completion_tokens"]) {
    const input = field(name);
    if (!input.checkValidity()) {
      // A field that is not seen (the closed panel of a phone) could not say what is wrong.
      reveal(name);
      input.reportValidity();
      return null;
    }
    if (input.value !== "") body[name] = Number(input.value);
  }
  if (field("stop").value) body.stop = [field("stop").value.replaceAll("\\n", "\n")];
  if (field("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  const format = field("format").value;
  if (format === "json_object") body.response_format = { type: format };
  if (format === "json_schema") {
    const schema = schemaValue();
    if (!schema) {
      if (schema === undefined) byId("schema-problem").textContent = "The schema is empty.";
      reveal("schema");
      return null;
    }
    body.response_format = { type: format, json_schema: { name: "answer", schema, strict: true } };
  }
  const tools = toolsValue();
  if (tools === null) {
    reveal("tools");
    return null;
  }
  if (tools?.length) body.tools = tools;
  return body;
}

function reveal(name) {
  openSettings(true);
  field(name).closest("details")?.setAttribute("open", "");
  field(name).focus();
}

export const system = () => field("system").value.trim();

export function openSettings(open) {
  const panel = byId("settings");
  panel.classList.toggle("open", open);
  byId("open-settings").setAttribute("aria-expanded", String(open));
}

/** What this engine can do decides what the form offers. */
export function offer(features) {
  const can = features.includes("grammar");
  byId("no-grammar").hidden = can;
  field("format").disabled = !can;
  if (!can) field("format").value = "";
  showSchema();
}

function showSchema() {
  const wanted = field("format").value === "json_schema";
  byId("schema-field").hidden = !wanted;
  if (!wanted) byId("schema-problem").textContent = "";
  else if (!field("schema").value) field("schema").value = pretty(SCHEMA);
}

/** What the form held when the page was left. */
function restore() {
  for (const [name, value] of Object.entries(talks.settings())) {
    const input = field(name);
    if (input?.type === "checkbox") input.checked = value === true;
    else if (input) input.value = String(value);
  }
}

function keepAll() {
  const values = {};
  for (const input of form.elements) {
    if (input.name) values[input.name] = input.type === "checkbox" ? input.checked : input.value;
  }
  talks.keepSettings(values);
}

export function start() {
  restore();
  form.addEventListener("input", keepAll);
  form.onsubmit = (event) => event.preventDefault();
  field("format").onchange = showSchema;
  field("schema").onchange = schemaValue;
  field("tools").onchange = toolsValue;
  byId("tools-example").onclick = () => {
    field("tools").value = pretty(TOOLS);
    toolsValue();
    keepAll();
  };
  byId("open-settings").onclick = () => {
    const open = !byId("settings").classList.contains("open");
    openSettings(open);
    if (open) field("system").focus();
  };
  const close = () => {
    openSettings(false);
    byId("open-settings").focus();
  };
  byId("close-settings").onclick = close;
  byId("settings").onkeydown = (event) => {
    if (event.key === "Escape" && byId("settings").classList.contains("open")) close();
  };
}

const url = () => new URL("v1", document.baseURI).href;

export const snippets = {
  curl(body) {
    const text = pretty(body).replaceAll("'", "'\\''");
    return `curl ${url()}/chat/completions \\\n  -H "Content-Type: application/json" \\\n  -H "Authorization: Bearer $HEADRACE_API_KEY" \\\n  -d '${text}'\n`;
  },
  python(body) {
    const known = new Set([
      "model", "messages", "temperature", "top_p", "seed", "max_completion_tokens", "stop",
      "logprobs", "top_logprobs", "response_format", "tools", "stream",
    ]);
    const own = Object.entries(body).filter(([name]) => known.has(name));
    const extra = Object.entries(body).filter(([name]) => !known.has(name));
    const lines = own.map(([name, value]) => `    ${name}=${python(value, 4)},`);
    if (extra.length) lines.push(`    extra_body=${python(Object.fromEntries(extra), 4)},`);
    const use = body.stream
      ? `for chunk in answer:\n    for choice in chunk.choices:\n        print(choice.delta.content or "", end="", flush=True)\n`
      : `print(answer.choices[0].message.content)\n`;
    return `import os\n\nfrom openai import OpenAI\n\nclient = OpenAI(\n    base_url=${python(url())},\n    api_key=os.environ.get("HEADRACE_API_KEY", "none"),\n)\nanswer = client.chat.completions.create(\n${lines.join("\n")}\n)\n${use}`;
  },
};

/** A JSON value as Python writes it. */
export function python(value, indent = 0) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const pad = " ".repeat(indent + 4);
  const [open, close, inner] = Array.isArray(value)
    ? ["[", "]", value.map((item) => python(item, indent + 4))]
    : ["{", "}", Object.entries(value).map(([k, v]) => `${JSON.stringify(k)}: ${python(v, indent + 4)}`)];
  const flat = `${open}${inner.join(", ")}${close}`;
  if (flat.length < 80 && !flat.includes("\n")) return flat;
  return `${open}\n${inner.map((item) => `${pad}${item},`).join("\n")}\n${" ".repeat(indent)}${close}`;
}
