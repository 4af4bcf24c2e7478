// Which versions of an adapter answer, where a shared registry says so.

import { asCode, ask } from "./server.js";
import { bytes, codeOf, get, make } from "./elements.js";

const NAMES = "v1/registry/names", RELEASES = "v1/registry/releases", ROLLBACKS = "v1/registry/rollbacks";

async function show(name) {
  const path = `${NAMES}/${name.split("/").map(encodeURIComponent).join("/")}`;
  try {
    draw(await (await ask(path)).json());
  } catch (error) {
    get("release").replaceChildren(make("p", { className: "bad" }, error.message));
  }
}

function draw(found) {
  const weights = new Map(found.route.map((share) => [share.version, share.weight]));
  const whole = [...weights.values()].reduce((total, weight) => total + weight, 0) || 1;
  const rows = Object.entries(found.versions).reverse().map(([version, about]) => {
    const share = weights.get(Number(version));
    const gets = share ? `${Math.round((100 * share) / whole)} % of the requests`
      : found.shadow === Number(version) ? "runs as a shadow" : "";
    return make("tr", {}, make("td", {}, `v${version}`), make("td", {}, gets),
      make("td", {}, bytes(about.bytes)), make("td", {}, `sha256:${about.digest.slice(0, 12)}…`),
      make("td", {}, action("Release", RELEASES, { name: found.name, to: `v${version}` }),
        action("Canary 10 %", RELEASES, { name: found.name, to: `v${version}`, canary: 10 }),
        action("Shadow", RELEASES, { name: found.name, shadow: `v${version}` }),
        codeOf(() => asCode(RELEASES, { json: { name: found.name, to: `v${version}` } }))));
  });
  const heads = ["Version", "Who gets it", "Size", "Content", ""].map((text) => make("th", {}, text));
  const history = found.history.map((change) =>
    make("li", {}, `${change.time.replace("T", " ").slice(0, 19)} ${change.actor} ${change.change}`));
  get("release").replaceChildren(
    make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows)),
    make("div", { className: "tools" }, action("Roll back", ROLLBACKS, { name: found.name }),
      codeOf(() => asCode(ROLLBACKS, { json: { name: found.name } }))),
    make("h3", {}, "What has changed"), make("ul", {}, ...history));
}

/** A button that changes what is released. */
function action(text, path, json) {
  const button = make("button", { type: "button" }, text);
  button.addEventListener("click", async () => {
    try {
      draw(await (await ask(path, { method: "POST", json })).json());
    } catch (error) {
      get("release").append(make("p", { className: "bad", role: "alert" }, error.message));
    }
  });
  return button;
}

get("find-name").addEventListener("submit", (event) => {
  event.preventDefault();
  show(get("release-name").value.trim());
});
