// The live view: cards over what the engine did in the last two minutes.

import { Refused, call, events } from "./api.js";
import { draw, placeAt } from "./chart.js";
import { byId, figures, make, percent, seconds } from "./dom.js";

const MOST = 120;
const NOTABLE = 0.1; // Share of the processors from which on others' work distorts figures.
const dash = "–";
const per = (value) => `${figures(value)}/s`;
const share = (hits, all) => (all ? hits / all : null);
const quantile = (name, which) => (point) => point[name]?.[which] ?? null;
const latency = (name) => ["p50", "p90", "p99"].map((which, place) => ({
  name: which, colour: ["--accent", "--second", "--third"][place], value: quantile(name, which), write: seconds,
}));

// name, explanation for a pointer that rests, series; the first series is the large figure.
const CARDS = [
  { name: "Throughput", unit: "tokens/s", wide: true, write: figures, note: "Tokens computed each second", series: [
    { name: "generated", colour: "--accent", fill: true, value: (p) => p.output_tokens_per_second, write: per },
    { name: "prompt", colour: "--second", value: (p) => p.prompt_tokens_per_second, write: per }] },
  { name: "Time to first token", write: seconds, note: "Over the last 30 s", series: latency("time_to_first_token") },
  { name: "Time between tokens", write: seconds, note: "Over the last 30 s", series: latency("inter_token_latency") },
  { name: "Sequences", unit: "running", write: String, note: "Running and waiting sequences", series: [
    { name: "running", colour: "--accent", fill: true, value: (p) => p.running, write: String },
    { name: "waiting", colour: "--second", value: (p) => p.waiting, write: String }],
    more: (p) => [p.batch ? `${figures(p.batch)} a step` : null] },
  { name: "KV cache in use", write: percent, most: 1, note: "Share of the blocks that running sequences hold", series: [
    { name: "in use", colour: "--accent", fill: true, value: (p) => p.kv_usage, write: percent }] },
  { name: "Prefix cache hits", write: percent, most: 1, note: "Share of prompt tokens found in the cache", series: [
    { name: "hits", colour: "--accent", fill: true, value: hitShare, write: percent }],
    more: () => ["of prompt tokens, over 30 s"] },
  { name: "Share of the roofline", write: percent, note: "Predicted over measured step time: 100 % is what the hardware allows", series: [
    { name: "predicted / measured", colour: "--accent", fill: true, value: (p) => p.roofline, write: percent }],
    least: 1, now: (points) => latest(points, "roofline"),
    more: (p) => [p.step_seconds ? `${seconds(p.step_seconds)} a step` : null, `device ${percent(p.busy)} busy`] },
];
/** Requests come in bursts, so hits are counted over half a minute. */
function hitShare(point, place, all) {
  const near = all.slice(Math.max(0, place - 29), place + 1);
  const sum = (name) => near.reduce((total, one) => total + one[name], 0);
  return share(sum("prefix_hits"), sum("prefix_lookups"));
}
const latest = (points, name) => points.findLast((point) => point[name] !== null)?.[name] ?? null;

let points = [];
let requests = [];
let paused = false;
let watching = null; // AbortController of the stream.
const drawn = [];

function build() {
  for (const card of CARDS) {
    const big = make("p", { class: "big" }, dash);
    const sub = make("p", { class: "sub" });
    const canvas = make("canvas", { role: "img", "aria-label": card.name });
    byId("cards").append(make("section", { class: card.wide ? "card double" : "card", title: card.note },
      make("h3", {}, card.name), big, sub, canvas));
    const view = { card, big, sub, canvas, at: null };
    canvas.onpointermove = (event) => {
      view.at = placeAt(canvas, event);
      drawCard(view);
    };
    canvas.onpointerleave = () => {
      view.at = null;
      drawCard(view);
    };
    drawn.push(view);
  }
}

function drawCard({ card, big, sub, canvas, at }) {
  const place = points.length - 1 - (at ?? 0);
  const point = points[place];
  const series = card.series.map((one) => ({ ...one, values: points.map(one.value) }));
  const now = at === null && card.now ? card.now(points) : (series[0].values[place] ?? null);
  big.replaceChildren(now === null ? dash : card.write(now));
  if (card.unit) big.append(" ", make("small", {}, card.unit));
  const parts = series.length > 1 ? series.map((one, first) => {
    const value = one.values[place] ?? null;
    // The first series is the large figure already.
    const part = make("span", { class: "key" }, first === 0 ? one.name : `${one.name} ${value === null ? dash : one.write(value)}`);
    part.style.setProperty("--c", `var(${one.colour})`);
    return part;
  }) : [];
  if (point && card.more) parts.push(...card.more(point).filter(Boolean).map((text) => make("span", {}, text)));
  if (at !== null && point) parts.push(make("span", {}, `${at} s ago`));
  sub.replaceChildren(...parts);
  const highest = Math.max(0, ...series.flatMap(({ values }) => values.filter((v) => v !== null)));
  const most = card.most ?? (card.least && highest <= card.least ? card.least : undefined);
  draw(canvas, series, { most, label: card.write, at });
  canvas.setAttribute("aria-label", `${card.name}, last two minutes: now ${now === null ? "nothing" : card.write(now)}, highest ${card.write(highest)}`);
}

/** Say that others use the machine, from what they used in the last ten seconds. */
function drawBusy() {
  const used = points.slice(-10).map((point) => point.others).filter((share) => typeof share === "number");
  const share = used.reduce((sum, one) => sum + one, 0) / (used.length || 1);
  byId("busy").hidden = share <= NOTABLE;
  byId("busy").textContent = `This machine is busy with other work: other programs use ${percent(share)} of the processors. Times are longer, and the share of the roofline is lower, than the server's own.`;
}

function drawAll() {
  if (paused || byId("live").hidden) return;
  drawn.forEach(drawCard);
  drawBusy();
  const rows = requests.map((one) => make("tr", {},
    make("td", { class: "id" }, one.id.length > 28 ? `${one.id.slice(0, 27)}…` : one.id),
    make("td", {}, one.state === "decode" ? "generating" : "prompt"),
    make("td", { class: "n" }, seconds(one.age)),
    make("td", { class: "n" }, String(one.prompt_tokens)),
    make("td", { class: "n" }, String(one.cached_tokens)),
    make("td", { class: "n" }, one.max_tokens ? `${one.generated_tokens} of ${one.max_tokens}` : String(one.generated_tokens))));
  if (!rows.length) rows.push(make("tr", {}, make("td", { colspan: "6", class: "none" }, "None at the moment.")));
  byId("requests").replaceChildren(...rows);
}

function onSnapshot(snapshot) {
  points = snapshot.points.slice(-MOST);
  requests = snapshot.requests;
  byId("decisions").replaceChildren(...snapshot.server.decisions.map((one) =>
    make("tr", {}, make("td", {}, one.name), make("td", {}, one.value), make("td", {}, one.reason))));
  const hours = snapshot.server.uptime / 3600;
  byId("uptime").textContent = `Headrace ${snapshot.server.version}, up ${hours < 1 ? `${Math.max(1, Math.round(hours * 60))} min` : `${hours.toFixed(1)} h`}`;
}

const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

/** What the server says of itself; null for a key that may not know. */
export async function facts() {
  try {
    return (await (await call("v1/stats")).json()).server;
  } catch {
    return null;
  }
}

/** Follow the stream while the view is open; come back after a break. */
async function watch() {
  const controller = (watching = new AbortController());
  while (watching === controller) {
    try {
      const response = await call("v1/stats/stream", { signal: controller.signal });
      for await (const { event, data } of events(response)) {
        const said = JSON.parse(data);
        if (event === "snapshot") onSnapshot(said);
        else if (said.point) {
          points.push(said.point);
          points = points.slice(-MOST);
          requests = said.requests;
        }
        drawAll();
      }
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error instanceof Refused && error.status < 500) {
        byId("uptime").textContent = error.status === 403 ? "This view needs an operator's key." : error.message;
        return;
      }
    }
    await pause(2000);
  }
}

/** The view is shown or left; nothing is asked of the server while nobody looks. */
export function show(visible) {
  if (visible && !watching) watch();
  if (!visible && watching) {
    watching.abort();
    watching = null;
  }
  drawAll();
}

export function start() {
  build();
  byId("pause").onclick = () => {
    paused = !paused;
    byId("pause").setAttribute("aria-pressed", String(paused));
    byId("pause").textContent = paused ? "Go on" : "Pause";
    drawAll();
  };
  addEventListener("resize", drawAll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  document.addEventListener("themechange", drawAll);
}
