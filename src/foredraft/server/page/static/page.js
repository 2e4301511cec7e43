// Starts the page: the key, the stream of figures with its state in words, the playground.

import { key, stream } from "./events.js";
import { Figures } from "./figures.js";
import { Playground, modelName } from "./playground.js";

const AGAIN = 2000;
const byId = (id) => document.getElementById(id);
const figures = new Figures();
let watching = new AbortController();

function connection(state, text, problem = "") {
  byId("connection").dataset.state = state;
  byId("connection").textContent = text;
  byId("problem").textContent = problem;
  byId("problem").hidden = !problem;
}

/** Follows the figures until the key changes; a lost connection is tried again, a refused key is not. */
async function watch() {
  watching.abort();
  watching = new AbortController();
  const { signal } = watching;
  while (!signal.aborted) {
    try {
      for await (const stats of stream("stats/stream", { signal })) {
        figures.show(stats);
        connection("live", stats.draining ? "shutting down" : "live");
      }
      connection("waiting", "reconnecting");
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401 || error.status === 403) {
        await refused(error);
        return;
      }
      connection("lost", "no connection", `No figures: ${error.message} Trying again.`);
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN));
  }
}

async function refused(error) {
  const open = await modelName().catch(() => null);
  if (open) byId("model").textContent = open;
  const remedy = open
    ? "The playground works with this key; the figures need one with admin = true."
    : "Enter an API key above.";
  connection("lost", error.status === 401 ? "key needed" : "no figures", `${error.message} ${remedy}`);
}

byId("key").value = key.get();
byId("key").addEventListener("change", () => {
  key.set(byId("key").value.trim());
  watch();
});
new Playground();
watch();
