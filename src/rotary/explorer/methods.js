// Draws each pair before and after scaling, a row for each method, over the angles of the training.
"use strict";

const TURN = 2 * Math.PI;

class Methods {
  static sliders = { position: "Position" };

  constructor(chart, { before, seen, methods, last }) {
    Object.assign(this, { chart, before, seen, methods, last });
  }

  start() {
    return { position: this.last };
  }

  // As many pairs as there is room for; their dials fill the whole picture
  place(width, height) {
    const longest = Math.max(...this.methods.map(({ name }) => name.length));
    const label = Math.max(96, longest * BOLD + 8), count = "00 of 000 new".length * TEXT;
    const high = (height - 46) / this.methods.length;
    const left = width - label - count, size = Math.min(high, 60, left / 6);
    const room = Math.min(Math.floor(left / size + 1e-9), this.before.length);
    const wide = Math.min(left / room, 84);
    this.radius = Math.min(size, wide) * 0.44;
    this.pairs = Array.from({ length: room }, (_, i) => Math.round(i * (this.before.length - 1) / Math.max(room - 1, 1)));
    this.end = label + wide * room + 6;
    this.centre = (row, column) => [label + wide * (column + 0.5), 40 + high * (row + 0.5)];
    return {};
  }

  draw() {
    const { svg } = this.chart;
    key(svg, [["without scaling", "orange thin"], ["with it", "blue"], ["new angle", "red strange"]]);
    this.pairs.forEach((pair, column) => {
      const [x] = this.centre(0, column);
      const text = column ? String(pair) : `pair ${pair}`;
      node(svg, "text", { x, y: 34, "text-anchor": column ? "middle" : "end", dx: column ? 0 : 4, class: "tick" }, text);
    });
    this.counts = this.methods.map(({ name }, row) => {
      const [, y] = this.centre(row, 0);
      node(svg, "text", { x: 4, y: y + 4, class: "strong" }, name);
      this.pairs.forEach((pair, column) => this.dial(row, column, pair));
      return node(svg, "text", { x: this.end, y: y + 4, class: "tick" });
    });
    this.old = node(svg, "path", { class: "hand orange thin" });
    this.new = node(svg, "path", { class: "hand blue" });
    this.strange = node(svg, "path", { class: "hand red strange" });
  }

  // A circle with the sector that the pair showed in training
  dial(row, column, pair) {
    const { svg } = this.chart, [x, y] = this.centre(row, column), r = this.radius;
    const isWhole = this.seen[pair] >= TURN - 1e-9;
    node(svg, "circle", { cx: x, cy: y, r, class: isWhole ? "dial seen" : "dial" });
    if (isWhole || !this.seen[pair]) return;
    const angle = Math.sign(this.before[pair]) * this.seen[pair];
    const isLarge = this.seen[pair] > Math.PI ? 1 : 0, sweep = angle > 0 ? 0 : 1;
    node(svg, "path", { class: "sector", d: `M${x} ${y}L${x + r} ${y}A${r} ${r} 0 ${isLarge} ${sweep} ${x + r * Math.cos(angle)} ${y - r * Math.sin(angle)}Z` });
  }

  isNew(pair, angle) {
    return this.seen[pair] < TURN - 1e-9 && Math.abs(angle) % TURN > this.seen[pair] + 1e-9;
  }

  turn({ position: wanted }) {
    if (!this.old?.isConnected) return;
    const position = Math.min(wanted, this.last);
    const paths = { old: "", new: "", strange: "" };
    this.methods.forEach(({ inv_freq }, row) => {
      this.pairs.forEach((pair, column) => {
        const centre = this.centre(row, column), angle = position * inv_freq[pair];
        paths.old += hand(centre, this.radius, position * this.before[pair]);
        const isNew = this.isNew(pair, angle);
        paths[isNew ? "strange" : "new"] += hand(centre, this.radius, angle);
        if (isNew) paths.strange += "m-2 0a2 2 0 1 0 4 0a2 2 0 1 0-4 0";  // a dot, not by colour alone
      });
      const count = inv_freq.filter((speed, pair) => this.isNew(pair, position * speed)).length;
      this.counts[row].textContent = `${count} of ${inv_freq.length} new`;
    });
    for (const [name, path] of Object.entries(paths)) this[name].setAttribute("d", path);
  }
}

MOVERS.methods = Methods;
