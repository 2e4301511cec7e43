// What /stats/stream says, in numbers, charts and words.

import { Bars, Lines } from "./charts.js";

const SPANS = [120, 300, 600];
const KEPT = 120;
const percent = (value) => `${Math.round(value * 100)} %`;
const twoDigits = (value) => value.toFixed(2);
const short = (value) => (value < 10 ? String(Number(value.toFixed(1))) : String(Math.round(value)));
const count = (value) => value.toLocaleString("en");
const byId = (id) => document.getElementById(id);

/** Writes only what is new, so that screen readers and the layout stay quiet. */
function write(id, text) {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
}

export class Figures {
  constructor() {
    this.points = [];
    this.uptime = 0;
    this.by = "drafters";
    this.events = "";
    const time = { nothing: "no drafts yet" };
    this.speed = new Lines(byId("speed-chart"), { ...time, format: short, nothing: "no tokens yet", named: false });
    this.alpha = new Lines(byId("alpha-chart"), { ...time, format: percent, high: 1 });
    this.tau = new Lines(byId("tau-chart"), { ...time, format: (v) => v.toFixed(1), low: 1 });
    this.position = new Bars(byId("position-chart"), { format: percent, nothing: "no drafts yet", below: "position" });
    this.k = new Bars(byId("k-chart"), { format: percent, nothing: "no steps yet", below: "k =" });
    this.charts();
    byId("drafts-of").addEventListener("change", () => {
      if (this.stats) this.drafts(this.stats);
    });
    for (const choice of document.getElementsByName("by")) {
      choice.addEventListener("change", () => {
        this.by = choice.value;
        this.charts();
      });
    }
  }

  show(stats) {
    if (stats.uptime_s < this.uptime) this.points = []; // another server
    this.uptime = stats.uptime_s;
    this.stats = stats;
    this.tiles(stats);
    this.remember(stats.history);
    this.drafts(stats);
    this.list(stats.events);
  }

  tiles(stats) {
    const { requests, tokens, speculation } = stats;
    write("model", stats.model);
    write("drafter", stats.choice.join(", ") || stats.drafter);
    this.offer(stats.choice);
    write("running", `${requests.running} running`);
    write("waiting", `${requests.waiting} waiting, ${requests.max_batch} slots`);
    write("speed", short(tokens.per_second));
    write("total", `${count(tokens.total)} since the start`);
    const [drafts, when] = pooled(stats, "");
    write("alpha", drafts ? percent(drafts.draft_acceptance_rate) : "–");
    write("tau", drafts ? twoDigits(drafts.mean_acceptance_length) : "–");
    for (const id of ["alpha-when", "tau-when"]) write(id, when);
    write("fallback", state(stats));
    const faster = speculation.speedup === null ? "" : `${twoDigits(speculation.speedup)} × plain, last 32 steps`;
    write("speedup", faster || (stats.drafter === "none" ? "this server has no drafter" : "too few steps to tell"));
    const ceiling = stats.ceiling ?? null;
    write("ceiling", ceiling === null ? "not measured" : percent(ceiling.share));
    write("ceiling-how", ceiling === null ? "\u00a0" : `plain step, ${short(ceiling.bandwidth / 1e9)} GB/s`);
  }

  /** The server's drafters, where there are several, to choose from. */
  offer(names) {
    for (const [id, first] of [["drafts-of", ["all drafters", ""]], ["by-drafter", null]]) {
      const select = byId(id);
      const options = [...(first ? [first] : []), ...names.map((name) => [name, name])];
      if (options.map(([, value]) => value).join() !== [...select.options].map((option) => option.value).join()) {
        select.replaceChildren(...options.map(([text, value]) => new Option(text, value)));
      }
      select.closest("label").hidden = names.length < 2;
    }
  }

  /** Points come oldest first; after a lost connection they come again. */
  remember(points) {
    const known = new Set(this.points.map((point) => point.number));
    this.points.push(...points.filter((point) => !known.has(point.number)));
    this.points.sort((one, other) => one.number - other.number);
    this.points = this.points.slice(-KEPT);
    if (points.length) this.charts();
  }

  charts() {
    const last = this.points.at(-1)?.number ?? 0;
    const age = (point) => (last - point.number) * point.seconds;
    const drawn = this.points;
    const span = SPANS.find((seconds) => drawn.every((point) => age(point) <= seconds)) ?? SPANS.at(-1);
    this.speed.draw({ all: drawn.map((point) => [age(point), point.tokens_per_second]) }, span);
    const names = [...new Set(drawn.flatMap((point) => Object.keys(point[this.by])))].sort();
    const line = (name, field) => drawn.map((point) => [age(point), point[this.by][name]?.[field] ?? null]);
    const lines = (field) => Object.fromEntries(names.map((name) => [name, line(name, field)]));
    this.alpha.draw(lines("alpha"), span);
    this.tau.draw(lines("tau"), span);
  }

  drafts(stats) {
    const [drafts, when] = pooled(stats, byId("drafts-of").value);
    write("drafts-when", drafts ? when : "");
    this.position.draw((drafts?.acceptance_rate_per_position ?? []).map((rate, i) => [String(i + 1), rate]));
    const chosen = Object.entries(drafts?.k_chosen ?? {});
    const steps = chosen.reduce((sum, [, n]) => sum + n, 0);
    this.k.draw(chosen.map(([k, n]) => [k, n / steps]));
  }

  list(events) {
    const seen = JSON.stringify(events);
    if (seen === this.events) return;
    this.events = seen;
    const entries = events.toReversed().map(entry);
    if (!entries.length) {
      const none = document.createElement("li");
      none.className = "faint";
      none.textContent = "None since the start of the server.";
      entries.push(none);
    }
    byId("events").replaceChildren(...entries);
  }
}

/** Figures of one drafter, or of all (""), over the last seconds, or since the start where nothing was drafted lately. */
function pooled(stats, name) {
  const recent = name ? stats.recent.drafters[name] : stats.recent.all_drafters;
  if (recent?.num_draft_tokens) return [recent, `last ${stats.recent.seconds} s`];
  const total = name ? stats.drafters[name] : stats.all_drafters;
  return total?.num_draft_tokens ? [total, "since the start"] : [null, "nothing drafted yet"];
}

function state({ drafter, speculation }) {
  if (drafter === "none") return "off";
  if (speculation.pays === null) return "measuring";
  return speculation.pays ? "pays" : "fell back";
}

function entry({ time, kind, message, request_id: id }) {
  const item = document.createElement("li");
  const at = document.createElement("time");
  const date = new Date(time * 1000);
  at.dateTime = date.toISOString();
  at.textContent = date.toLocaleTimeString("en-GB");
  const badge = document.createElement("span");
  badge.className = kind.startsWith("guard") ? "badge guard" : "badge";
  badge.textContent = kind.replaceAll("_", " ");
  const text = document.createElement("span");
  text.textContent = id && !message.includes(id) ? `${message} (${id})` : message;
  item.append(at, badge, text);
  return item;
}
