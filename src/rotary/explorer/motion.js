// Shared by all moving pictures: the sliders of positions, Play, and a marked point on a curve.
"use strict";

const SECONDS = 20;  // the time in which Play reaches the end of its slider
const LINEAR = 100;  // tokens up to which a slider is even; longer ones are even on a log scale
const LEAST = { position: 0, distance: 1 };

// Where k is and how far q is behind it, in tokens: the same for all pictures of the page
class Motion {
  constructor() {
    this.movers = new Set();
    this.most = 1;
    this.frame = null;
    this.values = { ...LEAST };
    this.controls = document.createElement("div");
    this.controls.className = "motion";
    this.sliders = Object.fromEntries(Object.keys(LEAST).map(name => [name, this.slider(name)]));
    this.button = this.controls.appendChild(document.createElement("button"));
    Object.assign(this.button, { type: "button", textContent: "Play" });
    this.button.addEventListener("click", () => this.frame ? this.stop() : this.play());
  }

  slider(name) {
    const label = this.controls.appendChild(document.createElement("label"));
    const line = label.appendChild(document.createElement("span"));
    const [title, value] = ["span", "b"].map(tag => line.appendChild(document.createElement(tag)));
    const range = label.appendChild(document.createElement("input"));
    Object.assign(range, { type: "range", min: 0, max: 1, step: 0.001, value: 0 });
    range.addEventListener("input", event => {
      event.stopPropagation();
      this.stop();
      this.set(name, Math.round(this.at(name, Number(range.value))), false);
    });
    return { label, title, value, range };
  }

  // The number of tokens at a share of the slider, and the share for a number of tokens
  at(name, share) {
    const least = LEAST[name], size = this.most + 1 - least;
    return this.most <= LINEAR ? least + share * (size - 1) : size ** share - 1 + least;
  }

  share(name, value) {
    const least = LEAST[name], size = this.most + 1 - least;
    return this.most <= LINEAR ? (value - least) / Math.max(size - 1, 1)
      : Math.log(value + 1 - least) / Math.log(size);
  }

  set(name, value, isSliderMoved = true) {
    const { range, value: line } = this.sliders[name];
    this.values[name] = value;
    line.textContent = value.toLocaleString("en", { maximumFractionDigits: value < 100 ? 1 : 0 });
    range.setAttribute("aria-valuetext", `${Math.round(value)} tokens`);
    if (isSliderMoved) range.value = this.share(name, value);
    for (const each of this.movers) each.turn(this.values);
  }

  // Moves through fractions of tokens, to be smooth; starts again if it is at the end
  play() {
    const name = this.played, share = this.share(name, this.values[name]);
    const from = share < 1 ? share : 0;
    let start = null;
    const step = now => {
      start ??= now;
      const share = Math.min(from + (now - start) / 1000 / SECONDS, 1);
      this.set(name, this.at(name, share));
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

  // Shows the sliders of a moving picture below the pictures while there is one
  show(mover, isShown) {
    this.movers[isShown ? "add" : "delete"](mover);
    this.controls.hidden = !this.movers.size;
    if (!this.movers.size) return this.stop();
    if (!isShown) return;
    const { svg } = mover.chart;
    const place = svg.closest("#pictures") ?? svg.parentNode;
    if (this.controls.parentNode !== place) place.append(this.controls);
    const titles = mover.constructor.sliders;
    this.played = Object.keys(titles)[0];
    for (const [name, { label, title, range }] of Object.entries(this.sliders)) {
      label.hidden = !(name in titles);
      title.textContent = `${titles[name]}: `;
      range.setAttribute("aria-label", `${titles[name]}, tokens`);
    }
    this.most = Math.max(...[...this.movers].map(each => each.last));
    if (this.kind !== mover.constructor) {  // a newly opened view starts at a position that shows something
      this.kind = mover.constructor;
      Object.assign(this.values, mover.start());
    }
    for (const [name, value] of Object.entries(this.values)) {
      this.set(name, Math.min(Math.max(value, LEAST[name]), this.most));
    }
  }
}

// Points that run along curves with the distance; the first one can be dragged
class Marks {
  // colours  one for each point;  last  the largest distance
  constructor(chart, colours, last) {
    [this.chart, this.last] = [chart, last];
    this.points = colours.map(colour => ({
      dot: node(chart.svg, "circle", { r: 6, class: `dot ${colour} mark` }),
      label: node(chart.svg, "text", { class: `label ${colour}` }),
    }));
  }

  // Moves each point to the distance and its score; x and y stay inside of the axes
  move(distance, scores) {
    const { xs, ys, box } = this.chart;
    const heights = [];
    this.points.forEach(({ dot, label }, i) => {
      const [x, y] = [xs.at(distance), ys.at(scores[i])];
      const isInside = x >= box.left - 1 && x <= box.right + 1;
      for (const each of [dot, label]) each.setAttribute("visibility", isInside ? "visible" : "hidden");
      dot.setAttribute("cx", x);
      dot.setAttribute("cy", y);
      label.textContent = `q · k = ${scores[i].toFixed(2)}`;
      label.setAttribute("x", Math.min(x + 9, box.right - label.textContent.length * TEXT));
      let height = Math.min(Math.max(y - 8, box.top + 12), box.bottom - 4);
      if (heights.some(other => Math.abs(other - height) < 14)) height += height < heights[0] ? -14 : 14;
      heights.push(height);
      label.setAttribute("y", height);
    });
  }

  // Whether a pixel is on the point that is dragged
  isAt(x, y) {
    const { dot } = this.points[0];
    return Math.hypot(x - dot.getAttribute("cx"), y - dot.getAttribute("cy")) < 24;
  }

  drag(x) {
    motion.stop();
    const distance = this.chart.xs.back(x);
    motion.set("distance", Math.round(Math.min(Math.max(distance, 1), this.last)));
  }
}

// Two hands of a dial as the path of an SVG
function hand([x, y], radius, angle) {
  return `M${x} ${y}L${x + radius * Math.cos(angle)} ${y - radius * Math.sin(angle)}`;
}

// A line in its colour with its name, for each hand
function key(svg, hands) {
  let x = 4;
  for (const [name, colour] of hands) {
    node(svg, "line", { x1: x, x2: x + 16, y1: 10, y2: 10, class: `hand ${colour}` });
    node(svg, "text", { x: x + 20, y: 14 }, name);
    x += 34 + name.length * TEXT;
  }
  return x;
}

const motion = new Motion();
const MOVERS = {};  // kind of a moving picture -> the class that draws it
