// Sends the values of the controls and shows the answer; the server keeps no state.
"use strict";

const one = (selector, within = document) => within.querySelector(selector);
const every = (selector, within = document) => [...within.querySelectorAll(selector)];
const charts = Object.fromEntries(["a", "b"].map(side => [side, new Chart(one(`#plot-${side}`))]));
const FILES = { "Numbers (CSV)": "numbers.csv", "Figure (HTML)": "figure.html",
                "Config for transformers (JSON)": "config.json" };
const pasted = one("#a-model").lastElementChild.value;
const queue = [];  // changes of controls; the first one is being drawn
let fields = Object.fromEntries(new URLSearchParams(location.search));
let last = null;  // the last answer with a state

function make(tag, attributes, text = "") {
  const made = Object.assign(document.createElement(tag), attributes);
  made.textContent = text;
  return made;
}

// A slider beside each number, and a line for errors below each control
for (const box of every("#controls input[data-most]")) {
  const { power, least = 0, most, step } = box.dataset;
  const slider = make("input", { type: "range", min: least, max: most, step });
  const words = { 10: ": as a power of ten", 2: ": as a power of two" }[power] ?? ": slider";
  slider.setAttribute("aria-label", box.labels[0].textContent + words);
  slider.addEventListener("input", event => {
    event.stopPropagation();
    const value = power ? power ** slider.value : Number(slider.value);
    box.value = power === "2" ? Math.round(value) : Number(value.toPrecision(4));
    box.dispatchEvent(new Event("input", { bubbles: true }));
  });
  box.slider = slider;
  box.after(slider);
}
for (const control of every("#controls :is([name], #factor):not([type=checkbox])")) {
  const line = make("p", { className: "error", id: `${control.id}-error` });
  line.dataset.of = control.name || control.id;
  line.setAttribute("role", "alert");
  (control.slider ?? control).after(line);
  control.setAttribute("aria-describedby", line.id);
}

// On a phone the controls scroll below the pictures: sets the height that these cover
new ResizeObserver(([{ target }]) => {
  document.documentElement.style.setProperty("--covered", `${target.offsetHeight}px`);
}).observe(one("#pictures"));

async function post(path, asked) {
  try {
    const got = await fetch(path, { method: "POST", body: JSON.stringify(asked) });
    return got.ok ? await got.json() : { errors: { view: await got.text() } };
  } catch {
    return { errors: { view: "the server does not answer: is rotary explore still running?" } };
  }
}

function change(name, value) {
  if (queue.length > 1 && queue.at(-1).name === name) queue.pop();
  queue.push({ name, value });
  if (queue.length === 1) run();
}

async function run() {
  const tellBusy = isBusy => one("main").setAttribute("aria-busy", isBusy);
  while (queue.length) {
    const long = setTimeout(tellBusy, 500, true);  // not while a slider moves and answers are quick
    const { name, value } = queue[0];
    if (name) fields[name] = value;
    let answer = await post("draw", { fields, changed: name });
    if (!last && !answer.pictures) {  // an invalid link: shows its error and the first view
      const errors = answer.errors;
      answer = { ...await post("draw", { fields: {}, changed: "" }), errors };
    }
    // A bad number in another control must not stop this one: that control goes back, with its error
    const errors = {};
    while (last && !answer.pictures) {
      const [bad] = Object.keys(answer.errors);
      if (bad === name || bad in errors || !(bad in fields)) break;  // twice: the server is gone
      Object.assign(errors, answer.errors);
      fields[bad] = last.fields[bad] ?? "";
      answer = await post("draw", { fields, changed: name });
    }
    queue.shift();
    clearTimeout(long);
    tellBusy(false);
    show({ ...answer, errors: { ...errors, ...answer.errors } });
  }
}

function tellErrors(errors) {
  for (const line of every(".error")) line.textContent = errors[line.dataset.of] ?? "";
  for (const control of every("#controls :is([name], #factor)")) {
    control.setAttribute("aria-invalid", (control.name || control.id) in errors);
  }
}

function show({ errors, ...answer }) {
  tellErrors(errors);
  if (!answer.pictures) return;
  last = answer;
  one("#certified").textContent = "";
  const configs = Object.entries(fields).filter(([name]) => name.endsWith(".config"));
  const waiting = queue.map(({ name, value }) => [name, value]);
  fields = { ...answer.fields, ...Object.fromEntries(configs), ...Object.fromEntries(waiting) };
  history.replaceState(null, "", answer.query ? `?${answer.query}` : location.pathname);
  one("#about").textContent = answer.text;
  one("main").dataset.group = answer.group;
  one(".check").hidden = answer.controls !== answer.figures;  // a view of two always has B
  for (const side of ["a", "b"]) showSide(side, answer);
  set({ ...answer.shown, ...Object.fromEntries(configs) });
}

function showSide(side, { pictures, query, shown, figures, controls: sides, no_config }) {
  const isShown = figures.includes(side);
  for (const id of [`picture-${side}`, `notes-${side}`]) one(`#${id}`).hidden = !isShown;
  one(`#side-${side}`).hidden = !sides.includes(side);
  if (!isShown) charts[side].still();
  const controls = one(`#side-${side}`);
  one(".pasted", controls).hidden = shown[`${side}.model`] !== pasted;
  const layers = shown[`${side}.layers`] ?? [];
  one(".layers", controls).hidden = !layers.length;
  one(`#${side}-layer`).replaceChildren(...layers.map(layer => make("option", {}, layer)));
  const picture = pictures[side];
  for (const id of [`picture-${side}`, `notes-${side}`]) one(`#${id}`).classList.toggle("stale", isShown && !picture);
  if (!picture) return;
  one(`#picture-${side} h2`).textContent = picture.title;
  one(`#words-${side}`).textContent = picture.words;
  charts[side].draw(picture, figures === "ab" ? pictures[side === "a" ? "b" : "a"] : picture);
  showTables(one(`#tables-${side}`), picture);
  const files = Object.entries(FILES).filter(([, file]) => file !== "config.json" || !no_config[side]);
  const links = query === null
    ? ["This config is too long for a link, and so for the files that a link holds."]
    : [make("a", { href: query ? `?${query}` : location.pathname }, "Link to this view"),
       ...files.map(([title, file]) =>
         make("a", { href: `download/${file}?${query}${side === "b" ? "&side=b" : ""}` }, title)),
       ...no_config[side] ? [`No config: ${no_config[side]}.`] : []];
  const save = make("button", { type: "button" }, "Picture (SVG)");
  save.addEventListener("click", () => {
    const data = encodeURIComponent(charts[side].svgText());
    make("a", { href: `data:image/svg+xml,${data}`, download: "rotary.svg" }).click();
  });
  one(`#links-${side}`).replaceChildren(...[...links, save].flatMap(each => [each, " "]));
}

// Puts values into the controls, except the one that the user types in or drags
function set(values) {
  const busy = queue.map(({ name }) => name);
  for (const [name, value] of Object.entries(values)) {
    for (const control of every(`[name="${name}"]`)) {
      if (control.type === "checkbox") control.checked = value;
      else if (control.type === "radio") control.checked = control.value === value;
      else if (!busy.includes(name) && control !== document.activeElement) control.value = value;
      place(control, Number(value), busy.includes(name));
    }
  }
  const factor = one("#factor"), value = values.context / (values["a.trained"] ?? NaN);
  if (factor !== document.activeElement) factor.value = Number(value.toFixed(2)) || "";
  place(factor, value, busy.includes("context"));
}

function place({ slider, dataset }, value, isBusy) {
  if (!slider || isBusy || slider === document.activeElement) return;
  slider.value = dataset.power ? Math.log(value) / Math.log(dataset.power) : value;
}

document.addEventListener("input", ({ target }) => {
  if (target.id === "factor") {
    const factor = Number(target.value.trim() || NaN), trained = last.shown["a.trained"];
    if (!Number.isFinite(factor)) return tellErrors({ factor: `factor must be a number, got '${target.value}'` });
    if (!trained) return tellErrors({ "a.trained": "fill in the trained length of A first" });
    one("#context").value = Math.round(trained * factor);
    change("context", one("#context").value);
  } else if (target.name) {
    change(target.name, target.type === "checkbox" ? (target.checked ? "1" : "") : target.value);
  }
});
document.addEventListener("focusout", () => setTimeout(() => {
  const hasError = every("#controls .error").some(line => line.textContent);
  if (last && !hasError && !queue.length) set(last.shown);
}));
one("#controls").addEventListener("submit", event => event.preventDefault());
one("#certify").addEventListener("click", async () => {
  one("#certified").textContent = "Searching…";
  const { words = "", errors = {} } = await post("base", { fields });
  one("#certified").textContent = words || Object.values(errors).join(" ");
});
change("", "");
