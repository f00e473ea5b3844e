"use strict";
// Requests to this server, and its streams of events.  They go by fetch and not by EventSource,
// which cannot carry a key.

const store = sessionStorage;
const $ = (id) => document.getElementById(id);

/** What the server, or the way to it, refused: ``status`` 0 where nobody answered. */
class Refused extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code || "";
  }
}

/** A response that is well, or Refused with the server's own words. */
async function call(path, options = {}) {
  const headers = { ...options.headers };
  const key = store.getItem("key");
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The server does not answer. See that it still runs, then try again.");
  }
  if (response.ok) return response;
  let told = {};
  try {
    told = (await response.json()).error || {};
  } catch { /* no JSON: the status has to do */ }
  const words = told.message || `The server answered ${response.status} ${response.statusText}.`;
  throw new Refused(response.status, words, told.code);
}

function broken(error) {
  if (error.name === "AbortError") throw error;
  throw new Refused(0, "The connection broke. See that the server still runs, then try again.");
}

/** Events of a stream, as {event, data}; comments are passed over. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(broken);
      if (done) return;
      rest += value;
      for (let gap; (gap = /\r?\n\r?\n/.exec(rest)); ) {
        const found = { event: "message", data: "" };
        for (const line of rest.slice(0, gap.index).split(/\r?\n/)) {
          if (line.startsWith("event:")) found.event = line.slice(6).trim();
          if (line.startsWith("data:")) found.data += line.slice(5).replace(/^ /, "");
        }
        rest = rest.slice(gap.index + gap[0].length);
        if (found.data) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Ask for the key, and say so once. */
function needKey(wanted) {
  if (wanted && $("keyed").hidden) say("This server asks for its key.");
  $("keyed").hidden = !wanted;
}

/** For those who listen instead of looking. */
function say(words) {
  $("said").textContent = words;
}

/** An element with text alone, never markup. */
function made(tag, kind, text) {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  if (text !== undefined) element.textContent = text;
  return element;
}

const whole = (n) => Math.round(n).toLocaleString("en");

/** 1234567 -> 1.23 MB, as the commands show sizes. */
function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 999.5 && unit < units.length - 1) {
    bytes /= 1000;
    unit += 1;
  }
  return `${unit ? bytes.toPrecision(3) : whole(bytes)} ${units[unit]}`;
}

/** 35 ms, 4.2 s, 42 s, 3 min 5 s, 2 h 7 min. */
function spell(seconds) {
  if (seconds < 0.995) return `${Math.round(1000 * seconds)} ms`;
  const n = Math.round(seconds);
  if (n < 60) return seconds < 9.95 ? `${seconds.toFixed(1)} s` : `${n} s`;
  if (n < 3600) return `${Math.floor(n / 60)} min ${n % 60} s`;
  return `${Math.floor(n / 3600)} h ${Math.floor((n % 3600) / 60)} min`;
}
