const comparisons = data.comparisons;

/** A token, or the end of an answer, in words. */
const word = (token) => (token === null ? "the end" : JSON.stringify(data.texts[token] ?? token));

function makeHead() {
  const { workload, environment } = data;
  byId("made").textContent = `made by sametoken ${environment.sametoken}`;
  byId("about").textContent = joined([workload.model ?? data.subject, workload.adapter, workload.dataset, environment.device ?? "device of the server", minutes(environment.date)]);
  byId("verdict").textContent = data.headline;
  byId("verdict").classList.add(data.identical ? "better" : "worse");
  const prompts = workload.prompts === undefined ? null : `${workload.prompts}, at temperature ${workload.temperatures.join(" and ")}, up to ${workload.max_tokens} tokens each`;
  byId("sides").replaceChildren(
    card("Compared", { "with speculation": data.subject, baseline: data.baseline, prompts, "drafts verified": data.num_drafts ?? "unknown" }),
    ...(environment.device ? [card("Machine", { device: environment.device, threads: environment.threads, torch: environment.torch, platform: environment.platform })] : []),
  );
  byId("noise").textContent = data.noise === null ? "" : `Measured noise of log-probabilities: ${data.noise.toPrecision(3)}.`;
}

function makeRuns() {
  const rows = [...data.repeats, ...comparisons].map((run) => {
    const counts = {};
    for (const { kind } of run.divergences) counts[kind] = (counts[kind] ?? 0) + 1;
    const bits = run.num_logits > 0;
    const differ = bits ? run.num_logits_differ : run.divergences.length;
    return [
      run.name,
      bits ? `${run.num_logits} positions, bit by bit` : `${run.num_requests} answers`,
      element("td", { class: differ ? "worse" : "better" }, differ ? String(differ) : "none"),
      Object.entries(counts).map(([kind, count]) => `${count} ${kind}`).join(", "),
    ];
  });
  byId("runs").replaceChildren(table(["run", "compared", "differ", "kinds"], rows));
}

function showDivergences() {
  const wanted = byId("kind").value;
  const rows = comparisons.flatMap((run) => run.divergences.filter(({ kind }) => !wanted || kind === wanted).map((one) => [
    `${one.request} (${run.name})`, one.position, word(one.expected), word(one.found),
    one.margin === null ? null : one.margin.toPrecision(3),
    one.window && `${one.draft === null ? "target" : `draft ${one.draft}`} of ${one.window.num_drafts}, ${one.window.num_accepted} accepted`,
    one.kind,
  ]));
  byId("divergences").replaceChildren(table(["request", "token", "expected", "found", "margin", "window", "kind"], rows));
}

function makeDivergences() {
  const kinds = new Set(comparisons.flatMap((run) => run.divergences.map((one) => one.kind)));
  byId("divergences-panel").hidden = !kinds.size;
  for (const kind of kinds) byId("kind").add(new Option(kind, kind));
  byId("kind").addEventListener("change", showDivergences);
  showDivergences();
}

function makeDefects() {
  byId("defects-panel").hidden = !data.defects.length;
  const rows = data.defects.map((defect) => [defect.request, defect.kind, defect.position, defect.detail]);
  byId("defects").replaceChildren(table(["request", "kind", "token", "detail"], rows));
}

function makeAcceptance() {
  byId("acceptance-panel").hidden = !data.diagnosis;
  if (!data.diagnosis) return;
  const profiles = Object.entries(data.diagnosis.profiles).filter(([, profile]) => profile.judged[0] > 0);
  const width = Math.max(0, ...profiles.map(([, profile]) => profile.judged.length));
  const rows = profiles.map(([name, profile]) => [name, ...Array.from({ length: width }, (_, i) => {
    if (!profile.judged[i]) return null;
    const rate = profile.accepted[i] / profile.judged[i];
    return element("td", { class: "rate", "--share": rate }, percent(rate));
  })]);
  const positions = Array.from({ length: width }, (_, i) => String(i + 1));
  byId("acceptance").replaceChildren(table(["position", ...positions], rows, "numbers"));
  const findings = data.diagnosis.findings.map((one) => `${one.cause}: ${one.evidence}; ${one.remedy}`);
  const none = data.has_few_drafts ? "Too few drafts for a finding." : "No cause for concern found.";
  byId("findings").replaceChildren(...(findings.length ? findings : [none]).map((text) => element("li", {}, text)));
}

makeHead();
makeRuns();
makeDivergences();
makeDefects();
makeAcceptance();
startTheme();
