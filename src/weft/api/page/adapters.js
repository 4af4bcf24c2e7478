// The adapters: where each of them is, and loading and unloading.

import { asCode, ask } from "./server.js";
import { bytes, codeOf, get, make } from "./elements.js";
import { chatWith } from "./chat.js";
import { tarOf } from "./tar.js";

const PAGE = 30;
let known = [], levels = new Map(), tokens = new Map(), first = 0, rows = new Map();
let changed = () => {};

/** Call this when adapters have come or gone. */
export function onChange(call) { changed = call; }

/** Show these models. */
export function showAdapters(models) {
  known = models.filter((model) => model.parent);
  draw();
}

/** Show where adapters are, by the metrics. */
export function showLevels(series) {
  levels = new Map();
  tokens = new Map();
  for (const [name, labels, value] of series) {
    if (name === "vllm:lora_adapter_loaded") {
      const found = levels.get(labels.adapter_name) ?? { levels: new Set(), pinned: false };
      found.levels.add(labels.level);
      found.pinned ||= labels.pinned === "true";
      levels.set(labels.adapter_name, found);
    } else if (name === "weft:adapter_output_tokens_total") tokens.set(labels.adapter, value);
  }
  for (const row of rows.values()) row.update();
}

/** Show one page of those that the filter leaves. Nothing is drawn again that has not changed, as a
 * button would lose the focus, and a thousand adapters would take too long. */
function draw() {
  const wanted = get("filter").value.toLowerCase();
  const found = known.filter((model) => model.id.toLowerCase().includes(wanted));
  first = Math.min(first, PAGE * Math.floor(Math.max(found.length - 1, 0) / PAGE));
  const last = Math.min(first + PAGE, found.length), count = (number) => number.toLocaleString("en");
  get("num-adapters").textContent =
    wanted ? `${count(found.length)} of ${count(known.length)}` : `${count(known.length)} in all`;
  get("pages").hidden = found.length <= PAGE;
  get("which").textContent = `${count(first + 1)} to ${count(last)} of ${count(found.length)}`;
  get("previous").disabled = first === 0;
  get("next").disabled = last === found.length;
  const before = [...rows.values()];
  rows = new Map(found.slice(first, last).map((model) => {
    const row = rows.get(model.id);
    return [model.id, row?.isOf(model) ? row : new Row(model)];
  }));
  const now = [...rows.values()];
  if (now.length !== before.length || now.some((row, index) => row !== before[index])) {
    get("table").tBodies[0].replaceChildren(...now.map((row) => row.root));
  }
  for (const row of now) row.update();
}

function turn(rows) {
  first += rows;
  draw();
}

class Row {
  constructor(model) {
    this.model = model;
    this.where = make("td");
    this.tokens = make("td", { className: "number" });
    const chat = make("button", { type: "button" }, "Chat");
    chat.addEventListener("click", () => chatWith(model.id));
    const unload = make("button", { type: "button" }, "Unload");
    unload.addEventListener("click", () => this.unload(unload));
    const name = make("td", { title: model.root ?? "" }, model.id);
    if (model.quarantined) name.append(" ", make("span", { className: "tag bad" }, "quarantined"));
    this.root = make("tr", {}, name, this.where, this.tokens, make("td", {}, chat, unload,
      codeOf(() => asCode("v1/unload_lora_adapter", { json: { lora_name: model.id } }))));
    this.seen = null;
  }

  isOf(model) {
    return ["id", "root", "quarantined"].every((name) => this.model[name] === model[name]);
  }

  update() {
    const found = levels.get(this.model.id);
    const count = tokens.get(this.model.id) ?? 0;
    const told = JSON.stringify([[...(found?.levels ?? [])], found?.pinned, count]);
    if (told === this.seen) return;
    this.seen = told;
    const names = { gpu: "device", cpu: "host", disk: "disk" };
    const tags = Object.entries(names).filter(([level]) => found?.levels.has(level));
    this.where.replaceChildren(
      ...tags.map(([level, name]) => make("span", { className: `tag ${level}` }, name)),
      ...(found?.pinned ? [make("span", { className: "tag" }, "pinned")] : []));
    this.tokens.textContent = count ? count.toLocaleString("en") : "";
  }

  async unload(button) {
    if (button.textContent === "Unload") {
      button.textContent = "Really?";
      setTimeout(() => { button.textContent = "Unload"; }, 3000);
      return;
    }
    try {
      await ask("v1/unload_lora_adapter", { method: "POST", json: { lora_name: this.model.id } });
      changed();
    } catch (error) {
      tell(error.message, "bad");
    }
  }
}

// -- loading -------------------------------------------------------------------------------------

let chosen = null;

/** Have what was chosen checked, and offer to load it. */
async function choose(name, what, make_body) {
  chosen = make_body;
  get("upload-name").value = name.replace(/\.(tar|tar\.gz|tgz|safetensors)$/, "");
  get("chosen-what").textContent = what;
  get("chosen").hidden = false;
  get("upload-name").focus();
  tell("Checking it …");
  const path = `v1/adapters/${escaped(get("upload-name").value)}?check=true`;
  let verdict;
  try {
    const found = await (await ask(path, { method: "PUT", body: await make_body() })).json();
    const off = found.conversion_error ? `, ${(100 * found.conversion_error).toPrecision(2)} % off` : "";
    verdict = [`It can be served: rank ${found.max_rank}${off}, ${bytes(found.num_bytes)} on the device, ` +
      `for ${found.targets.join(", ")}.`, "good"];
  } catch (error) {
    verdict = [`It can't be served: ${error.message}`, "bad"];
  }
  if (chosen === make_body) tell(...verdict);
}

const escaped = (name) => name.split("/").map(encodeURIComponent).join("/");

function chooseFile(file) {
  choose(file.name, `${file.name}, ${bytes(file.size)}`, async () => file);
}

function chooseFolder(name, files) {
  if (!files.length) return tell("The folder is empty.", "bad");
  const size = files.reduce((sum, { file }) => sum + file.size, 0);
  choose(name, `${name}: ${files.length} files, ${bytes(size)}`, () => tarOf(files));
}

/** The files right in a dropped folder; an adapter has no folders that matter. */
async function filesOf(entry) {
  const reader = entry.createReader(), found = [];
  for (;;) {
    const entries = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!entries.length) return found;
    for (const each of entries.filter((one) => one.isFile)) {
      const file = await new Promise((resolve, reject) => each.file(resolve, reject));
      found.push({ name: each.name, file });
    }
  }
}

function tell(text, kind = "") {
  get("verdict").textContent = text;
  get("verdict").className = kind;
}

const form = get("upload");
form.addEventListener("dragover", (event) => { event.preventDefault(); form.classList.add("over"); });
form.addEventListener("dragleave", () => form.classList.remove("over"));
form.addEventListener("drop", async (event) => {
  event.preventDefault();
  form.classList.remove("over");
  const item = event.dataTransfer.items[0];
  const entry = item?.webkitGetAsEntry?.();
  if (entry?.isDirectory) chooseFolder(entry.name, await filesOf(entry));
  else if (event.dataTransfer.files[0]) chooseFile(event.dataTransfer.files[0]);
});
get("file").addEventListener("change", (event) => {
  if (event.target.files[0]) chooseFile(event.target.files[0]);
});
get("folder").addEventListener("change", (event) => {
  const all = [...event.target.files].map((file) => ({ path: file.webkitRelativePath.split("/"), file }));
  const top = all.filter(({ path }) => path.length === 2);
  if (top.length) chooseFolder(top[0].path[0], top.map(({ path, file }) => ({ name: path[1], file })));
});
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (!chosen) return;  // it is on its way
  const name = get("upload-name").value.trim(), pinned = get("upload-pinned").checked;
  const path = `v1/adapters/${escaped(name)}?pinned=${pinned}`, make_body = chosen;
  chosen = null;
  tell("Sending and loading …");
  const began = performance.now();
  try {
    const answer = await (await ask(path, { method: "PUT", body: await make_body() })).json();
    const seconds = ((performance.now() - began) / 1000).toFixed(1);
    tell(`${answer.lora_name} is served as it is. Loaded in ${seconds} s; ` +
      `its content is sha256:${answer.digest.slice(0, 16)}…`, "good");
    get("verdict").append(codeOf(() => asCode(path, { method: "PUT", file: `${name}.tar` })));
    get("chosen").hidden = !chosen;
    changed();
  } catch (error) {
    chosen ??= make_body;
    tell(`Not served: ${error.message}`, "bad");
  }
});
get("filter").addEventListener("input", () => { first = 0; draw(); });
get("previous").addEventListener("click", () => turn(-PAGE));
get("next").addEventListener("click", () => turn(PAGE));
