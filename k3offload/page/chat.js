"use strict";
// The conversation: what was said, what is being answered, and what is kept for a reload.  Words of
// the model become text of the page and never markup.

const FIELDS = ["system", "temperature", "top_p", "max_tokens", "seed", "effort"];
const EFFORTS = { "": "as the model", none: "none", low: "low", high: "high", max: "max" };
const turns = []; // {role, content, reasoning, state, note, figures}; state: done, going, dropped, wrong
let leaving = false; // this page, for another or for itself anew
let going = null; // {turn, abort, id, begun, first, made} while an answer is under way
const parts = new WeakMap(); // turn -> its elements

// ---- what is kept ----

function keep() {
  try {
    store.setItem("turns", JSON.stringify(turns));
    store.setItem("fields", JSON.stringify(Object.fromEntries(FIELDS.map((f) => [f, $(f).value]))));
  } catch { /* no room: the conversation goes on, and a reload finds an older one */ }
}

function restore() {
  for (const [effort, label] of Object.entries(EFFORTS)) $("effort").add(new Option(label, effort));
  const fields = JSON.parse(store.getItem("fields") || "{}");
  for (const name of FIELDS) $(name).value = fields[name] || "";
  for (const turn of JSON.parse(store.getItem("turns") || "[]")) {
    if (turn.state === "going") drop(turn, "The page was loaded again, which stopped this answer.");
    turns.push(turn);
    show(turn);
  }
  $("text").value = store.getItem("draft") || "";
  grow();
}

// ---- what is shown ----

function show(turn) {
  const item = made("article", `turn ${turn.role}`);
  const own = { item, words: made("div", "words"), foot: made("div") };
  item.append(made("p", "who", turn.role === "user" ? "You" : "Answer"));
  if (turn.role === "assistant") {
    own.thoughts = made("details", "thoughts");
    own.summary = made("summary");
    own.thinking = made("div");
    own.wait = made("div", "wait");
    own.thoughts.append(own.summary, own.thinking);
    item.append(own.thoughts, own.wait);
  }
  item.append(own.words, own.foot);
  parts.set(turn, own);
  $("log").append(item);
  refresh(turn);
}

/** Bring the elements of a turn up to what it says. */
function refresh(turn) {
  const own = parts.get(turn);
  const low = nearEnd();
  own.item.className = `turn ${turn.role} ${turn.state || ""}`;
  own.item.setAttribute("aria-busy", String(turn.state === "going"));
  own.words.replaceChildren(...pieces(turn.content));
  if (turn.role === "assistant") {
    own.thoughts.hidden = !turn.reasoning;
    own.thinking.textContent = turn.reasoning;
    const words = (turn.reasoning.match(/\S+/g) || []).length;
    const under = turn.state === "going" && !turn.content;
    own.summary.textContent = `${under ? "Reasoning, so far" : "Reasoning,"} ${whole(words)} words`;
    own.wait.hidden = turn.state !== "going" || Boolean(turn.content || turn.reasoning);
  }
  const foot = [];
  if (turn.note) foot.push(made("p", "note", turn.note));
  if (turn.figures) foot.push(made("p", "figures", turn.figures));
  if (turn === turns.at(-1) && ["dropped", "wrong"].includes(turn.state)) foot.push(again(turn));
  own.foot.replaceChildren(...foot);
  if (low) $("log").scrollTop = $("log").scrollHeight;
}

/** Text, and between fences of three backquotes lines of code; nothing else is made of it. */
function pieces(text) {
  return text.split(/^```/m).map((part, i, all) => {
    const lines = i ? part.replace(/^[^\n]*\n?/, "") : part; // less what stands behind the fence
    if (i % 2 === 0) {
      const begin = i ? lines.replace(/^\n+/, "") : lines;
      return document.createTextNode(i + 1 < all.length ? begin.replace(/\n+$/, "") : begin);
    }
    const code = made("pre", "", lines.replace(/\n$/, ""));
    code.tabIndex = 0; // it may be wider than the page
    return code;
  });
}

function again(turn) {
  const button = made("button", "quiet", "Try again");
  button.type = "button";
  button.addEventListener("click", () => {
    parts.get(turn).item.remove();
    turns.splice(turns.indexOf(turn), 1);
    answer();
    $("text").focus();
  });
  return button;
}

function nearEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

function drop(turn, why) {
  turn.state = "dropped";
  turn.note = `${why} The model will not see this part.`;
}

// ---- asking ----

function send() {
  const text = $("text").value.trim();
  if (going) say("An answer is under way. Escape stops it.");
  if (!text || going) return;
  const question = { role: "user", content: text };
  turns.push(question);
  for (const turn of turns) if (turn.role === "assistant" && parts.has(turn)) refresh(turn);
  show(question);
  $("text").value = "";
  store.removeItem("draft");
  grow();
  answer();
}

/** What the model is told: answers that ended, and every question. */
function messages() {
  const told = turns.filter((turn) => turn.role === "user" || turn.state === "done");
  const system = $("system").value.trim();
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    ...told.map(({ role, content, reasoning }) =>
      reasoning ? { role, content, reasoning_content: reasoning } : { role, content }),
  ];
}

function body() {
  const asked = { messages: messages(), stream: true, stream_options: { include_usage: true } };
  if (about) asked.model = about.model;
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if ($(name).value !== "") asked[name] = Number($(name).value);
  }
  if ($("effort").value) asked.reasoning_effort = $("effort").value;
  return JSON.stringify(asked);
}

async function answer() {
  const turn = { role: "assistant", content: "", reasoning: "", state: "going" };
  const asked = body();
  turns.push(turn);
  going = { turn, abort: new AbortController(), id: "", begun: performance.now(), first: 0, usage: null };
  show(turn);
  parts.get(turn).wait.replaceChildren(made("p", "", "Sent."));
  $("log").scrollTop = $("log").scrollHeight;
  buttons();
  keep();
  say("Sent. Escape stops the answer.");
  try {
    await listen(asked);
    turn.state = "done";
    turn.figures = figures();
    say(`The answer is complete. ${turn.figures}`);
  } catch (error) {
    failed(turn, error);
  } finally {
    going = null;
    refresh(turn);
    buttons();
    keep();
  }
}

async function listen(asked) {
  const headers = { "Content-Type": "application/json" };
  const options = { method: "POST", headers, body: asked, signal: going.abort.signal };
  const response = await call("/v1/chat/completions", options);
  let ended = false;
  for await (const { data } of events(response)) {
    if (data === "[DONE]") {
      ended = true;
      break;
    }
    heard(JSON.parse(data));
  }
  if (!ended) throw new Refused(0, "The connection ended before the answer did. Try again.");
}

/** One event of the stream. */
function heard(told) {
  if (told.error) throw new Refused(500, told.error.message, told.error.code);
  const { turn } = going;
  going.id = told.id || going.id;
  going.usage = told.usage || going.usage;
  const choice = (told.choices || [])[0];
  if (!choice) return;
  const { reasoning_content: thought, content, tool_calls: tools } = choice.delta;
  if ((thought || content) && !going.first) {
    going.first = performance.now();
    say(thought ? "The model is reasoning." : "The answer begins.");
  }
  turn.reasoning += thought || "";
  turn.content += content || "";
  if (tools) turn.note = "The model asks for a tool, which nobody answers here.";
  if (choice.finish_reason === "length") {
    turn.note = "Cut off at the most tokens of an answer (Settings), or of the context.";
  }
  soon();
}

let drawn = 0;
/** Once for each frame, however many tokens came. */
function soon() {
  if (drawn) return;
  drawn = requestAnimationFrame(() => {
    drawn = 0;
    if (going) refresh(going.turn);
  });
}

function failed(turn, error) {
  if (leaving) return; // the next page will say so
  if (error.name === "AbortError") {
    drop(turn, "Stopped.");
    say("Stopped.");
    return;
  }
  turn.state = "wrong";
  turn.note = error instanceof Refused ? error.message : `This page failed: ${error.message}`;
  if (error.status === 401) {
    turn.note = `${store.getItem("key") ? "The server does not take this key" : "The server asks for its key"}. ` +
      "Give it below, then try again.";
    needKey(true);
    $("key").focus();
  }
  say(turn.note);
}

/** Tokens, seconds and speed of the answer that has just ended. */
function figures() {
  const { begun, first, usage } = going;
  const now = performance.now();
  const told = [];
  if (usage) {
    const made = usage.completion_tokens;
    told.push(`${whole(made)} tokens in ${spell((now - begun) / 1000)}`);
    const rate = (made - 1) / ((now - first) / 1000);
    if (first && made > 1) told.push(`${rate.toPrecision(3)} a second`);
  }
  if (first) told.push(`first after ${spell((first - begun) / 1000)}`);
  if (usage) {
    const reused = (usage.prompt_tokens_details || {}).cached_tokens || 0;
    told.push(`prompt ${whole(usage.prompt_tokens)}${reused ? `, ${whole(reused)} of them reused` : ""}`);
  }
  return told.join(" \u00b7 ");
}

/** While nothing has come: what the engine does for this request, and for how long yet. */
function progress(told) {
  if (!going || going.first) return;
  const { wait } = parts.get(going.turn);
  const waited = spell((performance.now() - going.begun) / 1000);
  const jobs = told ? told.requests : [];
  const place = jobs.findIndex((job) => job.id === going.id);
  const lines = [];
  if (place < 0) {
    lines.push(made("p", "", `Sent ${waited} ago.`));
  } else {
    const said = doing(jobs[place], place);
    lines.push(made("p", "", `${said[0].toUpperCase()}${said.slice(1)}.`));
    if (jobs[place].phase === "prefill") lines.push(bar(jobs[place].done, jobs[place].total));
  }
  wait.replaceChildren(...lines);
}

// ---- what a person does ----

function buttons() {
  $("stop").hidden = !going;
  $("send").hidden = Boolean(going);
}

function grow() {
  const text = $("text");
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

function stop() {
  if (!going) return;
  going.abort.abort();
  $("text").focus();
}

let sure = 0;
/** A second press within some seconds throws the conversation away. */
function fresh() {
  const button = $("fresh");
  const calm = () => { button.textContent = "New"; };
  if (turns.length && Date.now() - sure > 4000) {
    sure = Date.now();
    button.textContent = "Discard?";
    say("Press again to discard the conversation.");
    setTimeout(calm, 4000);
    return;
  }
  sure = 0;
  calm();
  stop();
  turns.length = 0;
  $("log").replaceChildren();
  store.removeItem("turns");
  say("A new conversation.");
  $("text").focus();
}

$("ask").addEventListener("submit", (event) => (event.preventDefault(), send()));
$("stop").addEventListener("click", stop);
$("fresh").addEventListener("click", fresh);
$("set").addEventListener("click", () => $("settings").showModal());
$("settings").addEventListener("close", keep);
$("text").addEventListener("input", () => (grow(), store.setItem("draft", $("text").value)));
$("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("settings").open) stop();
});
function unlock() {
  store.setItem("key", $("key").value.trim());
  dispatchEvent(new Event("unlocked"));
  $("text").focus();
}
$("unlock").addEventListener("click", unlock);
$("key").addEventListener("keydown", (event) => {
  if (event.key === "Enter") (event.preventDefault(), unlock());
});
addEventListener("beforeunload", () => {
  leaving = true;
  setTimeout(() => { leaving = false; }, 1000); // it stays after all
});
addEventListener("pagehide", keep);
watchers.push(progress);
restore();
buttons();
watch();
