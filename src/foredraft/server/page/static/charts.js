// Small charts in SVG: lines over time and bars. Everything is written as text, nothing as markup.

const WIDTH = 360;
const HEIGHT = 150;
const LEFT = 40;
const RIGHT = 8;
const TOP = 10;
const BOTTOM = 22;
const inner = { width: WIDTH - LEFT - RIGHT, height: HEIGHT - TOP - BOTTOM };

function svg(name, attributes, parent, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  if (text !== undefined) made.textContent = text;
  parent?.append(made);
  return made;
}

/** The next round number at or above `value`. */
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((round) => round >= value * 0.999);
}

class Chart {
  constructor(figure, format) {
    this.figure = figure;
    this.format = format;
    this.root = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" }, figure);
    this.drawn = "";
  }

  /** Clears the drawing and draws the scale from `low` to `high`; false if `data` has not changed. */
  begin(data, low, high) {
    const seen = JSON.stringify(data);
    if (seen === this.drawn) return false;
    this.drawn = seen;
    this.low = low;
    this.high = high;
    this.root.replaceChildren();
    for (const share of [0, 0.5, 1]) {
      const value = low + share * (high - low);
      const y = this.y(value);
      svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }, this.root);
      svg("text", { class: "tick", x: LEFT - 6, y: y + 4, "text-anchor": "end" }, this.root, this.format(value));
    }
    return true;
  }

  y(value) {
    return TOP + inner.height * (1 - (value - this.low) / (this.high - this.low));
  }

  below(x, text, anchor = "middle") {
    svg("text", { class: "tick", x, y: HEIGHT - 6, "text-anchor": anchor }, this.root, text);
  }

  say(text) {
    const name = this.figure.querySelector("figcaption").textContent;
    this.root.setAttribute("aria-label", `${name}: ${text}`);
  }

  empty(text) {
    const at = { class: "nothing", x: LEFT + inner.width / 2, y: TOP + inner.height / 4 + 4, "text-anchor": "middle" };
    svg("text", at, this.root, text);
    this.say(text);
  }
}

/** Lines over the last minutes. A value of null is a gap. */
export class Lines extends Chart {
  /** `unit` follows the numbers in the legend; `low` and `high` fix the scale where it is known. */
  constructor(figure, { format, low = 0, high, nothing, named = true }) {
    super(figure, format);
    Object.assign(this, { nothing, fixedLow: low, fixedHigh: high, named });
    this.legend = document.createElement("ul");
    this.legend.className = "legend small";
    if (named) figure.append(this.legend);
  }

  /** `series`: name → list of [age in seconds, value or null], oldest first; `seconds`: how far back the scale goes. */
  draw(series, seconds) {
    this.seconds = seconds;
    const values = Object.values(series).flat().map(([, value]) => value).filter((value) => value !== null);
    const high = this.fixedHigh ?? this.fixedLow + roundUp(Math.max(0, ...values) - this.fixedLow);
    if (!this.begin([series, seconds], this.fixedLow, high)) return;
    this.below(LEFT, `−${this.seconds / 60} min`, "start");
    this.below(LEFT + inner.width / 2, `−${this.seconds / 120} min`);
    this.below(WIDTH - RIGHT, "now", "end");
    this.legend.replaceChildren();
    if (!values.length) {
      this.empty(this.nothing);
      return;
    }
    const said = Object.entries(series).map(([name, points], number) => this.line(name, points, number % 6));
    this.say(said.join(", "));
  }

  line(name, points, colour) {
    const x = (age) => LEFT + inner.width * (1 - age / this.seconds);
    let run = [];
    const end = () => {
      if (run.length === 1) svg("circle", { class: `dot s${colour}`, cx: run[0][0], cy: run[0][1], r: 2.5 }, this.root);
      else if (run.length) svg("polyline", { class: `line s${colour}`, points: run.map((at) => at.join()).join(" ") }, this.root);
      run = [];
    };
    for (const [age, value] of points) {
      if (value === null) end();
      else run.push([x(age).toFixed(1), this.y(Math.min(value, this.high)).toFixed(1)]);
    }
    end();
    const last = points.findLast(([, value]) => value !== null);
    const latest = last ? this.format(last[1]) : "–";
    const entry = document.createElement("li");
    const mark = document.createElement("span");
    mark.className = `mark s${colour}`;
    entry.append(mark, `${name} ${latest}`);
    this.legend.append(entry);
    return `${name}, latest ${latest}`;
  }
}

/** Bars side by side. */
export class Bars extends Chart {
  constructor(figure, { format, nothing, below }) {
    super(figure, format);
    Object.assign(this, { nothing, title: below });
  }

  /** `bars`: list of [label, value from 0 to 1]. */
  draw(bars) {
    if (!this.begin(bars, 0, 1)) return;
    if (!bars.length) {
      this.empty(this.nothing);
      return;
    }
    const slot = Math.min(inner.width / bars.length, 56);
    bars.forEach(([label, value], number) => {
      const x = LEFT + slot * (number + 0.5);
      const top = this.y(value);
      const height = TOP + inner.height - top;
      svg("rect", { class: "block", x: x - slot * 0.34, width: slot * 0.68, y: top, height, rx: 2 }, this.root);
      if (slot >= 28) svg("text", { class: "value", x, y: Math.max(top - 4, 9), "text-anchor": "middle" }, this.root, this.format(value));
      if (slot >= 14 || number % 2 === 0) this.below(x, label);
    });
    this.say(bars.map(([label, value]) => `${this.title} ${label}: ${this.format(value)}`).join(", "));
  }
}
