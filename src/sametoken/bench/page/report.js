// Okabe and Ito's colours, which colour-blind readers can tell apart.
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d00", "#7a7a7a"];
const NO_SPREAD = "one run: no spread known";
const state = { view: "overview", filters: {}, baseline: null };

/* ---- words and numbers ---- */

function shown(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  return value.toFixed(size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : 3);
}

const distinct = (values) => [...new Map(values.map((v) => [JSON.stringify(v), v])).values()];
const keyOf = (object) => JSON.stringify(Object.values(object));

/* ---- series and workloads ---- */

const dimensions = { run: "run", ...data.engine, ...data.workload };

for (const cell of data.cells) {
  cell.values = { run: cell.run, ...cell.engine, ...cell.workload };
  cell.seriesKey = JSON.stringify([cell.run, keyOf(cell.engine)]);
  cell.workloadKey = keyOf(cell.workload);
}

const varying = Object.keys(dimensions).filter(
  (name) => distinct(data.cells.map((cell) => cell.values[name])).length > 1,
);
// Plain decoding first within its run: it is what drafters are measured by.
const inOrder = [...data.cells].sort((a, b) =>
  a.run === b.run ? Number(a.engine.drafter !== "none") - Number(b.engine.drafter !== "none") : 0);
const series = distinct(inOrder.map((cell) => cell.seriesKey)).map((key, index) => {
  const cell = data.cells.find((one) => one.seriesKey === key);
  return { key, run: cell.run, engine: cell.engine, colour: COLOURS[index % COLOURS.length], label: seriesLabel(cell) };
});

const seriesFor = (cell) => series.find((one) => one.key === cell.seriesKey);

function drafts(engine) {
  return engine.drafter === "none" ? "plain" : `${engine.drafter}, k=${engine.num_speculative_tokens}`;
}

function engineLabel(engine) {
  const parts = [];
  if (varying.includes("model")) parts.push(engine.model);
  if (varying.includes("drafter") || varying.includes("num_speculative_tokens")) parts.push(drafts(engine));
  for (const name of ["tensor_parallel_size", "dtype"]) {
    if (varying.includes(name)) parts.push(`${data.engine[name]} ${engine[name]}`);
  }
  return parts.join(", ");
}

function seriesLabel(cell) {
  const engine = engineLabel(cell.engine);
  if (data.runs.length === 1) return engine || cell.run;
  return engine ? `${cell.run}: ${engine}` : cell.run;
}

function workloadLabel(workload) {
  const names = Object.keys(data.workload).filter((name) => workload[name] !== null && workload[name] !== undefined);
  const telling = names.filter((name) => varying.includes(name));
  return (telling.length ? telling : ["concurrency"].filter((name) => names.includes(name)))
    .map((name) => (name === "benchmark" || name === "dataset" ? workload[name] : `${data.workload[name]} ${workload[name]}`))
    .join(", ") || "all at once";
}

const visibleCells = () =>
  data.cells.filter((cell) =>
    Object.entries(state.filters).every(([name, wanted]) => JSON.stringify(cell.values[name] ?? null) === wanted),
  );
const seriesOf = (cells) => series.filter((one) => cells.some((cell) => cell.seriesKey === one.key));
const workloadsOf = (cells) =>
  distinct(cells.map((cell) => cell.workloadKey)).map((key) => {
    const cell = cells.find((one) => one.workloadKey === key);
    return { key, label: workloadLabel(cell.workload) };
  });

/** The cell that a cell is compared with: of the baseline, under the same workload. */
function baselineCell(cell) {
  const [kind, name] = state.baseline;
  const candidates = data.cells.filter((one) => one.workloadKey === cell.workloadKey);
  if (kind === "series") return candidates.find((one) => one.seriesKey === name);
  return candidates.find((one) => one.run === name && keyOf(one.engine) === keyOf(cell.engine));
}

/** How a cell's number differs from the baseline's; null where there is nothing to compare. */
function change(cell, metric) {
  const other = baselineCell(cell);
  const [value, base] = [cell.numbers[metric.name], other && other.numbers[metric.name]];
  if (!other || other === cell || value === undefined || base === undefined || base === 0) return null;
  const share = value / base - 1;
  const [mine, theirs] = [range(cell, metric.name), range(other, metric.name)];
  const within = mine && theirs && mine[0] <= theirs[1] && theirs[0] <= mine[1];
  const good = metric.better === "higher" ? share > 0 : share < 0;
  if (!mine || !theirs) return { share, kind: "unknown" };
  return { share, kind: share === 0 || within ? "same" : good ? "better" : "worse" };
}

function range(cell, name) {
  const values = cell.repeats[name];
  return values ? [Math.min(...values), Math.max(...values)] : null;
}

const metricsHere = (cells) => {
  const there = data.metrics.filter((metric) => cells.some((cell) => metric.name in cell.numbers));
  if (data.metrics.some(({ group }) => group === state.view)) return there.filter(({ group }) => group === state.view);
  const main = ["tokens_per_second", "goodput", "num_failed", "ttft_median", "ttft_p99", "tpot_mean", "e2e_median", "acceptance_length"];
  return there.filter((metric) => main.includes(metric.name));
};

/* ---- the table ---- */

function drawComparison(cells) {
  const [columns, metrics] = [seriesOf(cells), metricsHere(cells)];
  const head = element("tr", {}, element("th", { scope: "col" }, "metric"));
  for (const one of columns) {
    const run = isBaseline(one) ? element("span", {}, "baseline") : null;
    head.append(element("th", { scope: "col", "--series": one.colour }, element("i", { class: "swatch" }), one.label, run));
  }
  const table = element("table", {}, element("thead", {}, head));
  for (const workload of workloadsOf(cells)) {
    const body = element("tbody");
    const title = element("th", { scope: "rowgroup", colspan: columns.length + 1 }, workload.label);
    body.append(element("tr", { class: "workload" }, title));
    const here = cells.filter((cell) => cell.workloadKey === workload.key);
    for (const metric of metrics) {
      if (!here.some((cell) => metric.name in cell.numbers)) continue;
      const name = metric.unit ? `${metric.label} (${metric.unit})` : metric.label;
      const row = element("tr", {}, element("th", { scope: "row" }, name));
      for (const one of columns) row.append(numberCell(here.find((cell) => cell.seriesKey === one.key), metric));
      body.append(row);
    }
    table.append(body);
  }
  byId("comparison").replaceChildren(cells.length ? table : element("p", {}, "Nothing matches the filters."));
}

function numberCell(cell, metric) {
  const value = cell && cell.numbers[metric.name];
  if (value === undefined) return element("td", {}, "–");
  const made = element("td", {
    "data-metric": metric.name,
    "data-run": cell.run,
    "data-engine": JSON.stringify(cell.engine),
    "data-workload": JSON.stringify(cell.workload),
    "data-value": JSON.stringify(value),
  }, shown(value));
  const changed = change(cell, metric);
  if (changed) {
    const sign = changed.share > 0 ? "+" : changed.share < 0 ? "−" : "±";
    const words = { same: "within the spread", unknown: NO_SPREAD }[changed.kind] ?? changed.kind;
    const mark = { same: " ≈", better: " ✓", worse: " ✗", unknown: "" }[changed.kind];
    made.append(element(
      "span",
      { class: `delta ${changed.kind}`, title: words, "data-change": JSON.stringify(changed.share) },
      `${sign}${percent(Math.abs(changed.share))}${mark}`,
    ));
    if (changed.kind === "unknown") made.append(element("small", {}, NO_SPREAD));
  }
  const spread = range(cell, metric.name);
  if (spread) made.append(element("small", {}, `${shown(spread[0])} … ${shown(spread[1])}`));
  return made;
}

function isBaseline(one) {
  const [kind, name] = state.baseline;
  return kind === "series" ? one.key === name : one.run === name && data.runs.length > 1;
}

/* ---- charts ---- */

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function layout(extra) {
  const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line"), automargin: true };
  const { xaxis = {}, yaxis = {}, ...rest } = extra;
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("--ink"), family: "system-ui, DejaVu Sans, sans-serif", size: 13 },
    margin: { t: 10, r: 10, b: 45, l: 60 },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    hoverlabel: { bgcolor: colour("--panel"), font: { color: colour("--ink") } },
    xaxis: { ...axis, ...xaxis },
    yaxis: { ...axis, ...yaxis },
    ...rest,
  };
}

/** A text, or texts, that Plotly shows as they are: it reads markup in them. */
function plain(value) {
  if (typeof value === "string") return value.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
  return Array.isArray(value) ? value.map(plain) : value;
}

function draw(id, given, extra) {
  const traces = given.map((trace) => {
    const texts = ["name", "text", "hovertext", "x"].filter((key) => key in trace);
    return { ...trace, ...Object.fromEntries(texts.map((key) => [key, plain(trace[key])])) };
  });
  Plotly.react(byId(id), traces, layout(extra), { displaylogo: false, responsive: true, displayModeBar: "hover" });
}

const titled = (text, more = {}) => ({ title: { text }, ...more });

function drawPareto(cells) {
  const points = cells
    .filter((cell) => cell.numbers.tpot_median && cell.numbers.tokens_per_second)
    .map((cell) => ({ cell, x: 1000 / cell.numbers.tpot_median, y: cell.numbers.tokens_per_second }));
  const traces = seriesOf(points.map((point) => point.cell)).map((one) => {
    const mine = points.filter((point) => point.cell.seriesKey === one.key);
    mine.sort((a, b) => (a.cell.workload.concurrency ?? 0) - (b.cell.workload.concurrency ?? 0));
    return {
      type: "scatter", mode: "lines+markers+text", name: one.label,
      x: mine.map((point) => point.x), y: mine.map((point) => point.y),
      text: mine.map((point) => String(point.cell.workload.concurrency ?? "")),
      textposition: "top center", textfont: { size: 11 },
      hovertext: mine.map((point) => workloadLabel(point.cell.workload)),
      line: { color: one.colour }, marker: { color: one.colour, size: 9 },
    };
  });
  const front = points
    .filter((a) => !points.some((b) => b !== a && b.x >= a.x && b.y >= a.y && (b.x > a.x || b.y > a.y)))
    .sort((a, b) => a.x - b.x);
  traces.push({
    type: "scatter", mode: "lines", name: "frontier", hoverinfo: "skip",
    x: front.map((point) => point.x), y: front.map((point) => point.y),
    line: { color: "#888888", dash: "dot", width: 2 },
  });
  draw("pareto", traces, {
    xaxis: titled("tokens/s of one request", { rangemode: "tozero" }),
    yaxis: titled("tokens/s of all", { rangemode: "tozero" }),
  });
}

function drawBars(cells) {
  const metrics = metricsHere(cells);
  const chosen = fill("metric", metrics.map((metric) => [metric.name, metric.label]));
  const metric = metrics.find((one) => one.name === chosen);
  if (!metric) return draw("bars", [], {});
  const traces = seriesOf(cells).map((one) => {
    const mine = cells.filter((cell) => cell.seriesKey === one.key && metric.name in cell.numbers);
    const values = mine.map((cell) => cell.numbers[metric.name]);
    const spreads = mine.map((cell) => range(cell, metric.name));
    return {
      type: "bar", name: one.label, marker: { color: one.colour },
      x: mine.map((cell) => workloadLabel(cell.workload)), y: values,
      error_y: {
        type: "data", symmetric: false, thickness: 1.5, color: colour("--ink"), visible: spreads.some(Boolean),
        array: values.map((value, i) => (spreads[i] ? Math.max(0, spreads[i][1] - value) : 0)),
        arrayminus: values.map((value, i) => (spreads[i] ? Math.max(0, value - spreads[i][0]) : 0)),
      },
    };
  });
  draw("bars", traces, {
    barmode: "group", xaxis: { type: "category" }, yaxis: titled(metric.unit || metric.label, { rangemode: "tozero" }),
  });
}

function drawAcceptance(cells) {
  const drafting = cells.filter((cell) => cell.acceptance_per_position.length);
  toggle("acceptance-panel", drafting.length > 0);
  const dashes = ["solid", "dot", "dash", "longdash", "dashdot"];
  const workloads = workloadsOf(drafting);
  const several = workloads.length > 1;
  const label = (cell) => (several ? cellLabel(cell) : seriesFor(cell).label);
  draw("acceptance", drafting.map((cell) => {
    const place = workloads.findIndex((workload) => workload.key === cell.workloadKey);
    return {
      type: "scatter", mode: "lines+markers", name: label(cell),
      x: cell.acceptance_per_position.map((_, i) => i + 1),
      y: cell.acceptance_per_position.map((rate) => 100 * rate),
      line: { color: seriesFor(cell).colour, dash: dashes[place % dashes.length] },
    };
  }), {
    xaxis: titled("draft's position in the window", { dtick: 1 }), yaxis: titled("accepted, %", { range: [0, 102] }),
  });
  const width = Math.max(0, ...drafting.map((cell) => cell.acceptance_per_position.length));
  const positions = Array.from({ length: width }, (_, i) => i + 1);
  const rows = drafting.map((cell) => [label(cell), ...positions.map((position) => {
    const rate = cell.acceptance_per_position[position - 1];
    return rate === undefined ? null : element("td", {
      class: "rate", "--share": rate, "data-value": JSON.stringify(rate), "data-position": position, "data-run": cell.run,
      "data-engine": JSON.stringify(cell.engine), "data-workload": JSON.stringify(cell.workload),
    }, percent(rate));
  })]);
  byId("acceptance-table").replaceChildren(table(["position", ...positions.map(String)], rows, "numbers"));
}

/* ---- one request after the other ---- */

const cellLabel = (cell) => `${seriesFor(cell).label}, ${workloadLabel(cell.workload)}`;

/** Fill a choice, keeping what was chosen where it is still there. */
function fill(id, options) {
  const choice = byId(id);
  const before = choice.value;
  choice.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  if (options.some(([value]) => value === before)) choice.value = before;
  return choice.value;
}

function drawTimeline(cells) {
  const options = cells
    .filter((cell) => cell.timeline.length)
    .flatMap((cell) => distinct(cell.timeline.map((request) => request.run)).map((run) => [
      JSON.stringify([data.cells.indexOf(cell), run]),
      cellLabel(cell) + (distinct(cell.timeline.map((request) => request.run)).length > 1 ? `, run ${run + 1}` : ""),
    ]));
  toggle("timeline-panel", options.length > 0);
  if (!options.length) return;
  const [index, run] = JSON.parse(fill("timeline-cell", options));
  const requests = data.cells[index].timeline.filter((request) => request.run === run);
  const bar = (name, colour, from, to) => ({
    type: "bar", orientation: "h", name, marker: { color: colour },
    y: requests.map((_, i) => i + 1),
    base: requests.map(from),
    x: requests.map((request) => (to(request) === null ? 0 : to(request) - from(request))),
    hovertemplate: `${name}: %{x:.3f} s<extra>request %{y}</extra>`,
  });
  const sent = (request) => request.sent ?? request.arrival;
  const traces = [
    bar("waits to be sent", "#9aa5b5", (request) => request.arrival, sent),
    bar("until the first token", "#e69f00", sent, (request) => request.first),
    bar("tokens arrive", "#0072b2", (request) => request.first ?? sent(request), (request) => request.last),
  ].filter((trace) => trace.x.some((seconds) => seconds > 0));
  const failed = requests.map((request, i) => [request, i + 1]).filter(([request]) => request.error);
  if (failed.length) {
    traces.push({
      type: "scatter", mode: "markers", name: "failed", marker: { symbol: "x", color: "#b42318", size: 10 },
      x: failed.map(([request]) => sent(request)), y: failed.map(([, place]) => place),
      text: failed.map(([request]) => request.error), hoverinfo: "text",
    });
  }
  draw("timeline", traces, {
    barmode: "overlay", bargap: 0.25, xaxis: titled("seconds since the run began", { rangemode: "tozero" }),
    yaxis: titled("request", { autorange: "reversed", tickformat: "d", dtick: Math.max(1, Math.ceil(requests.length / 20)) }),
  });
}

const KINDS = {
  accepted: "draft that was accepted",
  corrected: "target's token after a draft that was refused",
  bonus: "target's token after drafts that all were accepted",
  own: "target's token; the drafts beside it are not known",
  plain: "step without drafts",
};

/** What a token of a window is. */
function kindOf(window, place) {
  if (place < window.num_accepted) return "accepted";
  if (window.num_drafts === null) return "own";
  if (window.num_drafts === 0) return "plain";
  return window.num_accepted < window.num_drafts ? "corrected" : "bonus";
}

function drawTokens(cells) {
  const options = cells.flatMap((cell) => cell.traces.map((trace, i) => [
    JSON.stringify([data.cells.indexOf(cell), i]), `${cellLabel(cell)}, ${trace.request}`,
  ]));
  toggle("tokens-panel", options.length > 0);
  if (!options.length) return;
  const [index, place] = JSON.parse(fill("trace", options));
  const trace = data.cells[index].traces[place];
  const counts = {};
  let refused = 0;
  const spans = trace.windows.map((window, number) => {
    const end = Math.min(trace.texts.length, window.first + window.num_accepted + 1);
    const lost = window.num_drafts === null ? 0 : window.num_drafts - window.num_accepted;
    refused += lost;
    const words = `window ${number + 1}: ${window.num_drafts ?? "unknown number of"} drafts, ${window.num_accepted} accepted`;
    const made = element("span", { class: "window", role: "group", "aria-label": words, title: words });
    for (let i = window.first; i < end; i++) {
      const kind = kindOf(window, i - window.first);
      counts[kind] = (counts[kind] || 0) + 1;
      made.append(element("span", { class: `token ${kind}`, "data-kind": kind, "--place": i - window.first + 1 }, visible(trace.texts[i])));
    }
    if (lost > 0) made.append(element("span", { class: "refused", "aria-hidden": "true" }, `−${lost}`));
    return made;
  });
  byId("tokens").replaceChildren(...spans);
  byId("token-legend").replaceChildren(
    ...Object.entries(KINDS).filter(([kind]) => counts[kind]).map(([kind, text]) =>
      element("li", {}, element("span", { class: `token ${kind}`, "--place": 2 }, `${counts[kind]}`), ` ${text}`)),
    ...(refused ? [element("li", {}, element("span", { class: "refused" }, "−n"), ` n drafts refused there (${refused} in all)`)] : []),
  );
  const tokens = trace.texts.length;
  byId("token-note").textContent =
    `${tokens} tokens in ${trace.windows.length} steps: ${(tokens / trace.windows.length).toFixed(2)} tokens per step. A line begins each window.`;
}

const visible = (text) => text.replace(/\n/g, "↵\n").replace(/\t/g, "→\t");

/* ---- the page ---- */

const toggle = (id, there) => byId(id).classList.toggle("empty", !there);

function refresh() {
  const cells = visibleCells();
  drawComparison(cells);
  for (const panel of document.querySelectorAll("main > .panel")) {
    panel.hidden = !panel.dataset.views.split(" ").includes(state.view);
  }
  const drawings = { pareto: drawPareto, bars: drawBars, acceptance: drawAcceptance, timeline: drawTimeline, tokens: drawTokens };
  for (const [id, drawing] of Object.entries(drawings)) {
    if (!byId(id).closest(".panel").hidden) drawing(cells);
  }
  for (const panel of document.querySelectorAll(".panel.empty")) panel.hidden = true;
}

function choice(label, options, onChange) {
  const select = element("select", { "data-filter": label }, ...options.map(([value, text]) => element("option", { value }, text)));
  select.addEventListener("change", () => { onChange(select.value); refresh(); });
  return element("label", {}, label, select);
}

function makeFilters() {
  const filters = varying.map((name) => {
    const values = distinct(data.cells.map((cell) => cell.values[name] ?? null));
    values.sort((a, b) => (typeof a === "number" && typeof b === "number" ? a - b : 0));
    const options = values.map((value) => [JSON.stringify(value), value === null ? "–" : String(value)]);
    return choice(dimensions[name], [["", "all"], ...options], (value) => {
      if (value === "") delete state.filters[name];
      else state.filters[name] = value;
    });
  });
  const runs = data.runs.length > 1 ? data.runs.map((run) => [JSON.stringify(["run", run.label]), `run ${run.label}`]) : [];
  const each = series.map((one) => [JSON.stringify(["series", one.key]), one.label]);
  // With equal engines in each run, runs are compared; otherwise one series is the measure of all.
  const engines = (run) => distinct(data.cells.filter((cell) => cell.run === run).map((cell) => keyOf(cell.engine))).sort().join();
  const alike = data.runs.length > 1 && data.runs.every((run) => engines(run.label) === engines(data.runs[0].label));
  const options = alike ? [...runs, ...each] : [...each, ...runs];
  state.baseline = JSON.parse(options[0][0]);
  filters.push(choice("compared with", options, (value) => { state.baseline = JSON.parse(value); }));
  byId("filters").replaceChildren(...filters);
}

function makeHead() {
  const every = (values) => distinct(values.filter(Boolean)).join(", ");
  byId("about").textContent = joined([
    every(data.cells.map((cell) => cell.engine.model)),
    every(data.cells.map((cell) => cell.workload.dataset).map((name) => (name === "random" ? "random tokens" : name))),
    every(data.runs.map((run) => run.environment.device)),
    every(data.runs.map((run) => minutes(run.environment.date))),
  ]);
  byId("made").textContent = `made by sametoken ${data.sametoken}, ${minutes(data.date)}`;
  const made = distinct(data.runs.flatMap((run) => run.synthetic));
  byId("synthetic").hidden = !made.length;
  byId("synthetic").textContent = `${made.join(", ").toUpperCase()}: only times mean anything.`;
  byId("runs").replaceChildren(...data.runs.map((run) => {
    const mine = series.filter((one) => one.run === run.label);
    const engine = mine.length === 1 ? mine[0].engine : null;
    const facts = { engine: engine && `${engine.model}, ${drafts(engine)}, TP ${engine.tensor_parallel_size}`, ...run.environment };
    const made = card(run.label, facts, { "--series": engine ? mine[0].colour : "var(--line)" });
    if (run.synthetic.length) made.querySelector("h3").append(element("span", { class: "tag" }, run.synthetic.join(", ")));
    return made;
  }));
  byId("failures").hidden = !data.failures.length;
  byId("failures").replaceChildren(element(
    "details", {},
    element("summary", {}, `${data.failures.length} cells have no result`),
    element("ul", {}, ...data.failures.map((one) => element("li", {}, `${one.run}: ${one.cell}: ${one.error}`))),
  ));
}

function start() {
  makeHead();
  makeFilters();
  startTheme(refresh);
  byId("views").addEventListener("click", (event) => {
    const chosen = event.target.closest("button");
    if (!chosen) return;
    for (const button of byId("views").children) button.setAttribute("aria-pressed", String(button === chosen));
    state.view = chosen.dataset.view;
    byId("metric").replaceChildren();
    refresh();
  });
  for (const id of ["metric", "trace", "timeline-cell"]) byId(id).addEventListener("change", refresh);
  refresh();
}

start();
