"use strict";
/* What every report uses: its data, elements, cards and the theme. */
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)}%`;
const minutes = (date) => date?.replace(/T(\d\d:\d\d)[^ ]*/g, " $1");
const joined = (parts) => parts.filter(Boolean).join(" · ");

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("--")) made.style.setProperty(name, value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** A titled list of facts, without those that are not known. */
function card(title, facts, attributes = {}) {
  const list = element("dl");
  for (const [name, value] of Object.entries(facts)) {
    if (value !== null && value !== undefined) list.append(element("dt", {}, name), element("dd", {}, String(value)));
  }
  return element("article", { class: "card", ...attributes }, element("h3", {}, title), list);
}

/** A table of texts; a cell may be an element. */
function table(headings, rows, kind = "words") {
  const head = element("tr", {}, ...headings.map((heading) => element("th", { scope: "col" }, heading)));
  const body = rows.map(([first, ...cells]) => element(
    "tr", {}, element("th", { scope: "row" }, first),
    ...cells.map((cell) => (cell instanceof Node ? cell : element("td", {}, String(cell ?? "–")))),
  ));
  return element("table", { class: kind }, element("thead", {}, head), element("tbody", {}, ...body));
}

/** Begin with the reader's theme; the button changes it and calls `redraw`. */
function startTheme(redraw = () => {}) {
  const set = (name) => {
    document.documentElement.dataset.theme = name;
    byId("theme").textContent = name === "dark" ? "Light" : "Dark";
  };
  set(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  byId("theme").addEventListener("click", () => {
    set(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    redraw();
  });
}
