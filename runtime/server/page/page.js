// The page: images and a question in, the answer as it comes, and what the compression did.
"use strict";

const at = (id) => document.getElementById(id);
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}\u00a0%`;
const duration = (seconds) => (seconds < 1 ? `${(1000 * seconds).toFixed(0)}\u00a0ms` : `${seconds.toFixed(1)}\u00a0s`);
const turns = []; // of the conversation: {role, text, images: [data URL]}
let chosen = []; // images of the next question
let models = [];
let running = null; // AbortController of the answer that streams
let shown = []; // {canvas, image, patches} of the last answer, and the clearest share
let most = 0;

function bytes(count) {
  const power = count > 0 ? Math.min(Math.floor(Math.log2(count) / 10), 3) : 0;
  const number = count / 1024 ** power;
  return `${power && number < 100 ? number.toFixed(1) : Math.round(number)}\u00a0${["B", "KiB", "MiB", "GiB"][power]}`;
}

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (at("token").value) headers.Authorization = `Bearer ${at("token").value}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  at("token-row").hidden = at("token-row").hidden && response.status !== 401;
  const told = await response.json().catch(() => null);
  throw new Error(told?.error?.message ?? `the server answered ${response.status}`);
}

function complain(message) {
  at("error").textContent = message;
  at("error").hidden = !message;
}

async function loadModels() {
  models = (await (await request("v1/models")).json()).data;
  const first = models.find((model) => model.unicache.default);
  at("model").textContent = first.id;
  models = models.filter((model) => model === first || model.unicache.level !== first.unicache.level);
  const options = models.map(({ id, unicache }) => {
    return element("option", { value: id, textContent: unicache.level + (unicache.default ? " (default)" : "") });
  });
  at("level").replaceChildren(...options);
  describeLevel();
}

function describeLevel() {
  at("level-says").textContent = models.find((model) => model.id === at("level").value)?.unicache.description ?? "";
}

// --- images ---

async function addFiles(files) {
  for (const file of files) {
    if (!file.type.startsWith("image/")) {
      complain(`${file.name} is no image`);
      continue;
    }
    const url = await new Promise((done, failed) => {
      const reader = new FileReader();
      reader.onload = () => done(reader.result);
      reader.onerror = () => failed(reader.error);
      reader.readAsDataURL(file);
    });
    chosen.push({ url, name: file.name });
  }
  showChosen();
}

function thumbnail({ url, name }) {
  return element("img", { src: blobUrl(url), alt: name });
}

const blobs = new Map(); // data URL -> blob URL: pages may not show data URLs here, and a blob is not parsed again
function blobUrl(url) {
  if (!blobs.has(url)) {
    const [head, data] = url.split(",");
    const content = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
    blobs.set(url, URL.createObjectURL(new Blob([content], { type: head.slice(5).split(";")[0] })));
  }
  return blobs.get(url);
}

function showChosen() {
  const items = chosen.map((image, index) => {
    const remove = element("button", { type: "button", textContent: "×", ariaLabel: `remove ${image.name}` });
    remove.onclick = () => {
      chosen.splice(index, 1);
      showChosen();
      at("files").focus();
    };
    return element("li", {}, thumbnail(image), remove);
  });
  at("chosen").replaceChildren(...items);
}

// --- asking ---

function showTurn(turn) {
  const item = element("li", { className: turn.role });
  if (turn.images?.length) item.append(element("div", { className: "shown" }, ...turn.images.map(thumbnail)));
  const text = element("span", { textContent: turn.text });
  item.append(text);
  at("turns").append(item);
  return { item, text };
}

const content = (turn) => [
  ...(turn.images ?? []).map((image) => ({ type: "image_url", image_url: { url: image.url } })),
  { type: "text", text: turn.text },
];

async function* serverSentEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function ask() {
  const question = { role: "user", text: at("question").value.trim(), images: chosen };
  if (!question.text || running) return;
  complain("");
  turns.push(question);
  showTurn(question);
  const answer = { role: "assistant", text: "" };
  const { item, text } = showTurn(answer);
  item.classList.add("busy");
  item.scrollIntoView({ block: "nearest" });
  running = new AbortController();
  at("send").disabled = at("new").disabled = true;
  at("turns").ariaBusy = "true";
  at("stop").disabled = false;
  let usage = null;
  let last = null;
  try {
    const body = {
      model: at("level").value,
      messages: turns.map((turn) => ({ role: turn.role, content: content(turn) })),
      stream: true,
      stream_options: { include_usage: true },
      unicache: { kept_patches: true, question_later: at("later").checked },
    };
    const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
    const response = await request("v1/chat/completions", { ...options, signal: running.signal });
    for await (const event of serverSentEvents(response)) {
      if (event.error) throw new Error(event.error.message);
      answer.text += event.choices[0]?.delta.content ?? "";
      text.textContent = answer.text;
      last = event.unicache ?? last;
      usage = event.usage ?? usage;
    }
    if (!last) throw new Error("the answer was cut off");
    turns.push(answer);
    at("question").value = "";
    chosen = [];
    showChosen();
    showTold(last, usage);
    item.append(element("small", { textContent: `${last.level}, KV ${bytes(last.kv_bytes)}` }));
  } catch (error) {
    if (answer.text) {
      turns.push(answer); // what was said stays said
      chosen = [];
      showChosen();
    } else {
      turns.pop();
      item.previousElementSibling.remove();
      item.remove();
    }
    if (error.name === "AbortError") item.append(element("small", { textContent: "stopped" }));
    else complain(error.message);
  } finally {
    item.classList.remove("busy");
    running = null;
    at("send").disabled = at("new").disabled = false;
    at("turns").ariaBusy = "false";
    at("stop").disabled = true;
    at("question").focus();
  }
}

// --- what the compression did ---

function showTold(told, usage) {
  at("told").hidden = false;
  showPatches(told.kept_patches);
  const share = told.kv_bytes / told.kv_bytes_uncompressed;
  const largest = Math.max(told.kv_bytes, told.kv_bytes_uncompressed);
  at("full").style.width = `${(100 * told.kv_bytes_uncompressed) / largest}%`;
  at("held").style.width = `${(100 * told.kv_bytes) / largest}%`;
  at("full-bytes").textContent = bytes(told.kv_bytes_uncompressed);
  at("held-bytes").textContent = bytes(told.kv_bytes);
  const [held, full] = [bytes(told.kv_bytes), bytes(told.kv_bytes_uncompressed)];
  at("bars").ariaLabel = `KV cache ${held}, ${percent(share)} of the ${full} of an uncompressed one`;
  at("share").textContent = `${percent(share)} of an fp16 cache of the same tokens`;
  at("level-was").textContent = `${told.level}: ${told.reason}`;
  at("visual").textContent = `${told.visual_tokens} of ${told.visual_tokens_uncompressed} read`;
  at("speed").textContent = told.tokens_per_second ? told.tokens_per_second.toFixed(1) : "too short to tell";
  at("tokens").textContent = `${usage.prompt_tokens} of prompt, ${usage.completion_tokens} of answer`;
  const parts = Object.entries(told.seconds).filter(([, seconds]) => seconds >= 0.0005);
  at("time").textContent = parts.map(([part, seconds]) => `${part} ${duration(seconds)}`).join(", ");
  at("alarms").textContent = told.alarms.map((alarm) => `${alarm.sign} at token ${alarm.tokens}`).join(", ");
  at("alarm-row").hidden = !told.alarms.length;
}

function summarise(held) {
  const dropped = held.filter((share) => share === 0).length;
  const mean = held.reduce((sum, share) => sum + share, 0) / held.length;
  return `${held.length} patches, ${dropped} dropped; on average one is held by ${percent(mean)} of KV heads.`;
}

function showPatches(all) {
  const images = turns.flatMap((turn) => turn.images ?? []);
  most = Math.max(0, ...all.flatMap((patches) => patches.held));
  shown = [];
  const items = images.map((image, index) => {
    const picture = thumbnail(image);
    const item = element("li", {}, picture);
    const patches = all[index];
    if (!patches) return item;
    const summary = `${image.name}: ${summarise(patches.held)}`;
    const canvas = element("canvas", { role: "img", ariaLabel: summary, tabIndex: 0 });
    canvas.onpointermove = (event) => {
      const patch = patchAt(event, canvas, patches);
      if (patch) at("patch").textContent = `Row ${patch.row + 1}, column ${patch.column + 1}: held by ${percent(patch.share)} of KV heads.`;
    };
    canvas.onpointerleave = canvas.onfocus = () => (at("patch").textContent = summary);
    item.append(canvas);
    shown.push({ canvas, image: picture, patches });
    picture.onload = () => redraw();
    return item;
  });
  at("pictures").replaceChildren(...items);
  at("legend").hidden = !shown.length;
  at("most").textContent = `${percent(most)} of KV heads`;
  at("patch").textContent = shown.length
    ? summarise(all.flatMap((patches) => patches.held))
    : images.length ? "This level does not tell which patches it holds." : "No image was asked about.";
  redraw();
}

function redraw() {
  for (const { canvas, image, patches } of shown) {
    if (image.complete && image.clientWidth) drawPatches(canvas, image, patches, most);
  }
}

// --- what a person does ---

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
at("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
at("stop").onclick = () => running?.abort();
at("files").onchange = async () => {
  await addFiles(at("files").files);
  at("files").value = "";
};
document.addEventListener("paste", (event) => {
  if (event.clipboardData.files.length) addFiles(event.clipboardData.files);
});
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    at("drop").classList.toggle("over", name === "dragover");
    if (name === "drop") addFiles(event.dataTransfer.files);
  });
}
at("new").onclick = () => {
  turns.length = 0;
  chosen = [];
  shown = [];
  for (const list of ["turns", "chosen", "pictures"]) at(list).replaceChildren();
  for (const url of blobs.values()) URL.revokeObjectURL(url);
  blobs.clear();
  at("told").hidden = true;
  complain("");
  at("question").focus();
};
at("level").onchange = describeLevel;
at("veil").onchange = () => at("pictures").classList.toggle("bare", !at("veil").checked);
at("token").onchange = () => loadModels().then(() => complain(""), (error) => complain(error.message));
addEventListener("resize", redraw);
loadModels().catch((error) => complain(error.message));
