"use strict";
// The panel beside the conversation: listens to /live while the page is seen, and shows it.

const lanes = new Lanes($("lanes"));
const heat = new Heat($("heat"));
let about = null; // what stays as it is
let latest = null; // the last event
const watchers = []; // called with every event

/** Listen, again and again; not while the page is hidden, for being watched costs a little. */
async function watch() {
  for (let pause = 1; ; ) {
    const gone = new AbortController();
    const hide = () => document.hidden && gone.abort();
    document.addEventListener("visibilitychange", hide);
    try {
      if (document.hidden) await seen();
      const response = await call("/live", { signal: gone.signal });
      needKey(false);
      pause = 1;
      for await (const { event, data } of events(response)) take(event, JSON.parse(data));
      lost("The server has ended the connection.");
    } catch (error) {
      if (error.status === 401) {
        needKey(true);
        lost("It is shown once the key is known.");
        await unlocked();
        continue;
      }
      if (error.name !== "AbortError") lost("The server does not answer.");
    } finally {
      document.removeEventListener("visibilitychange", hide);
    }
    if (!document.hidden) await new Promise((go) => setTimeout(go, 1000 * pause));
    pause = Math.min(10, 2 * pause);
  }
}

const seen = () => new Promise((go) => {
  const look = () => document.hidden || (document.removeEventListener("visibilitychange", look), go());
  document.addEventListener("visibilitychange", look);
});

const unlocked = () => new Promise((go) => addEventListener("unlocked", go, { once: true }));

function take(event, told) {
  if (event === "about") {
    about = told;
    $("model").textContent = told.model;
    document.title = `${told.model} on k3offload`;
    heat.shape(told.moe_layers, told.experts);
    $("copykey").hidden = $("gpukey").hidden = !told.device;
    document.body.classList.toggle("device", Boolean(told.device));
    return;
  }
  latest = told;
  showSweep(told);
  showTiers(told);
  showHeld(told);
  showJobs(told.requests);
  lanes.take(told.lanes);
  heat.take(told.resident, told.asked);
  for (const heard of watchers) heard(told);
}

function lost(words) {
  latest = null;
  $("now").textContent = words;
  $("brief").textContent = "not connected";
  $("sweepline").style.width = "0";
  for (const heard of watchers) heard(null);
}

function showSweep({ sweep, rates }) {
  const read = rates ? `${size(rates.disk.bytes)}/s` : "";
  $("sweepline").style.width = sweep.busy ? `${(100 * sweep.layer) / about.layers}%` : "0";
  if (!sweep.busy) {
    const last = sweep.number ? ` The last of ${whole(sweep.number)} sweeps took ${spell(sweep.seconds)}.` : "";
    $("now").textContent = `Idle.${last}`;
    $("brief").textContent = "idle";
    return;
  }
  const rows = [];
  if (sweep.decoding) rows.push(`${whole(sweep.decoding)} ${sweep.decoding > 1 ? "answers" : "answer"}`);
  if (sweep.prompts) rows.push(`${whole(sweep.prompts)} tokens of prompts`);
  const place = `layer ${sweep.layer + 1} of ${about.layers}`;
  $("now").textContent = `Sweep ${whole(sweep.number)}, ${place}, for ${rows.join(" and ")}.`;
  $("brief").textContent = `${sweep.layer + 1}/${about.layers}${read ? ` ${read}` : ""}`;
}

function showTiers({ tiers, rates }) {
  const body = $("tiers").tBodies[0];
  const rows = [];
  for (const [kind, n] of Object.entries(tiers)) {
    const row = made("tr");
    const head = made("th", "", kind.replace(" on the device", ", GPU"));
    head.scope = "row";
    const part = (count) => n.requests ? `${((100 * count) / n.requests).toFixed(1)}%` : "";
    const rate = rates && rates[kind] ? `${size(rates[kind].bytes)}/s` : "";
    const cells = [part(n.hits), part(n.late), part(n.misses), n.bytes ? rate : "", n.bytes ? size(n.bytes) : ""];
    row.append(head, ...cells.map((text) => made("td", "", text)));
    row.title = `${whole(n.requests)} requests: ${whole(n.hits)} hits, ${whole(n.late)} late, ${whole(n.misses)} misses`;
    rows.push(row);
  }
  body.replaceChildren(...rows);
}

function showHeld({ held, rates }) {
  const all = about.moe_layers.length * about.experts;
  const parts = Object.entries(held).map(([tier, n]) =>
    `${whole(n)} ${tier === "ram" ? "in RAM" : "on the GPU"}`);
  $("held").textContent = `${parts.join(", ")}, of ${whole(all)}`;
  const disk = rates ? `${size(rates.disk.bytes)}/s from disk` : "";
  $("span").textContent = `the last ${lanes.shown} s${disk ? `, ${disk}` : ""}`;
}

function showJobs(requests) {
  const rows = requests.map((job, place) => {
    const row = made("li", job.phase);
    row.append(made("span", "id", job.id.slice(-6)), made("span", "what", doing(job, place)));
    if (job.phase === "prefill") row.append(bar(job.done, job.total));
    return row;
  });
  $("jobs").replaceChildren(...(rows.length ? rows : [made("li", "none", "None.")]));
}

/** What a request is at, in words. */
function doing(job, place) {
  if (job.phase === "waiting") {
    return `waiting for a place, ${whole(place)} before it`;
  }
  if (job.phase === "prefill") {
    return `reading its prompt, ${whole(job.done)} of ${whole(job.total)} tokens, ${left(job)}`;
  }
  return `answering, ${whole(job.made)} of at most ${whole(job.most)} tokens`;
}

const left = (job) => job.left === null ? "time left not known yet" : `about ${spell(job.left)} left`;

function bar(done, total) {
  const track = made("div", "bar");
  const part = made("div");
  part.style.width = `${total ? (100 * done) / total : 0}%`;
  track.append(part);
  track.setAttribute("aria-hidden", "true");
  return track;
}

/** A cell of the map under the pointer, or under the arrow keys. */
function pointing() {
  const canvas = $("heat");
  const tell = (words) => { $("cell").textContent = words || "Layers downwards, experts across."; };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * heat.rows);
    tell(heat.point(row, Math.floor(((event.clientX - box.left) / box.width) * heat.columns)));
  });
  for (const leave of ["pointerleave", "blur"]) {
    canvas.addEventListener(leave, () => tell(heat.point(null, null)));
  }
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const { row, expert } = heat.cursor || { row: 0, expert: 0 };
    tell(heat.cursor ? heat.point(row + step[0], expert + step[1]) : heat.point(0, 0));
  });
}

$("fold").addEventListener("click", () => {
  const open = document.body.classList.toggle("unfolded");
  $("fold").setAttribute("aria-expanded", String(open));
  lanes.draw();
  heat.draw();
});
for (const change of [dark, still]) change.addEventListener("change", () => (lanes.draw(), heat.draw()));
addEventListener("resize", () => (lanes.draw(), heat.draw()));
const frames = () => {
  lanes.frame();
  requestAnimationFrame(frames);
};
requestAnimationFrame(frames);
pointing();
