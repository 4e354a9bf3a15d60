// Puts the parts together: frames go into the store, and two loops draw from it. Canvases follow the screen, the rest of
// the document a few times a second.

import { createCharts } from "./charts.js";
import { byId, element, setText } from "./dom.js";
import { createFeed } from "./feed.js";
import { createFlow } from "./flow.js";
import { count, rate } from "./format.js";
import { bindKeys } from "./keys.js";
import { createEventList, createReasonTable, createRecentTable, createSessionTable, createTransferTable } from "./lists.js";
import { perMinute, summary } from "./metrics.js";
import { createPanel } from "./panel.js";
import { createPlayback } from "./playback.js";
import { createRequestDetail } from "./request_detail.js";
import { createSelection } from "./selection.js";
import { createEmpty, createStates } from "./states.js";
import { createStore, KEEP_S } from "./store.js";
import { createTheme } from "./theme.js";
import { createTiles } from "./tiles.js";
import { createTimeline } from "./timeline.js";
import { createTransport } from "./transport.js";
import { createWaterfall } from "./waterfall.js";
import { createWorkerCards, workersAt } from "./workers.js";
import { createWorkerDetail } from "./worker_detail.js";
import { createWorkerLog } from "./worker_log.js";

const SLOW_MS = 250;
const recording = window.PDSERVE_FRAMES;
const still = matchMedia("(prefers-reduced-motion: reduce)");
const store = createStore();
const isRecording = Array.isArray(recording) && recording.length > 0;
const timeline = isRecording ? createPlayback(recording, store, KEEP_S) : createTimeline(store.range);
const selection = createSelection();
const stats = { draws: 0, animated: 0, drawMs: 0, slowMs: 0 }; // milliseconds are moving averages
let hello = { model: "", is_operator: false };

const feed = createFeed({
  onHello(given) {
    // Times of another router are on another clock.
    if (hello.router_id && hello.router_id !== given.router_id) store.clear();
    hello = given;
    timeline.hello(given.period_s);
    setText(byId("model"), given.model);
  },
  onFrame(frame) {
    store.ingest(frame);
    timeline.received(frame.at_s);
  },
  onState(state) {
    states.set(state);
  },
});
const recorded = new Map(Object.entries(window.PDSERVE_EXPLANATIONS ?? {})); // an id may be any name, such as "constructor"
const explain = isRecording ? async (id) => recorded.get(id) ?? null : feed.explain;
const states = createStates(feed);
const empty = createEmpty(() => hello.model);

const tiles = createTiles(byId("tiles"));
const cards = createWorkerCards(byId("prefill-cards"), byId("decode-cards"), selection);
const flow = createFlow(byId("flow"), byId("flow-canvas"), byId("flow-routes"), still);
const waterfall = createWaterfall(byId("waterfall"), byId("waterfall-focus"), byId("group-by"), selection);
const charts = createCharts({ attainment: byId("attainment"), ttft: byId("ttft"), tpot: byId("tpot"), box: byId("box") });
const events = createEventList(byId("events"), byId("events-none"), byId("event-filter"), selection, timeline);
let drawnEvents = -1;
const lists = [
  createTransferTable(byId("transfers"), byId("transfers-none")),
  createReasonTable(byId("reasons"), byId("reasons-none")),
  createRecentTable(byId("recent"), selection),
  createSessionTable(byId("sessions"), byId("sessions-none"), isRecording ? null : feed.sessions),
];
const permissions = () => {
  if (isRecording) return { isAllowed: false, why: "A recording cannot change workers." };
  if (!hello.is_operator) return { isAllowed: false, why: "Draining needs the operator's token." };
  return { isAllowed: true, why: "" };
};
const panel = createPanel(
  { panel: byId("detail"), title: byId("detail-title"), body: byId("detail-body"), close: byId("detail-close") },
  selection,
  createRequestDetail(byId("detail-body"), explain),
  createWorkerDetail(byId("detail-body"), selection, permissions, feed.changeWorker, createWorkerLog(isRecording ? null : feed.workerLog)),
  timeline,
);
const transport = createTransport(
  { pause: byId("pause"), icon: byId("pause-icon"), label: byId("pause-text"), scrub: byId("scrub"), text: byId("scrub-text"), toLive: byId("to-live"), speed: byId("speed") },
  timeline,
  () => drawSlowly(),
);

// `turn`: which part of a second it is. Charts and tables change once per second, unless everything is asked for.
function drawSlowly(turn = null) {
  const atS = timeline.time();
  states.update(timeline.isPaused(), atS !== null, isRecording);
  transport.update(atS);
  if (atS === null) return;
  const workers = workersAt(store, atS);
  const sent = sentBytes(atS);
  for (const one of workers) one.transferPerS = (sent.get(one.worker.worker_id) ?? 0) / 10;
  cards(workers);
  const snapshot = store.snapshotAt(atS);
  empty(snapshot, isRecording);
  if (turn === null || turn === 0) charts(store, atS);
  if (turn === null || turn === 1) {
    const now = summary(store, atS);
    tiles(store, atS, now);
    // In the same turn as the tiles, so that the page never shows two values of one number.
    setText(byId("flow-rate"), rate(now.transfer_per_s));
    setText(byId("queue-count"), count(now.queued));
    for (const name of ["rejected", "served", "late"]) setText(byId(`${name}-count`), count(perMinute(store, atS, name)));
  }
  if (turn === null || turn === 2) {
    for (const draw of lists) draw(store, atS);
    drawEvents(atS);
  }
  panel(store, atS);
  waterfall.arrange(store, atS);
  flow.arrange(store, atS);
  flow.surface.changed = true;
  waterfall.surface.changed = true;
}

// An event is listed at once: the rest of the page runs half a second behind, so that it moves evenly.
const isFollowing = () => !timeline.isPaused() && !timeline.isPlayback;
function drawEvents(atS) {
  events(store, isFollowing() ? Infinity : atS);
  drawnEvents = store.numEvents;
}

// Bytes that each worker sent or received in the last ten seconds.
function sentBytes(atS) {
  const sent = new Map();
  for (const { prefill_worker: from, decode_worker: to, transfer_bytes: size, arrived_s: arrivedS, phases } of store.requests.values()) {
    const phase = size ? phases.find(([name]) => name === "transfer_wait") : null;
    if (!phase || arrivedS + phase[1] > atS || arrivedS + phase[1] < atS - 10) continue;
    for (const id of [from, to]) sent.set(id, (sent.get(id) ?? 0) + size);
  }
  return sent;
}

let slowMs = -Infinity;
let drawnMs = -Infinity;
let turn = 0;
let isComplete = false; // whether every part was drawn once
function draw(nowMs) {
  requestAnimationFrame(draw);
  if (isFollowing() && store.numEvents !== drawnEvents) drawEvents(Infinity);
  if (nowMs - slowMs >= SLOW_MS) {
    slowMs = nowMs;
    const begunMs = performance.now();
    const isHeld = timeline.isPaused() || store.range() === null;
    turn = (turn + 1) % 4;
    drawSlowly(isHeld || !isComplete ? null : turn);
    isComplete ||= store.range() !== null && timeline.time() !== null;
    stats.slowMs += 0.1 * (performance.now() - begunMs - stats.slowMs);
  }
  // Where drawing takes long, 30 frames per second leave time for the rest of the machine.
  if (stats.drawMs > 6 && nowMs - drawnMs < 25) return;
  drawnMs = nowMs;
  const atS = timeline.time();
  if (atS === null) return;
  const begunMs = performance.now();
  const isMoving = !timeline.isPaused() && !still.matches;
  const selectedKey = selection.current?.kind === "request" ? selection.current.key : null;
  if (flow.surface.isVisible && (isMoving || flow.surface.changed)) flow.draw(atS, selectedKey);
  if (waterfall.surface.isVisible && (isMoving || waterfall.surface.changed)) waterfall.draw(atS);
  flow.surface.changed = false;
  waterfall.surface.changed = false;
  stats.draws += 1;
  stats.animated += isMoving ? 1 : 0;
  stats.drawMs += 0.1 * (performance.now() - begunMs - stats.drawMs);
}

const help = byId("help");
byId("help-open").addEventListener("click", () => help.showModal());
byId("help-close").addEventListener("click", () => help.close());
bindKeys({
  toggle: transport.toggle,
  close: () => (help.open ? help.close() : selection.close()),
  openHelp: () => help.showModal(),
  changeTheme: () => byId("theme").click(),
});
for (const [name, text] of [["queue", "queue"], ["prefill", "prefill"], ["transfer", "KV transfer"], ["decode", "decode"], ["tick", "TTFT target"], ["over", "beyond the target, or lost"]])
  byId("legend").append(element("li", {}, [element("span", { className: `swatch ${name}`, attributes: { "aria-hidden": "true" } }), text]));
for (const [mark, level, text] of [["●", "good", "in time"], ["▲", "bad", "late"], ["✕", "reject", "rejected"], ["■", "bad", "failed"]])
  byId("legend").append(element("li", {}, [element("span", { className: `sign ${level}`, text: mark, attributes: { "aria-hidden": "true" } }), text]));
createTheme(byId("theme"), () => {
  waterfall.newColours();
  flow.surface.changed = true;
  slowMs = -Infinity;
});

// For tests and for measuring: what was drawn, and what is kept.
window.pdserve = Object.freeze({ stats, store, timeline });
if (isRecording) timeline.resume();
else feed.connect();
requestAnimationFrame(draw);
