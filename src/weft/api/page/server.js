// Everything that this page asks of the server goes through here.

let key = sessionStorage.getItem("weft-key") ?? "";

/** An answer that is no success, as the server explains it. */
export class ServerError extends Error {
  constructor(status, message, field) {
    super(field && !message.includes(field) ? `${message} (${field})` : message);
    this.status = status;
  }
}

/** Ask the server. Where it wants a key, the user is asked for one and the request is sent again. */
export async function ask(path, { method = "GET", body, json, signal } = {}) {
  const headers = {};
  if (key) headers.authorization = `Bearer ${key}`;
  if (json !== undefined) headers["content-type"] = "application/json";
  const sent = json === undefined ? body : JSON.stringify(json);
  const answer = await fetch(path, { method, headers, body: sent, signal });
  if (answer.status === 401) {
    await askForKey();
    return ask(path, { method, body, json, signal });
  }
  if (!answer.ok) throw await errorOf(answer);
  return answer;
}

async function errorOf(answer) {
  const text = await answer.text();
  try {
    const { error } = JSON.parse(text);
    return new ServerError(answer.status, error.message, error.param);
  } catch {
    return new ServerError(answer.status, text.slice(0, 300) || `status ${answer.status}`);
  }
}

let asking = null;

function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    dialog.addEventListener("close", () => {
      key = document.getElementById("key").value.trim();
      sessionStorage.setItem("weft-key", key);
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

/** The objects of a stream of server-sent events, as they come. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (held + value).split("\n\n");
    held = blocks.pop();
    for (const block of blocks) {
      const data = block.slice(block.indexOf("data: ") + 6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(500, event.error.message, event.error.param);
      yield event;
    }
  }
}

/** All models, page by page: `{id, parent, root, quarantined}` each. */
export async function models() {
  const found = [];
  let after = "";
  for (;;) {
    const page = await (await ask(`v1/models?limit=1000&after=${encodeURIComponent(after)}`)).json();
    found.push(...page.data);
    if (!page.has_more) return found;
    after = page.data.at(-1).id;
  }
}

/** The metrics now: `[name, labels, value]` each. */
export async function metrics() {
  const text = await (await ask("metrics")).text();
  const series = [];
  for (const line of text.split("\n")) {
    const parts = /^([\w:]+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!parts || parts[1].endsWith("_bucket")) continue;
    const labels = {};
    for (const [, name, value] of (parts[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
    }
    series.push([parts[1], labels, Number(parts[3])]);
  }
  return series;
}

/** The same request for a terminal, and for Python. */
export function asCode(path, { method = "POST", json, file } = {}) {
  const url = new URL(path, document.baseURI).href;
  const auth = key ? " \\\n    -H 'Authorization: Bearer YOUR_KEY'" : "";
  const pyAuth = key ? '\n    headers={"Authorization": "Bearer YOUR_KEY"},' : "";
  if (file) {
    return {
      curl: `curl -X ${method} ${shell(url)}${auth} \\\n    --data-binary @${shell(file)}`,
      python: `import httpx\n\nanswer = httpx.${method.toLowerCase()}(\n    "${url}",${pyAuth}\n` +
        `    content=open(${JSON.stringify(file)}, "rb").read(),\n    timeout=600,\n)\nprint(answer.json())`,
    };
  }
  const text = JSON.stringify(json, null, 2);
  return {
    curl: `curl -X ${method} ${shell(url)}${auth} \\\n    -H 'Content-Type: application/json' \\\n    -d ${shell(text)}`,
    python: `import httpx\n\nanswer = httpx.${method.toLowerCase()}(\n    "${url}",${pyAuth}\n` +
      `    json=${python(json)},\n    timeout=600,\n)\nprint(answer.json())`,
  };
}

const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function python(value) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([k, v]) => `${JSON.stringify(k)}: ${python(v)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}
