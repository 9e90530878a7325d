// Draws the figures of figures.py as SVG: curves, lines, a band, rows of cells, over two axes.
"use strict";

const RIGHT = 14, BOTTOM = 42, LEFT = 60;  // pixels
const TEXT = 6.6, BOLD = 7.4;  // the width of a letter

function node(parent, tag, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text) made.textContent = text;
  return parent.appendChild(made);
}

function short(value) {  // a number on an axis
  const power = Math.round(Math.log10(Math.abs(value)));
  if (value && (power > 5 || power < -3) && Math.abs(value / 10 ** power - 1) < 1e-9) {
    return "10" + [...String(power)].map(sign => "⁰¹²³⁴⁵⁶⁷⁸⁹"[sign] ?? "⁻").join("");
  }
  return value.toLocaleString("en", { maximumSignificantDigits: 6 });
}

function long(value) {  // a number beside a point
  return value && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e15)
    ? value.toExponential(4) : value.toLocaleString("en", { maximumSignificantDigits: 6 });
}

// From a value to a pixel and back, and the values that are written beside the axis
function scale(axis, values, from, to, ends) {
  const into = axis.is_log ? Math.log10 : value => value;
  const out = axis.is_log ? value => 10 ** value : value => value;
  const all = values.filter(value => Number.isFinite(value) && (value > 0 || !axis.is_log));
  let [low, high] = (ends ?? [all.reduce((a, b) => Math.min(a, b), Infinity),
                              all.reduce((a, b) => Math.max(a, b), -Infinity)]).map(into);
  const size = Math.max(Math.abs(low), Math.abs(high), axis.is_log ? 1 : 0);
  const isFlat = high - low <= 1e-9 * size;  // up to rounding, so ticks would all be one number
  const spare = ends ? 0 : isFlat ? 0.5 : (high - low) * 0.03;
  [low, high] = [low - spare, high + spare];
  const at = value => from + (into(value) - low) / (high - low) * (to - from);
  const back = pixel => out(low + (pixel - from) / (to - from) * (high - low));
  const room = Math.max(2, Math.floor(Math.abs(to - from) / 62));
  const ticks = [];
  if (axis.is_log && high - low >= 1.5) {
    const step = Math.ceil((high - low) / room);
    for (let power = Math.ceil(low); power <= high; power += step) ticks.push(10 ** power);
  } else {
    const [first, last] = [out(low), out(high)];
    const size = 10 ** Math.floor(Math.log10((last - first) / room));
    const step = [1, 2, 5, 10].map(times => times * size).find(s => (last - first) / s <= room);
    for (let n = Math.ceil(first / step - 1e-9); n * step <= last + 1e-9 * step; n++) {
      ticks.push(Number((n * step).toPrecision(12)));
    }
  }
  if (axis.is_log && ticks.length < 2) {  // too narrow for powers of ten, too wide for even steps
    const fine = Array.from({ length: 3 * Math.ceil(high - low + 2) }, (_, i) => [1, 2, 5][i % 3] * 10 ** (Math.floor(low) + Math.floor(i / 3)))
      .filter(tick => tick >= out(low) && tick <= out(high));
    const each = Math.ceil(fine.length / room), power = fine.findIndex(tick => Number.isInteger(Math.log10(tick)));
    if (fine.length > ticks.length) ticks.splice(0, ticks.length, ...fine.filter((_, i) => (i - power) % each === 0));
  }
  return { at, back, ticks };
}

// Ends that hold those of two axes; null: ends of the data
function widest(one, other) {
  return one.ends && [Math.min(one.ends[0], other.ends[0]), Math.max(one.ends[1], other.ends[1])];
}

// Blue over grey to yellow: neighbours and ends differ for colour-blind people too
function shade(share) {
  const stops = [[0, 32, 77], [124, 123, 120], [255, 234, 70]];
  const [one, other] = share < 0.5 ? stops.slice(0, 2) : stops.slice(1);
  const part = share < 0.5 ? share * 2 : share * 2 - 1;
  return `rgb(${one.map((value, i) => Math.round(value + (other[i] - value) * part))})`;
}

class Chart {
  constructor(svg) {
    this.svg = svg;
    this.index = null;  // index of the point whose numbers are shown
    this.moving = null;
    svg.tabIndex = 0;
    this.said = svg.parentNode.appendChild(document.createElement("p"));  // the numbers, read aloud
    this.said.className = "unseen";
    this.said.setAttribute("role", "status");
    new ResizeObserver(() => this.render()).observe(svg);
    svg.addEventListener("pointermove", event => {
      if (this.isHeld) this.moving.marks.drag(event.offsetX);
      else this.hover(event);
      svg.classList.toggle("grab", this.moving?.marks?.isAt(event.offsetX, event.offsetY) ?? false);
    });
    svg.addEventListener("pointerleave", () => this.tell(null));
    svg.addEventListener("pointercancel", () => this.isHeld = false);
    svg.addEventListener("pointerdown", event => {
      this.isHeld = this.moving?.marks?.isAt(event.offsetX, event.offsetY) ?? false;
      if (this.isHeld) {
        this.start = null;
        this.tell(null);
        return svg.setPointerCapture(event.pointerId);
      }
      const isOver = this.box && event.offsetX >= this.box.left - LEFT && event.offsetY >= this.box.top - 40;
      this.start = event.pointerType === "mouse" && isOver ? event.offsetX : null;
    });
    svg.addEventListener("pointerup", event => {
      if (this.isHeld) this.isHeld = false;
      else this.zoomTo(event.offsetX);
    });
    svg.addEventListener("dblclick", () => this.reset());
    svg.addEventListener("keydown", event => this.key(event));
  }

  // beside: a picture that is compared with this one; both get axes that hold both
  draw(picture, beside = picture) {
    const [old, { x, y }] = [this.picture?.figure, picture.figure];
    const isSame = old?.x.title === x.title && old.x.is_log === x.is_log && old.y.title === y.title;
    const isSeen = at => at >= this.zoom?.[0] && at <= this.zoom?.[1];
    if (!isSame || !Object.values(picture.columns)[0].some(isSeen)) this.zoom = null;
    [this.picture, this.beside] = [picture, beside];
    this.index = null;
    this.svg.setAttribute("role", "img");
    this.svg.setAttribute("aria-label", picture.words);
    this.svg.classList.toggle("low", picture.figure.rows.length > 0);
    this.still();
    const { moving } = picture.figure;
    if (moving) this.moving = new MOVERS[moving.kind](this, moving);
    this.render();
    if (moving) motion.show(this.moving, true);
  }

  // Ends the motion of what is shown
  still() {
    if (this.moving) motion.show(this.moving, false);
    this.moving = null;
  }

  reset() {
    this.zoom = null;
    this.render();
  }

  zoomTo(pixel) {
    if (this.start == null || !this.xs || Math.abs(pixel - this.start) < 8) return;
    this.zoom = [this.start, pixel].sort((a, b) => a - b).map(this.xs.back);
    this.render();
  }

  render() {
    const [width, height] = [this.svg.clientWidth, this.svg.clientHeight];
    if (!this.picture || !width || !height) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren();
    const { picture, beside } = this, { figure, columns } = picture;
    this.x = Object.values(columns)[0];
    this.xs = null;
    const isCells = figure.rows.length > 0;
    const box = { left: isCells ? 14 : LEFT, right: width - RIGHT, top: 0, bottom: height - BOTTOM };
    Object.assign(box, this.moving?.place(width, height));
    if (figure.bars.length) this.bars(figure, { ...box, left: 8 });
    if (figure.curves.length || isCells) {
      box.top = this.legend(box) + 8;
      if (isCells) box.bottom = Math.min(box.bottom, box.top + 130 * figure.rows.length);
      this.box = box;
      const ends = this.zoom ?? (isCells ? [-0.5, this.x.length - 0.5] : null);
      const xs = [picture, beside].flatMap(each => Object.values(each.columns)[0]);
      this.xs = scale(figure.x, xs, box.left, box.right, ends);
      this.xs.ticks = this.xs.ticks.filter(Number.isInteger);  // tokens, pairs and channels are counted
      this.axis(figure.x, this.xs, box, true);
      if (isCells) this.cells(figure.rows, columns, box);
      else this.curves(figure, columns, box, ends);
    }
    this.moving?.draw();
    this.moving?.turn(motion.values);
    this.tip = node(this.svg, "g", { class: "tip" });
    if (this.index != null) this.tell(this.index);
  }

  legend(box) {
    const { figure } = this.picture;
    let [x, y] = [box.left, box.top + (figure.rows.length ? 14 : 30)];
    if (!figure.rows.length) node(this.svg, "text", { x: box.left - LEFT + 4, y: box.top + 14 }, figure.y.title);
    const named = figure.curves.length > 1 ? figure.curves.map(curve => [curve.name, curve]) : [];
    if (figure.band) named.push([figure.band.label, null]);
    for (const [name, curve] of named) {
      const width = 34 + name.length * TEXT;
      if (x > box.left && x + width > box.right) [x, y] = [box.left, y + 16];
      if (curve) node(this.svg, "line", { x1: x, x2: x + 20, y1: y - 4, y2: y - 4, class: `curve ${curve.colour} ${curve.dash}` });
      else node(this.svg, "rect", { x, y: y - 10, width: 20, height: 12, class: "band" });
      node(this.svg, "text", { x: x + 25, y }, name);
      x += width;
    }
    if (figure.rows.length) {
      const last = this.x.length && Math.max(...this.picture.columns.reads);
      node(this.svg, "text", { x, y }, "pair 0");
      for (let i = 0; i < 24; i++) node(this.svg, "rect", { x: x + 44 + 5 * i, y: y - 10, width: 5, height: 11, fill: shade(i / 23) });
      node(this.svg, "text", { x: x + 170, y }, short(last));
    }
    return named.length || figure.rows.length ? y : box.top + 14;
  }

  axis(axis, { at, ticks }, box, isX) {
    const share = value => axis.is_share ? `${Math.round(value * 100)}%` : short(value);
    for (const value of ticks) {
      const place = at(value);
      if (isX) {
        if (!this.picture.figure.rows.length) node(this.svg, "line", { x1: place, x2: place, y1: box.top, y2: box.bottom, class: "grid" });
        const x = Math.min(place, this.svg.clientWidth - share(value).length * TEXT / 2 - 2);
        node(this.svg, "text", { x, y: box.bottom + 16, "text-anchor": "middle", class: "tick" }, share(value));
      } else {
        node(this.svg, "line", { x1: box.left, x2: box.right, y1: place, y2: place, class: "grid" });
        node(this.svg, "text", { x: box.left - 6, y: place + 4, "text-anchor": "end", class: "tick" }, share(value));
      }
    }
    const middle = (box.left + box.right) / 2, room = box.right - box.left + LEFT;
    const title = axis.title.length * TEXT > room ? axis.title.replace(/, samples.*/, "") : axis.title;
    if (isX) node(this.svg, "text", { x: middle, y: box.bottom + 35, "text-anchor": "middle" }, title);
  }

  curves(figure, columns, box, ends) {
    const values = [this.picture, this.beside].flatMap(({ figure, columns }) => {
      const x = Object.values(columns)[0];
      const isSeen = (_, i) => !ends || (x[i] >= ends[0] && x[i] <= ends[1]);
      return [...figure.curves.flatMap(curve => columns[curve.y].filter(isSeen)),
              ...figure.lines.filter(line => line.axis === "y").map(line => line.at)];
    });
    const isNamed = figure.lines.some(line => line.axis === "y" && line.label);
    const top = box.top + (isNamed && !figure.y.ends ? 16 : 0);  // room for the label of a line at the top
    const ys = scale(figure.y, values, box.bottom, top, widest(figure.y, this.beside.figure.y));
    this.ys = ys;
    this.axis(figure.y, ys, box, false);
    const inside = node(this.svg, "svg", { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top, viewBox: `${box.left} ${box.top} ${box.right - box.left} ${box.bottom - box.top}` });
    if (figure.band) {
      const [start, stop] = [this.xs.at(figure.band.start), this.xs.at(figure.band.stop)];
      node(inside, "rect", { x: start, y: box.top, width: Math.max(stop - start, 1), height: box.bottom - box.top, class: "band" });
    }
    for (const curve of figure.curves) {
      let path = "", isOpen = false;
      const points = columns[curve.y].map((value, i) => [this.xs.at(this.x[i]), value == null ? NaN : ys.at(value)]);
      const isShown = points.map(point => point.every(Number.isFinite));
      points.forEach(([px, py], i) => {
        const isAlone = !isShown[i - 1] && !isShown[i + 1];  // no line shows it
        if (isShown[i]) path += `${isOpen ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`;
        if (isShown[i] && (curve.has_dots || isAlone)) {
          node(inside, "circle", { cx: px, cy: py, r: isAlone ? 4 : 2.2, class: `dot ${curve.colour}` });
        }
        isOpen = isShown[i];
      });
      const thin = this.x.length > 300 ? "thin" : "";
      node(inside, "path", { d: path, class: `curve ${thin} ${curve.colour} ${curve.dash}` });
    }
    const lines = figure.lines.map(line => ({ ...line, place: (line.axis === "x" ? this.xs : ys).at(line.at) }));
    const heights = lines.filter(line => line.axis === "y").map(({ place }) => place);
    const taken = [];  // heights of labels
    const isFree = y => y < box.bottom && !taken.some(other => Math.abs(other - y) < 13)
      && !heights.some(height => Math.abs(height - y + 4) < 7);
    for (const { place, ...line } of lines.sort((one, other) => one.place - other.place)) {
      const ofX = { x1: place, x2: place, y1: box.top, y2: box.bottom };
      const ofY = { x1: box.left, x2: box.right, y1: place, y2: place };
      node(inside, "line", { ...(line.axis === "x" ? ofX : ofY), class: `curve dash ${line.colour}` });
      const where = line.axis === "x" ? { x: place - 4, y: box.bottom - 6, "text-anchor": "end" } : { x: box.left + 6, y: [place - 5, place + 14].find(isFree) ?? place - 5 };
      if (line.axis === "y" && line.label) taken.push(where.y);
      node(inside, "text", { ...where, class: `label ${line.colour}` }, line.label);
    }
    for (const point of figure.points) {
      const [px, py] = [this.xs.at(point.x), ys.at(point.y)];
      node(inside, "path", { d: `M${px} ${py - 6}l6 6-6 6-6-6Z`, class: "dot red" });
      const isLeft = px > (box.left + box.right) / 2;
      node(inside, "text", { x: px + (isLeft ? -10 : 10), y: Math.min(py - 8, box.bottom - 22), "text-anchor": isLeft ? "end" : "start", class: "label red" }, point.label);
    }
  }

  cells(rows, columns, box) {
    const size = (box.bottom - box.top) / rows.length;
    const axes = ["var(--blue)", "var(--orange)", "var(--green)", "var(--purple)"];
    const colour = (row, value, last) => row.of === "axis" && last < axes.length ? axes[value] : shade(value / last);
    const wide = this.xs.at(1) - this.xs.at(0);
    rows.forEach((row, number) => {
      const top = box.top + number * size, last = Math.max(...columns[row.column], 1);
      node(this.svg, "text", { x: box.left, y: top + 14 }, row.name);
      for (let value = 0; row.of === "axis" && value <= last; value++) {
        const x = box.left + 12 + row.name.length * TEXT + 30 * value;
        node(this.svg, "rect", { x, y: top + 4, width: 11, height: 11, fill: colour(row, value, last) });
        node(this.svg, "text", { x: x + 15, y: top + 14 }, String(value));
      }
      columns[row.column].forEach((value, i) => {
        const left = this.xs.at(i - 0.5);
        if (value == null || left < box.left - 1 || left + wide > box.right + 1) return;
        node(this.svg, "rect", { x: left, y: top + 20, width: wide + 0.3, height: size - 26, class: "cell", fill: colour(row, value, last) });
      });
    });
  }

  // Lengths over one axis, each below its name; those that end before the lines are red
  bars({ x, bars, lines }, box) {
    const xs = scale(x, [], box.left, box.right, widest(x, this.beside.figure.x)), size = (box.bottom - 8) / bars.length;
    this.axis(x, xs, box, true);
    for (const line of lines) {
      node(this.svg, "line", { x1: xs.at(line.at), x2: xs.at(line.at), y1: 4, y2: box.bottom, class: `curve dash ${line.colour}` });
    }
    bars.forEach(({ name, length, text, is_short }, i) => {
      const top = 8 + size * i, right = xs.at(Math.max(length, 1));
      node(this.svg, "rect", { x: box.left, y: top + 17, width: right - box.left, height: Math.max(size - 30, 4), class: `bar ${is_short ? "red" : "blue"}` });
      const words = `${name}: `, isLong = (words.length + text.length) * TEXT > box.right - box.left;
      const title = node(this.svg, "text", { x: box.left, y: top + 12 }, isLong ? "" : words);
      if (isLong) node(title, "tspan", {}, name.replace(/ \(.*\)/, "") + ": ");
      node(title, "tspan", { class: "strong" }, text);
      const share = (box.right - box.left) / title.getComputedTextLength();
      if (share < 1) title.style.fontSize = `${share * parseFloat(getComputedStyle(title).fontSize)}px`;
    });
  }

  hover(event) {
    if (!this.xs) return;
    const wanted = event.offsetX;
    let best = null, least = 40;
    this.x.forEach((value, i) => {
      const away = Math.abs(this.xs.at(value) - wanted);
      if (away < least) [best, least] = [i, away];
    });
    this.tell(best, event.offsetY);
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.reset();
    if (!step || !this.xs) return;
    event.preventDefault();
    this.said.textContent = this.tell(Math.min(Math.max((this.index ?? -1) + step, 0), this.x.length - 1)).join(", ");
  }

  // Writes the numbers of one point beside it, and returns them as lines
  tell(index, pixel = null) {
    this.index = index;
    if (!this.tip) return;
    this.tip.replaceChildren();
    if (index == null || !this.xs) return;
    const { figure, columns } = this.picture, box = this.box;
    const lines = [`${Object.keys(columns)[0]} ${long(this.x[index])}`];
    for (const { y, name } of figure.curves) {
      const value = columns[y][index];
      if (value == null) continue;
      lines.push(`${name}: ${long(value)}`);
      const [cx, cy] = [this.xs.at(this.x[index]), this.ys.at(value)];
      if (Number.isFinite(cx) && Number.isFinite(cy)) node(this.tip, "circle", { cx, cy, r: 4 });
    }
    for (const { column, of, name } of figure.rows) {
      if (columns[column][index] != null) lines.push(`${name}: ${of} ${columns[column][index]}`);
    }
    const width = Math.max(...lines.map(line => line.length)) * TEXT + 12;
    const at = Math.max(this.xs.at(this.x[index]), box.left);  // 0 is far left of a log axis
    const left = at + 10 + width > box.right ? Math.max(at - 10 - width, 0) : at + 10;
    const top = Math.min(Math.max((pixel ?? box.top + 30) - 20, box.top), box.bottom - 16 * lines.length - 8);
    node(this.tip, "rect", { x: left, y: top, width, height: 16 * lines.length + 6, rx: 4 });
    lines.forEach((line, n) => node(this.tip, "text", { x: left + 6, y: top + 15 + 16 * n }, line));
    return lines;
  }

  // Returns the picture as a file that needs no style sheet
  svgText() {
    const copy = this.svg.cloneNode(true);
    const [from, to] = [this.svg, copy].map(each => [each, ...each.querySelectorAll("*")]);
    from.forEach((each, i) => {
      const style = getComputedStyle(each);
      for (const name of ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "stroke-linecap",
                          "paint-order", "opacity", "font-family", "font-size", "font-weight"]) {
        to[i].setAttribute(name, style.getPropertyValue(name));
      }
    });
    copy.style.background = getComputedStyle(document.body).backgroundColor;
    return new XMLSerializer().serializeToString(copy);
  }
}
