// Draws the pairs as turning hands, and marks the score on the curve beside them, without the server.
"use strict";

// The dials of one picture: as many pairs as there is room for, each with a hand of k and of q
class Hands {
  static sliders = { distance: "Distance", position: "Position of k" };

  constructor(chart, { inv_freq, factor, constant, last }) {
    Object.assign(this, { chart, speeds: inv_freq, factor, constant, last });
  }

  start() {
    return { position: 5, distance: 20 };
  }

  // Places the dials left of the curve or above it; returns the space that is left for the curve
  place(width, height) {
    const shown = Math.min(this.speeds.length, 64), isBeside = width > 1.5 * height;
    const [wide, high] = isBeside ? [Math.min(width * 0.48, height) - 8, height - 26] : [width - 18, height * 0.5];
    const size = columns => Math.min(wide / columns, high / Math.ceil(shown / columns));
    const counts = Array.from({ length: shown }, (_, i) => i + 1);
    const columns = counts.reduce((best, each) => size(each) > size(best) ? each : best);
    const step = size(columns);
    this.radius = step * 0.44;
    this.pairs = counts.map((_, i) => Math.floor(i * this.speeds.length / shown));
    this.centres = counts.map((_, i) => [
      4 + step * (i % columns + 0.5), 22 + step * (Math.floor(i / columns) + 0.5)]);
    return isBeside ? { left: 8 + step * columns + LEFT } : { top: 26 + step * Math.ceil(shown / columns) };
  }

  draw() {
    const { svg } = this.chart;
    const end = key(svg, [["k", "orange"], ["q", "blue"]]);
    const [shown, all] = [this.pairs.length, this.speeds.length];
    node(svg, "text", { x: end, y: 14 }, `${shown < all ? `${shown} of ` : ""}${all} pair${all > 1 ? "s" : ""}`);
    this.centres.forEach(([x, y], i) => {
      const dial = node(svg, "circle", { cx: x, cy: y, r: this.radius, class: "dial" });
      const speed = this.speeds[this.pairs[i]];
      const turn = speed ? `one turn in ${long(2 * Math.PI / Math.abs(speed))} tokens` : "stands still";
      node(dial, "title", {}, `pair ${this.pairs[i]}: ${turn}`);
    });
    this.k = node(svg, "path", { class: "hand orange" });
    this.q = node(svg, "path", { class: "hand blue" });
    this.marks = new Marks(this.chart, ["red"], this.last);
  }

  turn({ position, distance: wanted }) {
    if (!this.q?.isConnected) return;
    const distance = Math.min(wanted, this.last);
    const path = at => this.pairs.map((pair, i) =>
      hand(this.centres[i], this.radius, at * this.speeds[pair])).join("");
    this.k.setAttribute("d", path(position));
    this.q.setAttribute("d", path(position + distance));
    const sum = this.speeds.reduce((sum, speed) => sum + Math.cos(distance * speed), 0);
    this.marks.move(distance, [this.factor * sum + this.constant]);
  }
}

MOVERS.hands = Hands;
