// A prompt, decoded plainly and speculatively one after the other, its tokens in the colours of how they came to be.

import { request, stream } from "./events.js";

const KINDS = { accepted: "accepted", correction: "corrected", bonus: "bonus", plain: "plain" };
const START =
  "Correct the spelling: The early bird catches the worm, but the second mouse gets the cheese. " +
  "The early bird sings in the moning, and the second mouse sleeps by the warm fire.";
const byId = (id) => document.getElementById(id);

/** One of the two texts. */
class Column {
  constructor(id) {
    const root = byId(id);
    this.root = root;
    this.rate = root.querySelector("output");
    this.text = root.querySelector(".text");
    this.facts = root.querySelector(".facts");
    this.clear("Not run yet.");
  }

  clear(said) {
    this.root.dataset.state = "idle";
    this.text.replaceChildren();
    this.rate.textContent = "–";
    this.ids = [];
    this.counts = { accepted: 0, correction: 0, bonus: 0, plain: 0 };
    this.result = null;
    this.say(said);
  }

  say(text) {
    this.facts.textContent = text;
  }

  fail(text) {
    this.root.dataset.state = "failed";
    this.say(text);
  }

  /** Decodes; returns figures once it is done. */
  async run(path, body, signal) {
    this.clear("Reading the prompt…");
    this.root.dataset.state = "running";
    const began = performance.now();
    let first = 0;
    let metrics = null;
    let reason = "";
    for await (const chunk of stream(path, { body, signal })) {
      const choice = chunk.choices[0];
      metrics = chunk.metrics ?? metrics;
      if (!choice) continue;
      reason = choice.finish_reason ?? reason;
      if (!choice.tokens) continue;
      this.add(choice.tokens, choice.delta?.content ?? choice.text ?? "");
      const now = performance.now();
      first ||= now;
      if (now > first) this.rate.textContent = (((this.ids.length - 1) * 1000) / (now - first)).toFixed(1);
      this.say(`Writing: ${this.ids.length} tokens`);
    }
    this.result = this.figures(metrics, (performance.now() - (first || began)) / 1000, reason);
    this.root.dataset.state = "done";
    return this.result;
  }

  add(tokens, content) {
    const end = this.text.scrollTop + this.text.clientHeight >= this.text.scrollHeight - 4;
    let told = "";
    for (const { id, kind, text } of tokens) {
      this.ids.push(id);
      this.counts[kind] += 1;
      told += text;
      if (text) this.text.append(span(text, kind));
    }
    const rest = content.startsWith(told) ? content.slice(told.length) : "";
    if (rest) this.text.append(rest);
    if (end) this.text.scrollTop = this.text.scrollHeight;
  }

  figures(metrics, measured, reason) {
    const timings = metrics?.timings;
    const seconds = timings ? timings.decode_s : measured;
    const written = this.ids.length;
    const rate = written > 1 && seconds > 0 ? (written - 1) / seconds : null;
    this.rate.textContent = rate === null ? "–" : rate.toFixed(1);
    const spec = metrics?.speculative_decoding;
    const parts = [`${written} tokens in ${seconds.toFixed(2)} s`];
    if (timings) parts.push(`prompt ${timings.prefill_s.toFixed(2)} s`);
    if (spec) parts.push(`${spec.num_steps} target passes`);
    if (spec?.num_draft_tokens) {
      parts.push(`α ${Math.round(spec.draft_acceptance_rate * 100)} %`, `τ ${spec.mean_acceptance_length.toFixed(2)}`);
    } else if (this.root.id === "speculative") parts.push("nothing was drafted");
    if (reason === "length") parts.push("ended by the token limit");
    this.say(parts.join(" · "));
    return { rate, ids: this.ids, drafted: spec?.num_draft_tokens ?? 0 };
  }
}

function span(text, kind) {
  const made = document.createElement("span");
  made.className = `token ${kind in KINDS ? kind : "plain"}`;
  made.dataset.kind = kind;
  made.title = KINDS[kind] ?? kind;
  made.textContent = text;
  return made;
}

export class Playground {
  constructor() {
    this.columns = { plain: new Column("plain"), speculative: new Column("speculative") };
    this.running = null;
    byId("prompt").value = START;
    byId("form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.start();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("form").requestSubmit();
    });
    byId("run").addEventListener("change", () => {
      for (const id of ["k", "by-drafter"]) byId(id).disabled = byId("run").value === "plain";
    });
  }

  async start() {
    this.running = new AbortController();
    byId("go").textContent = "Stop";
    const chosen = byId("run").value;
    const order = chosen === "both" ? ["plain", "speculative"] : [chosen];
    for (const [name, column] of Object.entries(this.columns)) {
      column.clear(order.includes(name) ? "Waiting for its turn…" : "Not asked for.");
    }
    byId("verdict").textContent = "Running…";
    const done = {};
    let current = order[0];
    try {
      for (current of order) {
        done[current] = await this.columns[current].run(this.path(), this.body(current), this.running.signal);
      }
      byId("verdict").textContent = verdict(done, Number(byId("temperature").value));
    } catch (error) {
      const stopped = error.name === "AbortError";
      this.columns[current].fail(stopped ? "Stopped." : error.message);
      for (const name of order.slice(order.indexOf(current) + 1)) this.columns[name].clear("Not run.");
      byId("verdict").textContent = stopped ? "Stopped." : "That did not work; the column says why.";
    }
    this.running = null;
    byId("go").textContent = "Run";
  }

  path() {
    return byId("as").value === "chat" ? "v1/chat/completions" : "v1/completions";
  }

  body(column) {
    const prompt = byId("prompt").value;
    const k = byId("k").value;
    const drafter = byId("by-drafter").value || null;
    const speculation = column === "plain" ? { off: true } : { k: k === "auto" ? "auto" : Number(k), drafter };
    return {
      ...(byId("as").value === "chat" ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
      temperature: Number(byId("temperature").value),
      max_tokens: Number(byId("max-tokens").value),
      stream: true,
      return_token_ids: true,
      speculation: { ...speculation, stats: "summary" },
      metadata: { category: "playground" },
    };
  }
}

function verdict({ plain, speculative }, temperature) {
  if (!plain || !speculative) return "Done.";
  const parts = [];
  if (!speculative.drafted) parts.push("Nothing was drafted: both ran plainly, so a difference in speed is chance.");
  else if (plain.rate && speculative.rate) {
    const ratio = speculative.rate / plain.rate;
    parts.push(`Speculative decoding ran at ${ratio.toFixed(2)} times the speed of plain decoding.`);
  }
  if (temperature > 0) parts.push("Above temperature 0 the two texts are two draws from the same law.");
  else if (plain.ids.join() === speculative.ids.join()) parts.push("Both texts are the same, token by token.");
  else parts.push(`The texts differ from token ${difference(plain.ids, speculative.ids) + 1} on.`);
  parts.push("Speeds leave out reading the prompt, which the second run finds in the cache.");
  return parts.join(" ");
}

function difference(one, other) {
  const at = one.findIndex((id, i) => id !== other[i]);
  return at < 0 ? one.length : at;
}

/** The model's name, for those who may not read the figures. */
export async function modelName() {
  const answer = await request("v1/models");
  return (await answer.json()).data[0].id;
}
