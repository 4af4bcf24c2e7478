// The nodes of a fleet, and draining one.

import { asCode, ask } from "./server.js";
import { codeOf, get, make } from "./elements.js";

let seen = "";

/** Show all nodes as this one knows them. Nothing is drawn again that has not changed, as a button
 * would lose the focus. */
export async function refreshNodes() {
  const { nodes } = await (await ask("fleet")).json();
  const shown = JSON.stringify(nodes.map(textsOf));
  if (shown === seen) return;
  seen = shown;
  get("node-table").tBodies[0].replaceChildren(...nodes.map((node) => {
    const [name, state, ...texts] = textsOf(node), up = state !== "down";
    const tag = make("span", { className: up ? "tag" : "tag bad" }, state);
    return make("tr", {}, make("td", {}, name), make("td", {}, tag),
      ...texts.map((text) => make("td", {}, text)), make("td", {}, up ? drainOf(node) : ""));
  }));
}

function textsOf(node) {
  const name = node.own ? `${node.node} (this one)` : node.node;
  if (node.state === "down") return [name, node.state, node.since ? `since ${node.since}` : "", "", "", ""];
  const { device, host } = node.adapters;
  return [name, node.state, `${node.running} of ${node.seats}`, `${node.waiting}`,
    `${Math.round(100 * node.kv_usage)} %`, `${device} on the device, ${host} on the host`];
}

function drainOf(node) {
  const draining = node.state !== "draining";
  const button = make("button", { type: "button" }, draining ? "Drain" : "Use again");
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      await ask("fleet/drain", { method: "POST", json: { node: node.node, draining } });
      get("node-trouble").textContent = "";
    } catch (error) {
      get("node-trouble").textContent = error.message;
    }
  });
  return button;
}

get("node-code").append(codeOf(() => asCode("fleet/drain", { json: { node: "NAME", draining: true } })));
