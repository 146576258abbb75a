"use strict";
/* A conversation: Markdown as it comes, with the drafts that were accepted. */
const element = (id) => document.getElementById(id);
const perCent = (share) => `${Math.round(100 * share)}%`;
// Markup in an answer is text, unsafe links are text, and images, which could tell others, are links.
const markdown = window.markdownit({ html: false, breaks: true }).disable("image");
const NEAR_END_PX = 24;
const messages = [];
let stopping = null;
/* Whether the server speculates; known from its metrics. */
let drafts = false;

/* ---- text and its accepted drafts ---- */

/** Parts [start, end) of the text from `end` on that accepted tokens wrote. A token may be a part of a character. */
function acceptedParts(text, tokens, end = 0) {
  const parts = [];
  let isPartAccepted = false;
  for (const token of tokens) {
    const start = token.text.includes("\ufffd") ? -1 : text.indexOf(token.text, end);
    if (start < 0) {
      isPartAccepted = token.accepted;
      continue;
    }
    if (isPartAccepted) parts.push([end, start]);
    isPartAccepted = false;
    if (token.accepted) parts.push([start, start + token.text.length]);
    end = start + token.text.length;
  }
  return parts;
}

/**
 * Mark what accepted tokens wrote in rendered Markdown.
 *
 * The rendered characters are those of the source without its syntax, in order: each is looked up
 * from its predecessor on. White space, which rendering adds and drops, follows its predecessor.
 */
function markAccepted(root, source, parts) {
  const isAccepted = new Uint8Array(source.length);
  for (const [start, end] of parts) isAccepted.fill(1, start, end);
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  const nodes = [];
  while (walker.nextNode()) if (walker.currentNode.data.trim()) nodes.push(walker.currentNode);
  let place = 0;
  let accepted = 0;
  for (const node of nodes) {
    const runs = [];
    for (const character of node.data) {
      const found = character.trim() ? source.indexOf(character, place) : -1;
      if (found >= 0) {
        accepted = isAccepted[found];
        place = found + character.length;
      }
      if (runs.length && runs.at(-1).accepted === accepted) runs.at(-1).text += character;
      else runs.push({ accepted, text: character });
    }
    node.replaceWith(...runs.map((run) => (run.accepted ? made("span", "accepted", run.text) : run.text)));
  }
}

function made(tag, className, text = "") {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text;
  return node;
}

function showText(node, text, parts) {
  node.innerHTML = markdown.render(text);
  for (const link of node.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  markAccepted(node, text, parts);
}

/** Show an answer in `node`, its reasoning above it. */
function showAnswer(node, answer) {
  const reasoning = answer.reasoning.trim();
  if (reasoning && !node.previousSibling) node.before(made("div", "reasoning"));
  if (reasoning) node.previousSibling.textContent = reasoning;
  const { numTokens, place } = answer.marked;
  showText(node, answer.text, acceptedParts(answer.text, answer.tokens.slice(numTokens), place));
}

/**
 * Add an event's text and tokens.
 *
 * Tokens of reasoning are not looked up in the content, nor are those of its first event, which
 * may hold marks and the end of the reasoning.
 */
function extend(answer, event) {
  const added = (field) => event.choices.map((choice) => choice.delta[field] || "").join("");
  const reasoning = added("reasoning");
  const isBefore = reasoning || !answer.text;
  answer.reasoning += reasoning;
  answer.text += added("content");
  answer.tokens.push(...tokensOf(event));
  if (answer.reasoning && isBefore) answer.marked = { numTokens: answer.tokens.length, place: answer.text.length };
}

/** Change the conversation, and stay at its end unless the reader has scrolled up. */
function following(change) {
  const log = element("log");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PX;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

/** Calls `show` at most once a frame; `now` calls it at once, for the last time. */
function oncePerFrame(show) {
  let frame = 0;
  return {
    soon() {
      frame ||= requestAnimationFrame(() => { frame = 0; show(); });
    },
    now() {
      cancelAnimationFrame(frame);
      show();
    },
  };
}

/* ---- requests ---- */

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const lines = held.split("\n\n");
    held = lines.pop();
    for (const line of lines) {
      const data = line.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function send() {
  const headers = { "Content-Type": "application/json" };
  if (element("key").value) headers.Authorization = `Bearer ${element("key").value}`;
  const body = {
    messages, stream: true, stream_options: { include_usage: true },
    temperature: Number(element("temperature").value),
    max_completion_tokens: Number(element("max-tokens").value),
  };
  // Log-probabilities come with the text of every token.
  if (drafts) Object.assign(body, { include_speculation_stats: "detailed", logprobs: true });
  if (element("seed").value !== "") body.seed = Number(element("seed").value);
  return fetch("v1/chat/completions", {
    method: "POST", headers, body: JSON.stringify(body), signal: stopping.signal,
  });
}

/** The tokens of an event. It has one step's, as a rule, of which the last is the target's own. */
function tokensOf(event) {
  const tokens = event.choices.flatMap((choice) => choice.logprobs?.content ?? []);
  return tokens.map((token, i) => ({ text: token.token, accepted: i < tokens.length - 1 }));
}

/** Correct the tokens by the server's own count of every step. */
function correct(tokens, perStepAccepted) {
  let place = 0;
  for (const numAccepted of perStepAccepted) {
    for (let i = 0; i <= numAccepted && place < tokens.length; i++) tokens[place++].accepted = i < numAccepted;
  }
}

function statsLine(answer) {
  const rate = answer.numTokens / answer.seconds;
  const parts = [`${answer.numTokens} tokens in ${answer.seconds.toFixed(1)} s, ${rate.toFixed(0)} tokens/s`];
  const stats = answer.speculation;
  if (stats) parts.push(`${stats.acceptance_length.toFixed(2)} tokens per step`);
  if (stats?.num_draft_tokens) parts.push(`${perCent(stats.acceptance_rate)} of ${stats.num_draft_tokens} drafts accepted`);
  return made("span", "stats", parts.join(" · "));
}

/** Ask for the next answer and show it in `node` as it comes; returns it, also if it was stopped. */
async function ask(node) {
  const answer = {
    reasoning: "", text: "", tokens: [], marked: { numTokens: 0, place: 0 },
    numTokens: 0, seconds: 0, speculation: null, isStopped: false,
  };
  const shown = oncePerFrame(() => following(() => showAnswer(node, answer)));
  const began = performance.now();
  try {
    const response = await send();
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of eventsOf(response)) {
      if (event.error) throw new Error(event.error.message);
      extend(answer, event);
      answer.numTokens = event.usage?.completion_tokens ?? answer.numTokens;
      answer.speculation = event.speculation ?? answer.speculation;
      shown.soon();
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    answer.isStopped = true;
  }
  answer.seconds = (performance.now() - began) / 1000;
  if (answer.speculation) correct(answer.tokens, answer.speculation.per_step_accepted);
  shown.now();
  return answer;
}

function addTurn(kind, ...parts) {
  const turn = made("div", `turn ${kind}`);
  turn.append(...parts);
  element("log").append(turn);
  return turn;
}

async function converse(text) {
  messages.push({ role: "user", content: text });
  const node = made("div", "text");
  addTurn("user", text);
  const turn = addTurn("assistant", node);
  element("log").scrollTop = element("log").scrollHeight;
  try {
    const answer = await ask(node);
    messages.push({ role: "assistant", content: answer.text });
    following(() => turn.append(answer.isStopped ? made("span", "stats", "stopped") : statsLine(answer)));
  } catch (error) {
    messages.pop();
    following(() => {
      turn.classList.add("error");
      turn.replaceChildren(error.message);
    });
  }
}

element("chat").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = element("message").value;
  element("message").value = "";
  element("send").disabled = true;
  element("stop").hidden = false;
  stopping = new AbortController();
  await converse(text);
  element("send").disabled = false;
  element("stop").hidden = true;
});
element("stop").addEventListener("click", () => stopping.abort());
element("colour").addEventListener("change", () => element("log").classList.toggle("is-coloured", element("colour").checked));
element("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !element("send").disabled) {
    event.preventDefault();
    element("chat").requestSubmit();
  }
});
