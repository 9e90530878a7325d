// Writes the tables of a view below its words, and a config with a button that copies it.
"use strict";

function showTables(place, { tables, config }) {
  place.replaceChildren(...(config ? configOf(config) : []), ...tables.map(tableOf));
}

function tableOf({ header, rows }) {
  const frame = make("div", { className: "table", tabIndex: 0 });
  frame.setAttribute("role", "region");
  frame.setAttribute("aria-label", header.join(", "));
  const table = frame.appendChild(make("table", {}));
  const line = (texts, tag) => {
    const made = make("tr", {});
    made.append(...texts.map(text => make(tag, {}, text)));
    return made;
  };
  const [head, body] = ["thead", "tbody"].map(tag => table.appendChild(make(tag, {})));
  head.append(line(header, "th"));
  body.append(...rows.map(row => line(row, "td")));
  return frame;
}

function configOf(config) {
  const button = make("button", { type: "button" }, "Copy the config");
  const text = make("pre", { className: "config", tabIndex: 0 }, config);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(config);
      button.textContent = "Copied";
    } catch {  // the browser does not let the page write to the clipboard
      getSelection().selectAllChildren(text);
      button.textContent = "Selected: press Ctrl+C";
    }
  });
  return [make("p", {}, "Put these keys into config.json:"), text, button];
}
