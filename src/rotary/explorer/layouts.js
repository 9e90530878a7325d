// Draws one k in several orders of its channels, as bars and as hands, and turns all of them at once.
"use strict";

const COLOURS = ["blue", "orange", "green", "purple"];  // of pairs

// Every pair of channels of x, turned by an angle
function rotated(x, pairs, speeds, position) {
  const turned = [...x];
  pairs.forEach(([first, second], i) => {
    const [cos, sin] = [Math.cos(position * speeds[i]), Math.sin(position * speeds[i])];
    turned[first] = x[first] * cos - x[second] * sin;
    turned[second] = x[first] * sin + x[second] * cos;
  });
  return turned;
}

class Layouts {
  static sliders = { distance: "Distance", position: "Position of k" };

  constructor(chart, { inv_freq, orders, last }) {
    Object.assign(this, { chart, speeds: inv_freq, orders, last });
    this.most = Math.max(...orders.flatMap(({ pairs, k }) =>
      pairs.map(([first, second]) => Math.hypot(k[first], k[second]))));
  }

  start() {
    return { position: 5, distance: 16 };
  }

  // A row for each order, left of the curve or above it
  place(width, height) {
    const isBeside = width > 1.5 * height;
    const wide = isBeside ? width * 0.54 : width - 8, high = (isBeside ? height - 24 : height * 0.6) / this.orders.length;
    const count = this.speeds.length, dial = Math.min((high - 24) * 0.5, wide * 0.42 / count / 2);
    const bar = (wide - 2 * dial * count - 24) / (2 * count);
    this.rows = this.orders.map((_, i) => ({ top: 22 + high * i, middle: 22 + high * (i + 0.5) + 3 }));
    Object.assign(this, { bar, dial, wide, dials: 24 + 2 * count * bar, room: (high - 38) / 2 });
    return isBeside ? { left: wide + LEFT } : { top: 22 + high * this.orders.length };
  }

  draw() {
    const { svg } = this.chart;
    key(svg, [["hands: k", "orange"], ["q", "blue"]]);
    this.parts = this.orders.map((order, row) => {
      const { top, middle } = this.rows[row];
      const [first, second] = order.pairs[0];
      const pair = `${first} and ${second} turn together`;
      const titles = [`${order.name}: channels ${pair}`, `${order.name}: ${pair}`, order.name];
      const title = titles.find(each => each.length * BOLD <= this.wide) ?? order.name;
      node(svg, "text", { x: 4, y: top + 10, class: "strong" }, title);
      node(svg, "line", { x1: 4, x2: 4 + this.bar * order.k.length, y1: middle, y2: middle, class: "grid" });
      const bars = order.pairs.map((_, i) => node(svg, "path", { class: `bar ${COLOURS[i]}` }));
      order.k.forEach((_, i) => node(svg, "text", { x: 4 + this.bar * (i + 0.5), y: middle + this.room + 13, "text-anchor": "middle", class: "tick" }, String(i)));
      order.pairs.forEach((_, i) => {
        const [x, y] = this.centre(row, i);
        node(svg, "circle", { cx: x, cy: y, r: this.dial * 0.92, class: `dial ring ${COLOURS[i]}` });
      });
      return { bars, k: node(svg, "path", { class: "hand orange" }), q: node(svg, "path", { class: "hand blue" }) };
    });
    const columns = [...new Set(this.orders.map(order => order.column))];
    this.marked = columns.map(column => this.orders.find(order => order.column === column));
    this.marks = new Marks(this.chart, this.marked.map(order => order.colour), this.last);
  }

  centre(row, pair) {
    return [this.dials + this.dial * (2 * pair + 1), this.rows[row].middle];
  }

  turn({ position, distance: wanted }) {
    if (!this.parts?.[0].k.isConnected) return;
    const distance = Math.min(wanted, this.last);
    const scores = new Map();
    this.orders.forEach((order, row) => {
      const { middle } = this.rows[row], { bars, ...hands } = this.parts[row];
      const k = rotated(order.k, order.pairs, this.speeds, position);
      const q = rotated(order.q, order.pairs, this.speeds, position + distance);
      scores.set(order, q.reduce((sum, value, i) => sum + value * k[i], 0));
      order.pairs.forEach((pair, i) => bars[i].setAttribute("d", pair.map(channel => {
        const left = 4 + this.bar * (channel + 0.12), right = left + this.bar * 0.76;
        const end = middle - k[channel] / this.most * this.room;
        return `M${left} ${middle}L${left} ${end}L${right} ${end}L${right} ${middle}Z`;
      }).join("")));
      for (const [name, x] of [["k", k], ["q", q]]) {
        hands[name].setAttribute("d", order.pairs.map(([first, second], i) => {
          const size = Math.hypot(x[first], x[second]) / this.most * this.dial * 0.92;
          return hand(this.centre(row, i), size, Math.atan2(x[second], x[first]));
        }).join(""));
      }
    });
    this.marks.move(distance, this.marked.map(order => scores.get(order)));
  }
}

MOVERS.layouts = Layouts;
