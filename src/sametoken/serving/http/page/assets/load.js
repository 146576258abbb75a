"use strict";
/* The server's load and acceptance, from /metrics every second. */
const POLL_MS = 1000;
const WINDOW = 30;
const snapshots = [];
let before = null;

function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^sametoken:(\w+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = Object.fromEntries([...(match[2] || "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map((m) => [m[1], m[2]]));
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  return found;
}

const total = (metrics, name) => (metrics.get(name) || []).reduce((sum, one) => sum + one.value, 0);
const byPosition = (metrics, name) => (metrics.get(name) || []).map((one) => one.value);

/* What was drafted in the last seconds; where nothing was, all since the server started. */
function recentDrafts(metrics) {
  const now = {
    offered: byPosition(metrics, "spec_decode_num_draft_tokens_per_pos_total"),
    accepted: byPosition(metrics, "spec_decode_num_accepted_tokens_per_pos_total"),
  };
  snapshots.push(now);
  if (snapshots.length > WINDOW + 1) snapshots.shift();
  const since = (name) => now[name].map((count, i) => count - (snapshots[0][name][i] || 0));
  const offered = since("offered");
  const isRecent = offered[0] > 0;
  return isRecent ? { offered, accepted: since("accepted"), isRecent } : { ...now, isRecent };
}

function showPositions(metrics, method) {
  const { offered, accepted, isRecent } = recentDrafts(metrics);
  const list = element("positions");
  while (list.children.length > offered.length) list.lastChild.remove();
  offered.forEach((count, position) => {
    let item = list.children[position];
    if (!item) {
      item = document.createElement("li");
      item.innerHTML = '<span class="place"></span><span class="track"><span class="bar"></span></span><span class="rate"></span>';
      item.querySelector(".place").textContent = position + 1;
      list.append(item);
    }
    const rate = count ? (accepted[position] || 0) / count : 0;
    item.dataset.rate = rate;
    item.querySelector(".bar").style.width = perCent(rate);
    item.querySelector(".rate").textContent = count ? perCent(rate) : "-";
  });
  const when = isRecent ? `in the last ${WINDOW} seconds` : "since the server started";
  element("positions-note").textContent = `By ${method}${offered[0] ? `, ${when}.` : "; no drafts yet."}`;
}

function showEngine({ model_name: model, method, num_speculative_tokens: k, device, dtype, synthetic }) {
  element("model").textContent = model;
  drafts = method !== "none";
  for (const part of document.querySelectorAll(".drafting")) part.hidden = !drafts;
  element("columns").toggleAttribute("data-plain", !drafts);
  const parts = [drafts ? `${method}, up to ${k} drafts a step` : "no speculation", device, dtype];
  if (synthetic !== "nothing") parts.push(synthetic.toUpperCase());
  element("engine").textContent = parts.join(" · ");
}

function showMetrics(metrics) {
  const now = performance.now();
  const tokens = total(metrics, "generation_tokens_total");
  element("running").textContent = total(metrics, "num_requests_running");
  element("waiting").textContent = total(metrics, "num_requests_waiting");
  element("kv").textContent = perCent(total(metrics, "kv_cache_usage_perc"));
  element("finished").textContent = total(metrics, "request_success_total");
  const length = total(metrics, "spec_decode_acceptance_length");
  element("length").textContent = length ? length.toFixed(2) : "-";
  if (before) element("speed").textContent = Math.max(0, 1000 * (tokens - before.tokens) / (now - before.now)).toFixed(0);
  before = { tokens, now };
  const [{ labels }] = metrics.get("engine_info");
  showEngine(labels);
  showPositions(metrics, labels.method);
}

async function poll() {
  const pill = element("status");
  try {
    const ready = await (await fetch("ready")).json();
    pill.dataset.state = ready.status;
    pill.textContent = ready.status === "ok" ? "ready" : ready.status;
    showMetrics(parseMetrics(await (await fetch("metrics")).text()));
  } catch {
    pill.dataset.state = "down";
    pill.textContent = "not reachable";
  }
  setTimeout(poll, POLL_MS);
}

poll();
