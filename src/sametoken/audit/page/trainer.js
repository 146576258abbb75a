const groups = data.groups;
const short = (value) => (value === 0 ? "0" : value.toPrecision(3));
const said = (group) => joined([group.weight_version === null ? null : `weight version ${group.weight_version}`, `temperature ${group.temperature}`]);
const marked = (cause) => element("td", { class: cause === "equal" ? "better" : "worse" }, cause);
const token = (one) => (one.text === null ? String(one.token_id) : JSON.stringify(one.text));
const values = (one) => [token(one), one.trainer.toPrecision(7), one.engine.toPrecision(7)];
/** A row for each assumption of each group. */
const assumptions = (cells) => groups.flatMap((group) => [group.given, ...group.others].map((fit) => [
  groups.length > 1 ? `${said(group)}: ${fit.assumed}` : fit.assumed, ...cells(fit, group),
]));

function makeHead() {
  const { environment } = data;
  byId("made").textContent = `made by sametoken ${environment.sametoken}`;
  byId("about").textContent = joined([data.model, environment.device, minutes(environment.date)]);
  byId("verdict").textContent = data.summary;
  byId("verdict").classList.add(data.identical ? "better" : "worse");
  byId("remedy").textContent = joined([data.remedy, data.num_cut ? `${data.num_cut} tokens beyond max_model_len were not compared` : null]);
  byId("groups").replaceChildren(...groups.map((group) => card(said(group), {
    cause: group.cause,
    rollouts: group.num_rollouts,
    tokens: group.given.num_tokens,
    equal: percent(group.given.num_equal / group.given.num_tokens),
    "explained by": group.best.assumed === group.given.assumed ? null : group.best.assumed,
  })));
}

function makeAssumptions() {
  const rows = assumptions((fit, group) => [
    fit.assumed === group.best.assumed ? marked(group.cause) : null,
    `${fit.num_equal} of ${fit.num_tokens}`, short(fit.mean), short(fit.mean_abs), short(fit.max_abs),
  ]);
  byId("assumptions").replaceChildren(table(["assumption", "cause", "equal", "mean", "mean size", "largest"], rows));
}

function makeSpread() {
  const rows = assumptions((fit) => fit.spread.map((count) => element("td", { class: "rate", "--share": count / fit.num_tokens }, String(count))));
  const last = data.sizes.at(-1);
  byId("spread").replaceChildren(table(["assumption", "equal", ...data.sizes.map((size) => `≤ ${size}`), `> ${last}`], rows, "numbers"));
}

function showRollouts() {
  const wanted = byId("cause").value;
  const rows = groups.flatMap((group) => group.rollouts.filter(({ cause }) => !wanted || cause === wanted).map((one) => [
    one.rollout, marked(one.cause), `${one.given.num_equal} of ${one.given.num_tokens}`,
    ...(one.first ? [one.first.position, ...values(one.first)] : [null, null, null, null]),
    short(one.given.mean), short(one.given.max_abs),
  ]));
  byId("rollouts").replaceChildren(table(["rollout", "cause", "equal", "first difference", "token", "trainer", "engine", "mean", "largest"], rows));
}

function makeRollouts() {
  const causes = new Set(groups.flatMap((group) => group.rollouts.map(({ cause }) => cause)));
  for (const cause of causes) byId("cause").add(new Option(cause, cause));
  byId("cause").addEventListener("change", showRollouts);
  showRollouts();
}

function makeTokens() {
  const largest = groups.flatMap((group) => group.largest.map((one) => [one.rollout, one.position, ...values(one)]));
  byId("largest-panel").hidden = !largest.length;
  byId("largest").replaceChildren(table(["rollout", "token of the answer", "token", "trainer", "engine"], largest));
  const prompts = data.wrong_tokens.map((one) => [one.rollout, one.position, one.how, ...[one.expected, one.found].map((text) => (text === null ? "the end" : JSON.stringify(text)))]);
  byId("prompts-panel").hidden = !prompts.length;
  byId("prompts").replaceChildren(table(["rollout", "token of the prompt", "the prompt", "template", "found"], prompts));
}

makeHead();
makeAssumptions();
makeSpread();
makeRollouts();
makeTokens();
startTheme();
