// Draws the pairs as turning hands, and marks the score on the curve beside them, without the server.
"use strict";

const SECONDS = 20;  // that Play takes to the largest distance

// Where k is and how far q is behind it, in tokens: the same for all pictures of the page
class Motion {
  constructor() {
    this.hands = new Set();
    this.most = 1;
    this.frame = null;
    this.values = { position: 0, distance: 1 };
    this.controls = document.createElement("div");
    this.controls.className = "motion";
    this.told = {};
    const slider = (name, text, least) => {
      const label = this.controls.appendChild(document.createElement("label"));
      const line = label.appendChild(document.createElement("span"));
      line.append(`${text}: `);
      this.told[name] = line.appendChild(document.createElement("b"));
      const range = label.appendChild(document.createElement("input"));
      Object.assign(range, { type: "range", min: 0, max: 1, step: 0.001, value: 0 });
      range.setAttribute("aria-label", `${text}, tokens`);
      range.addEventListener("input", event => {
        event.stopPropagation();
        this.stop();
        this.set(name, Math.round((this.most + 1 - least) ** range.value) - 1 + least);
      });
      return range;
    };
    this.ranges = { distance: slider("distance", "Distance", 1),
                    position: slider("position", "Position of k", 0) };
    this.button = this.controls.appendChild(document.createElement("button"));
    Object.assign(this.button, { type: "button", textContent: "Play" });
    this.button.addEventListener("click", () => this.frame ? this.stop() : this.play());
  }

  set(name, value) {
    this.values[name] = value;
    this.told[name].textContent = value.toLocaleString("en", { maximumFractionDigits: value < 100 ? 1 : 0 });
    this.ranges[name].setAttribute("aria-valuetext", `${Math.round(value)} tokens`);
    for (const each of this.hands) each.turn(this.values);
  }

  limit(most) {
    this.most = most;
    for (const [name, value] of Object.entries(this.values)) this.set(name, Math.min(value, most));
    this.ranges.distance.value = Math.log(this.values.distance) / Math.log(Math.max(most, 2));
    this.ranges.position.value = Math.log(this.values.position + 1) / Math.log(most + 1);
  }

  // The distance grows evenly on the scale of its slider; between whole tokens too, to be smooth
  play() {
    const from = this.ranges.distance.value < 1 ? Number(this.ranges.distance.value) : 0;
    let start = null;
    const step = now => {
      start ??= now;
      const share = Math.min(from + (now - start) / 1000 / SECONDS, 1);
      this.ranges.distance.value = share;
      this.set("distance", this.most ** share);
      if (share < 1) this.frame = requestAnimationFrame(step);
      else this.stop();
    };
    this.button.textContent = "Stop";
    this.frame = requestAnimationFrame(step);
  }

  stop() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    this.button.textContent = "Play";
  }

  // Shows the sliders below the pictures while there are hands to turn
  show(hands, isShown) {
    this.hands[isShown ? "add" : "delete"](hands);
    this.controls.hidden = !this.hands.size;
    if (!this.hands.size) return this.stop();
    const { svg } = hands.chart;
    const place = svg.closest("#pictures") ?? svg.parentNode;
    if (this.controls.parentNode !== place) place.append(this.controls);
    this.limit(Math.max(...[...this.hands].map(each => each.last)));
  }
}

// The dials of one picture: as many pairs as there is room for, each with a hand of k and of q
class Hands {
  constructor(chart) {
    this.chart = chart;
  }

  // Where the dials stand, left of the curve or above it; gives the room that the curve has left
  place({ inv_freq: speeds, constant, last }, width, height) {
    [this.speeds, this.constant, this.last] = [speeds, constant, last];
    const shown = Math.min(speeds.length, 64), isBeside = width > 1.5 * height;
    const [wide, high] = isBeside ? [Math.min(width * 0.48, height) - 8, height - 26] : [width - 18, height * 0.4];
    const size = columns => Math.min(wide / columns, high / Math.ceil(shown / columns));
    const counts = Array.from({ length: shown }, (_, i) => i + 1);
    const columns = counts.reduce((best, each) => size(each) > size(best) ? each : best);
    const step = size(columns);
    this.radius = step * 0.44;
    this.pairs = counts.map((_, i) => Math.floor(i * speeds.length / shown));
    this.centres = counts.map((_, i) => [
      4 + step * (i % columns + 0.5), 22 + step * (Math.floor(i / columns) + 0.5)]);
    return isBeside ? { left: 8 + step * columns + LEFT } : { top: 26 + step * Math.ceil(shown / columns) };
  }

  draw() {
    const { svg } = this.chart;
    for (const [x, name, colour] of [[4, "k", "orange"], [44, "q", "blue"]]) {
      node(svg, "line", { x1: x, x2: x + 16, y1: 10, y2: 10, class: `hand ${colour}` });
      node(svg, "text", { x: x + 20, y: 14 }, name);
    }
    const [shown, all] = [this.pairs.length, this.speeds.length];
    node(svg, "text", { x: 84, y: 14 }, shown < all ? `${shown} of ${all} pairs` : `pairs 0 to ${all - 1}`);
    this.centres.forEach(([x, y], i) => {
      const dial = node(svg, "circle", { cx: x, cy: y, r: this.radius, class: "dial" });
      const speed = this.speeds[this.pairs[i]];
      const turn = speed ? `one turn in ${long(2 * Math.PI / Math.abs(speed))} tokens` : "stands still";
      node(dial, "title", {}, `pair ${this.pairs[i]}: ${turn}`);
    });
    this.k = node(svg, "path", { class: "hand orange" });
    this.q = node(svg, "path", { class: "hand blue" });
    this.mark = node(svg, "circle", { r: 5, class: "dot red mark" });
    this.label = node(svg, "text", { class: "label red" });
  }

  turn({ position, distance: wanted }) {
    if (!this.q?.isConnected) return;
    const distance = Math.min(wanted, this.last), { xs, ys, box } = this.chart;
    const path = at => this.pairs.map((pair, i) => {
      const [x, y] = this.centres[i], angle = at * this.speeds[pair];
      return `M${x} ${y}L${x + this.radius * Math.cos(angle)} ${y - this.radius * Math.sin(angle)}`;
    }).join("");
    this.k.setAttribute("d", path(position));
    this.q.setAttribute("d", path(position + distance));
    const score = this.speeds.reduce((sum, speed) => sum + Math.cos(distance * speed), this.constant);
    const [x, y] = [xs.at(distance), ys.at(score)];
    const isInside = x >= box.left - 1 && x <= box.right + 1;
    for (const each of [this.mark, this.label]) each.setAttribute("visibility", isInside ? "visible" : "hidden");
    this.mark.setAttribute("cx", x);
    this.mark.setAttribute("cy", y);
    this.label.textContent = `q · k = ${score.toFixed(2)}`;
    this.label.setAttribute("x", Math.min(x + 9, box.right - this.label.textContent.length * TEXT));
    this.label.setAttribute("y", Math.max(y - 8, box.top + 12));
  }
}

const motion = new Motion();
