// The page at /ui. Whatever a server says is put in as text, never as markup.
"use strict";

const $ = (id) => document.getElementById(id);
const PALETTE = ["#b3205e", "#1769aa", "#2e7d32", "#8e44ad", "#a85b00", "#00797a", "#5d4037", "#3949ab", "#c62828", "#558b2f"];
const BASE = "base model";
const CELL = 6, KEPT_STEPS = 2000, WINDOW_S = 5, RETRY_MS = 2000, SURE_MS = 4000;

/** An element with properties and children; strings become text. */
function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "style") Object.assign(element.style, value);
    else if (name.includes("-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const state = {
  adapters: [],            // rows of /lora_adapters
  chosen: new Set([""]),   // who answers; "" is the base model
  seen: false,             // whether the first adapters have been chosen
  image: null,             // {url, blob}
  thumbnails: new Map(),   // image number -> blob URL, of what was asked here
  live: new Map(),         // replica ("" of a server) -> {steps, requests, images, picked}
  cluster: null,
  asking: null,            // aborts the requests of the last question
};

// Requests

const keys = {
  get user() { return sessionStorage.getItem("vlora-key") || ""; },
  get admin() { return sessionStorage.getItem("vlora-admin") || this.user; },
};

class Refused extends Error {}

async function ask(path, body, options = {}) {
  const key = options.admin ? keys.admin : keys.user;
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const answer = await fetch(path, {
    method: body === undefined ? "GET" : "POST", headers, signal: options.signal,
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (answer.status === 401) showKeys(options.admin ? "This needs the operator's key." : "This server wants a key.");
  if (!answer.ok) throw new Refused(await reason(answer));
  return answer;
}

async function reason(answer) {
  const text = await answer.text();
  try {
    let told = JSON.parse(text);
    for (const name of ["error", "error_message", "detail", "message"]) if (told && told[name]) told = told[name];
    return String(told.message || told);
  } catch { return `${answer.status} ${text.slice(0, 300)}`; }
}

/** The events of a stream, as parsed JSON. */
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("");
        if (data && data !== "[DONE]") yield JSON.parse(data);
      }
    }
  } finally { reader.cancel().catch(() => {}); }
}

function showKeys(why) {
  $("keys").hidden = false;
  $("keys-open").setAttribute("aria-expanded", "true");
  if (why) $("keys-why").textContent = `${why} Keys stay in this tab, and are gone when you close it.`;
}

$("keys-open").addEventListener("click", () => {
  $("keys").hidden = !$("keys").hidden;
  $("keys-open").setAttribute("aria-expanded", String(!$("keys").hidden));
  if (!$("keys").hidden) $("key").focus();
});
$("keys").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("vlora-key", $("key").value);
  sessionStorage.setItem("vlora-admin", $("admin").value);
  $("keys").hidden = true;
  $("keys-open").setAttribute("aria-expanded", "false");
  begin();
});

// Names

const shown = (name) => (name === "" || name === null ? BASE : name);
function colour(name) {
  const names = [...new Set(state.adapters.map((row) => row.name))].sort();
  const at = names.indexOf(name);
  return at < 0 ? "#667180" : PALETTE[at % PALETTE.length];
}
const dot = (name) => h("span", { className: "dot", style: { background: colour(name) }, "aria-hidden": "true" });

// 1. Ask

function takeImage(file) {
  if (!file || !file.type.startsWith("image/")) {
    $("ask-note").textContent = file ? `${file.name || "that"} is no image` : "";
    return;
  }
  const reader = new FileReader();
  reader.onload = () => {
    state.image = { url: reader.result, blob: URL.createObjectURL(file) };
    $("preview").src = state.image.blob;
    $("preview").alt = file.name ? `The image ${file.name}` : "The image that was pasted";
    $("preview").hidden = false;
    $("drop-text").hidden = true;
    $("drop").classList.add("full");
    $("ask-note").textContent = "";
    clearFound();
  };
  reader.readAsDataURL(file);
}

$("file").addEventListener("change", () => takeImage($("file").files[0]));
for (const kind of ["dragover", "dragenter"]) {
  document.addEventListener(kind, (event) => { event.preventDefault(); $("drop").classList.add("over"); });
}
document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) $("drop").classList.remove("over"); });
document.addEventListener("drop", (event) => {
  event.preventDefault();
  $("drop").classList.remove("over");
  takeImage(event.dataTransfer.files[0]);
});
document.addEventListener("paste", (event) => {
  const file = [...(event.clipboardData?.files || [])][0];
  if (file) takeImage(file);
});

function drawWho() {
  const names = ["", ...new Set(state.adapters.map((row) => row.name))];
  for (const name of [...state.chosen]) if (!names.includes(name)) state.chosen.delete(name);
  if (!state.seen && names.length > 1) {
    state.seen = true;
    for (const name of names.slice(0, 9)) state.chosen.add(name);
  }
  const before = [...$("who").querySelectorAll("input")].map((input) => input.value).join("\n");
  if (before === names.join("\n") && $("who").childElementCount) return;
  $("who").replaceChildren(...names.map((name) => h("label", { className: "chip" },
    h("input", {
      type: "checkbox", value: name, checked: state.chosen.has(name),
      onchange: (event) => { state.chosen[event.target.checked ? "add" : "delete"](name); },
    }), dot(name), shown(name))));
}
function choose(all) {
  for (const input of $("who").querySelectorAll("input")) {
    input.checked = all;
    state.chosen[all ? "add" : "delete"](input.value);
  }
}
$("all").addEventListener("click", () => choose(true));
$("none").addEventListener("click", () => choose(false));
document.addEventListener("keydown", (event) => {
  if ((event.ctrlKey || event.metaKey) && event.key === "Enter") $("question-form").requestSubmit();
});

function clearFound() {
  $("overlay").replaceChildren();
  $("found").textContent = "";
}

$("question-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  const rows = new Map(state.adapters.map((row) => [row.name, row]));
  const answering = [...state.chosen].sort().map((name) => ({
    name, row: rows.get(name) || {}, question: question || (rows.get(name) || {}).prompt || "",
  })).filter((one) => one.question || (state.image && Object.keys(one.row.heads || {}).length));
  if (!answering.length) {
    $("ask-note").textContent = state.chosen.size ? "What is the question?" : "Choose who answers.";
    return;
  }
  $("ask-note").textContent = state.image ? "" : "Without an image: only the words are asked.";
  clearFound();
  state.asking?.abort();
  state.asking = new AbortController();
  $("answers").replaceChildren(...answering.map((one) => answerCard(one, state.image, state.asking.signal)));
});

function parts(image, question) {
  const given = [];
  if (image) given.push({ type: "image_url", image_url: { url: image.url } });
  if (question) given.push({ type: "text", text: question });
  return given;
}

/** A card that fills itself with one answer, and with what the heads of that adapter say. */
function answerCard({ name, row, question }, image, signal) {
  const said = h("div", { className: "said" }), facts = h("dl");
  const card = h("article", { className: "answer busy" }, h("h3", {}, dot(name), " ", shown(name)), said, facts);
  card.dataset.name = name;
  // A browser sends six requests at a time: words go first.
  const words = question ? stream(name, question, image, signal, said, facts) : Promise.resolve();
  const heads = image && $("heads").checked ? Object.entries(row.heads || {}) : [];
  words.then(() => Promise.all(heads.map(([head, kind]) => askHead(name, head, kind, image, signal, facts))))
    .then(() => card.classList.remove("busy"));
  return card;
}

const milliseconds = (seconds) => `${Math.round(1000 * seconds)} ms`;
const fact = (facts, what, value) => facts.append(h("dt", {}, what), h("dd", {}, value));

async function stream(name, question, image, signal, said, facts) {
  let first = null, last = null;
  try {
    const body = { model: name || "default", input: parts(image, question), stream: true };
    for await (const told of events(await ask("v1/vision/ask", body, { signal }))) {
      if (told.error) throw new Refused(told.error.message);
      first ??= told;
      last = told;
      said.textContent = told.text;
    }
    if (!last) throw new Refused("the answer broke off");
  } catch (error) {
    if (!signal.aborted) said.append(h("p", { className: "note" }, error.message));
    return;
  }
  const { prompt_tokens: prompt, cached_tokens: cached, completion_tokens: tokens } = last.usage;
  fact(facts, "first token", milliseconds(first.seconds));
  fact(facts, "whole", `${milliseconds(last.seconds)}, ${tokens} tokens`);
  fact(facts, "kept", `${cached} of ${prompt} tokens`);
  const modes = new Map();
  for (const mode of last.modes || []) modes.set(mode, (modes.get(mode) || 0) + 1);
  if (modes.size) fact(facts, "mode", [...modes].map(([mode, n]) => (modes.size > 1 ? `${mode} ${n}` : mode)).join(", "));
  for (const number of last.images || []) if (image) state.thumbnails.set(number, image.blob);
}

async function askHead(name, head, kind, image, signal, facts) {
  try {
    const told = await (await ask(`v1/vision/${kind}`, { model: name, head, input: parts(image, "") }, { signal })).json();
    const sure = told.probability === undefined ? "" : ` (${Math.round(100 * told.probability)} %)`;
    const value = kind === "detect" ? `${told.boxes.length} found` : `${kind === "count" ? told.count : told.label}${sure}`;
    fact(facts, head, value);
    if (state.image !== image) return;
    if (kind === "detect") drawBoxes(name, told.boxes);
    if (kind === "count") drawCount(name, head, told.count);
  } catch (error) {
    if (!signal.aborted) fact(facts, head, error.message);
  }
}

function drawBoxes(name, boxes) {
  for (const { box: [x0, y0, x1, y1], label, score } of boxes) {
    const percent = (value) => `${100 * value}%`;
    const text = score === null || score === undefined ? label : `${label} ${Math.round(100 * score)} %`;
    $("overlay").append(h("span", {
      className: y0 < 0.12 ? "box low" : "box",
      style: { left: percent(x0), top: percent(y0), width: percent(x1 - x0), height: percent(y1 - y0), color: colour(name) },
    }, h("b", { style: { background: colour(name) } }, text)));
  }
  $("found").textContent += `${shown(name)}: ${boxes.length} found. `;
}

function drawCount(name, head, count) {
  const counts = $("overlay").querySelector(".counts") || $("overlay").appendChild(h("span", { className: "counts" }));
  counts.append(h("span", { style: { background: colour(name) } }, `${head}: ${count}`));
  $("found").textContent += `${shown(name)}, ${head}: ${count}. `;
}

// 2. Adapters

async function refreshAdapters() {
  state.adapters = (await (await ask("lora_adapters")).json()).adapters;
  drawAdapters();
}

function drawAdapters() {
  drawWho();
  $("nothing").hidden = state.adapters.length > 0;
  $("table").hidden = state.adapters.length === 0;
  const focused = document.activeElement?.closest?.("#rows button");
  if ($("rows").querySelector(".sure")) return; // somebody is about to confirm
  const place = focused && [focused.dataset.adapter, focused.dataset.verb];
  $("rows").replaceChildren(...state.adapters.map(adapterRow));
  if (place) {
    [...$("rows").querySelectorAll("button")].find((one) => one.dataset.adapter === place[0] && one.dataset.verb === place[1])?.focus();
  }
}

function adapterRow(row) {
  const cell = (label, ...children) => h("td", { "data-label": label }, ...children.map((one) => (one === null || one === undefined ? "–" : one)));
  const tier = h("span", { className: `tier ${["device", "host", "disk"].includes(row.residency) ? row.residency : ""}` }, row.residency);
  const where = row.replica === undefined || row.replica === null ? [tier] : [tier, ` on ${row.replica}`];
  const heads = Object.entries(row.heads || {}).map(([head, kind]) => `${head} (${kind})`).join(", ");
  return h("tr", {},
    cell("Name", h("span", {}, dot(row.name), " ", row.name)),
    cell("Nearest copy", h("span", {}, ...where, row.pinned ? " pinned" : "")),
    cell("Slot", text(row.slot)), cell("Rank", text(row.rank)), cell("Size", size(row.host_bytes)),
    cell("Users", text(row.users)), cell("Heads", heads || null), cell("Directory", h("span", { className: "quiet" }, row.path)),
    h("td", { className: "act" },
      button(row, "pin", row.pinned ? "Unpin" : "Pin", { pinned: !row.pinned }),
      button(row, "reload", "Reload", {}),
      button(row, "unload", "Unload", {}, true)));
}
const text = (value) => (value === null || value === undefined ? null : String(value));
const size = (bytes) => (bytes === null || bytes === undefined ? null : bytes < 1e6 ? `${Math.round(bytes / 1024)} KiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`);

function button(row, verb, label, body, sure = false) {
  const made = h("button", { type: "button", "aria-label": `${label} ${row.name}` }, label);
  made.dataset.adapter = row.name;
  made.dataset.verb = verb;
  made.addEventListener("click", () => {
    if (sure && !made.classList.contains("sure")) {
      made.classList.add("sure");
      made.textContent = "Sure?";
      setTimeout(() => { made.classList.remove("sure"); made.textContent = label; }, SURE_MS);
      return;
    }
    made.classList.remove("sure");
    made.disabled = true;
    order(`${verb}_lora_adapter`, { lora_name: row.name, ...body });
  });
  return made;
}

async function order(path, body) {
  $("adapters-note").textContent = "";
  let done = false;
  try {
    await ask(path, body, { admin: true });
    done = true;
  } catch (error) { $("adapters-note").textContent = `${body.lora_name}: ${error.message}`; }
  try { await refreshAdapters(); } catch { /* the link says so */ }
  return done;
}

$("load").addEventListener("submit", async (event) => {
  event.preventDefault();
  const body = { lora_name: $("load-name").value, lora_path: $("load-path").value, pinned: $("load-pin").checked };
  if (await order("load_lora_adapter", body)) {
    state.chosen.add(body.lora_name);
    $("who").replaceChildren();
    drawWho();
    $("load").reset();
  }
});

// 3. Steps: [number, seconds since 1970, mode, merged, switched, prefill, tokens by adapter]

function liveOf(replica) {
  if (!state.live.has(replica)) state.live.set(replica, { steps: [], requests: {}, images: [], picked: null });
  return state.live.get(replica);
}

function takeLive(told) {
  const replica = told.replica === undefined ? "" : String(told.replica);
  const live = liveOf(replica);
  const last = live.steps.length ? live.steps[live.steps.length - 1][0] : -1;
  if (told.steps.length && told.steps[0][0] < last) live.steps = []; // it was started again
  live.steps.push(...told.steps);
  live.steps.splice(0, Math.max(0, live.steps.length - KEPT_STEPS));
  live.requests = told.requests;
  live.merged = told.merged;
  live.at = told.time;
  if (told.adapters && replica === "") {
    state.adapters = told.adapters;
    const used = told.adapters.filter((row) => row.slot !== null && row.slot !== undefined).length;
    $("slots").textContent = told.pool ? `${used} of ${told.pool.ranks.length} slots filled, ${size(told.pool.bytes)}` : "";
    drawAdapters();
  }
  if (told.images) {
    live.images = told.images;
    drawImages();
  }
  drawStrip(replica, live);
  drawTraffic();
}

function drawStrip(replica, live) {
  const id = `strip-${replica}`;
  let strip = $(id);
  if (!strip) {
    strip = h("div", { className: "strip", id },
      h("p", { className: "quiet" }, replica === "" ? "" : `replica ${replica}`),
      h("canvas", { tabIndex: 0, height: 52 }),
      h("output", { className: "quiet" }));
    strip.querySelector("canvas").setAttribute("role", "img");
    $("strips").append(strip);
    const canvas = strip.querySelector("canvas");
    canvas.addEventListener("mousemove", (event) => {
      const cells = Math.floor((canvas.clientWidth - event.offsetX) / CELL);
      live.picked = live.steps.length - 1 - cells;
      tell(strip, live);
    });
    canvas.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      live.picked = Math.min(live.steps.length - 1, Math.max(0, (live.picked ?? live.steps.length) + move));
      tell(strip, live);
      paint(canvas, live);
    });
    for (const leave of ["mouseleave", "blur"]) {
      canvas.addEventListener(leave, () => { live.picked = null; tell(strip, live); });
    }
  }
  paint(strip.querySelector("canvas"), live);
  tell(strip, live);
}

function paint(canvas, live) {
  const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1, height = 52;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  const colours = Object.fromEntries(["unmerged", "merged", "mixture", "mark", "text"].map((one) => [one, style.getPropertyValue(`--${one}`).trim()]));
  pen.scale(ratio, ratio);
  const first = Math.max(0, live.steps.length - Math.floor(width / CELL));
  for (let at = first; at < live.steps.length; at += 1) {
    const [, , mode, , switched, prefill] = live.steps[at];
    const x = width - (live.steps.length - at) * CELL, tall = prefill ? 38 : 26;
    pen.fillStyle = colours[mode] || colours.text;
    pen.fillRect(x, height - tall, CELL - 1, tall);
    if (switched) {
      pen.fillStyle = colours.mark;
      pen.beginPath();
      pen.moveTo(x - 2, 2); pen.lineTo(x + CELL + 1, 2); pen.lineTo(x + CELL / 2, 11);
      pen.fill();
    }
    if (at === live.picked) { pen.strokeStyle = colours.text; pen.strokeRect(x - 0.5, height - tall, CELL, tall - 0.5); }
  }
}

function tell(strip, live) {
  const counts = {}, steps = live.steps;
  let switches = 0;
  for (const [, , mode, , switched] of steps) { counts[mode] = (counts[mode] || 0) + 1; switches += switched; }
  const all = Object.entries(counts).map(([mode, count]) => `${count} ${mode}`).join(", ");
  const merged = live.merged ? ` ${live.merged} is merged now.` : "";
  const summary = steps.length ? `The last ${steps.length} steps: ${all}; ${switches} switches.${merged}` : "No step yet: ask something.";
  const one = live.picked === null ? null : steps[live.picked];
  const output = strip.querySelector("output");
  if (one) {
    const tokens = Object.entries(one[6]).map(([name, count]) => `${shown(name)} ${count}`).join(", ");
    output.textContent = `Step ${one[0]}: ${one[5] ? "prefill" : "decode"}, ${one[2]}${one[3] ? ` (${one[3]} merged)` : ""}${one[4] ? ", switched" : ""}; tokens: ${tokens}`;
  } else output.textContent = summary;
  strip.querySelector("canvas").setAttribute("aria-label", summary);
}

function drawTraffic() {
  const rates = new Map(), running = {}, waiting = {};
  for (const live of state.live.values()) {
    const since = (live.at ?? 0) - WINDOW_S;
    for (const step of live.steps) {
      if (step[1] < since) continue;
      for (const [name, count] of Object.entries(step[6])) rates.set(name, (rates.get(name) || 0) + count / WINDOW_S);
    }
    for (const [from, to] of [["running", running], ["waiting", waiting]]) {
      for (const [name, count] of Object.entries(live.requests[from] || {})) to[name] = (to[name] || 0) + count;
    }
  }
  const names = [...new Set([...rates.keys(), ...Object.keys(running), ...Object.keys(waiting)])].sort();
  if (!names.length) { $("traffic").replaceChildren(h("p", { className: "quiet" }, "No traffic in the last seconds.")); return; }
  const most = Math.max(1, ...rates.values());
  const rows = names.flatMap((name) => [
    h("span", {}, dot(name), " ", shown(name)),
    h("span", {}, h("div", { className: "bar", style: { background: colour(name), width: `${100 * (rates.get(name) || 0) / most}%` } })),
    h("span", {}, `${(rates.get(name) || 0).toFixed(1)} tokens/s`),
    h("span", {}, `${running[name] || 0} run, ${waiting[name] || 0} wait`),
  ]);
  $("traffic").replaceChildren(h("div", { className: "traffic" }, ...rows));
}

// 4. Kept images

function drawImages() {
  const cards = [];
  for (const [replica, live] of state.live) {
    for (const one of live.images.slice(0, 60)) {
      const seen = replica === "" && state.thumbnails.get(one.image);
      const name = `image ${one.image}${replica === "" ? "" : ` on replica ${replica}`}`;
      cards.push(h("article", { className: "image" },
        seen ? h("img", { src: seen, alt: `${name}, asked here` }) : h("span", { className: "blank", "aria-hidden": "true" }),
        h("div", {}, h("b", {}, name),
          h("p", { className: "quiet" }, `${one.tokens} tokens in ${one.copies} ${one.copies === 1 ? "copy" : "copies"}, for ${one.adapters.length}:`),
          h("div", { className: "chips" }, ...one.adapters.map((adapter) => h("span", { className: "chip" }, dot(adapter), shown(adapter)))))));
    }
  }
  $("kept").replaceChildren(...(cards.length ? cards : [h("p", { className: "quiet" }, "None yet: ask about an image.")]));
}

// 5. Replicas

function takeCluster(cluster) {
  const held = (one) => JSON.stringify([one?.replicas.map((replica) => [replica.serving, replica.adapters])]);
  const changed = held(state.cluster) !== held(cluster);
  state.cluster = cluster;
  for (const element of document.querySelectorAll(".cluster")) element.hidden = false;
  const cell = (label, value) => h("td", { "data-label": label }, String(value));
  $("replica-rows").replaceChildren(...cluster.replicas.map((one) => h("tr", {},
    cell("Replica", one.number), cell("Serves", one.serving ? "yes" : "no"), cell("Runs", one.running),
    cell("Waits", one.waiting), cell("Served", one.served), cell("Loads", one.loads), cell("Starts", one.starts),
    cell("Adapters", one.adapters.join(", ") || "–"))));
  const homes = Object.entries(cluster.homes).map(([name, home]) => `${name} on ${home}`).join(", ");
  $("homes").textContent = homes ? `Homes: ${homes}` : "No adapter has a home yet: requests give them one.";
  if (changed) refreshAdapters().catch(() => {});
}

// Live, while somebody looks

let watching = null;

async function watch() {
  watching?.abort();
  const mine = watching = new AbortController();
  while (!mine.signal.aborted) {
    try {
      const answer = await ask("vlora/live", undefined, { signal: mine.signal });
      link("on", "live");
      for await (const told of events(answer)) told.cluster ? takeCluster(told.cluster) : takeLive(told);
      link("off", "the server has gone");
    } catch (error) {
      if (mine.signal.aborted) return;
      link("off", error instanceof Refused ? error.message : "no server answers");
      if (!$("keys").hidden) return;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function link(kind, words) {
  $("link").className = `link ${kind}`;
  $("link").textContent = words;
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) { watching?.abort(); link("", "paused"); } else watch();
});
window.addEventListener("resize", () => { for (const [replica, live] of state.live) drawStrip(replica, live); });

async function begin() {
  try {
    const models = (await (await ask("v1/models")).json()).data;
    $("base").textContent = (models.find((model) => !model.parent) || models[0]).id;
    await refreshAdapters();
  } catch (error) { link("off", error instanceof Refused ? error.message : "no server answers"); }
  drawImages();
  drawTraffic();
  watch();
}
begin();
