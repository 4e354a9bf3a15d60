// Requests as bars over the last 20 s, in rows by worker. A canvas with a keyboard.

import { createHatch, createSurface, drawMark } from "./canvas.js";
import { seconds, shortId } from "./format.js";
import { assignLanes } from "./lanes.js";
import { endOf, GROUP, hasEnded, isLate, prefillsOn, segments, stateAt } from "./phases.js";
import { colours } from "./theme.js";

const SHOWN_S = 20;
const GUTTER = 92;
const RIGHT = 10;
const AHEAD_S = 0.6;
const AXIS = 18;
const GROUP_GAP = 7;
const TALLEST = 20;
const WANTED = 6; // pixels per row: the canvas grows for them
const HEIGHTS = [380, 480, 600, 720];

export function createWaterfall(canvas, focusLine, groupSelect, selection) {
  const surface = createSurface(canvas);
  let shown = []; // requests that are shown, by arrival
  let lanes = new Map();
  let groups = [];
  let hatch = null;
  let timeS = 0;
  let store = null;
  // The bars are drawn a few times a second into a strip that reaches beyond "now", and each frame shows a part of it.
  const strip = document.createElement("canvas");
  const brush = strip.getContext("2d");
  let stripS = 0; // the time of "now" when the strip was drawn
  let places = new Map(); // key -> where the request is drawn

  const groupOf = (request) =>
    groupSelect.value === "prefill" ? prefillsOn(request) || "" : request.decode_worker || request.prefill_worker || "";

  // A few times a second: who is shown, and where.
  function arrange(from, atS) {
    store = from;
    shown = [];
    for (const request of store.requests.values())
      if (request.arrived_s <= atS + AHEAD_S && endOf(request) > atS - SHOWN_S) shown.push(request);
    shown.sort((a, b) => a.arrived_s - b.arrived_s);
    ({ lanes, groups } = assignLanes(shown, lanes, groupOf, endOf));
    const total = groups.reduce((sum, group) => sum + group.rows, 0);
    fitHeight(AXIS + groups.length * GROUP_GAP + total * WANTED);
    const room = surface.height - AXIS - groups.length * GROUP_GAP;
    const pitch = Math.max(2, Math.min(TALLEST, Math.floor(room / Math.max(1, total))));
    let top = AXIS;
    for (const group of groups) {
      group.top = top;
      group.pitch = pitch;
      // The label needs its height, too.
      top += Math.max(group.rows * pitch, 13) + GROUP_GAP;
    }
    const tops = new Map(groups.map((group) => [group.name, group.top]));
    const height = pitch > 6 ? pitch - 3 : pitch > 2 ? pitch - 1 : pitch;
    places = new Map();
    for (const [key, { group, lane }] of lanes) places.set(key, { y: tops.get(group) + lane * pitch, height, pitch });
    drawStrip(atS);
  }

  function drawStrip(atS) {
    stripS = atS;
    timeS = atS;
    const ratio = surface.width ? canvas.width / surface.width : 1;
    strip.width = Math.max(1, Math.round((surface.width + AHEAD_S * scale()) * ratio));
    strip.height = canvas.height;
    brush.setTransform(ratio, 0, 0, ratio, 0, 0);
    hatch ??= createHatch(brush, colours.bg);
    for (const request of shown) drawRequest(brush, request, places.get(request.key), atS + AHEAD_S);
  }

  const scale = () => (surface.width - GUTTER - RIGHT) / SHOWN_S; // pixels per second

  // In a few steps, and back only when much is free: a page that jumps cannot be read.
  function fitHeight(wanted) {
    const now = HEIGHTS.indexOf(Math.round(surface.height));
    const next = HEIGHTS.findIndex((height) => height >= wanted);
    const fitting = next < 0 ? HEIGHTS.length - 1 : next;
    if (now < 0 || fitting === now || (fitting < now && wanted > HEIGHTS[now - 1] * 0.7)) return;
    canvas.style.height = `${HEIGHTS[fitting]}px`;
  }

  const xOf = (momentS) => GUTTER + (momentS - (timeS - SHOWN_S)) * scale();
  const place = (request) => places.get(request.key) ?? null;

  function draw(atS) {
    timeS = atS;
    if (!surface.begin()) return;
    const { context } = surface;
    if (atS < stripS || atS > stripS + AHEAD_S) drawStrip(atS);
    timeS = atS;
    drawAxis(context);
    const ratio = canvas.width / surface.width;
    const from = Math.round((GUTTER + (atS - stripS) * scale()) * ratio);
    // A little beyond "now", for marks whose centre is there.
    const width = Math.round((SHOWN_S * scale() + 5) * ratio);
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.drawImage(strip, from, 0, width, strip.height, Math.round(GUTTER * ratio), 0, width, strip.height);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    for (const request of shown)
      if (selection.hoveredKey === request.key || selection.isRequest(request.key)) outline(context, request, selection.isRequest(request.key));
    drawGroups(context);
  }

  function drawAxis(context) {
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "top";
    for (let at = 0; at <= SHOWN_S; at += 5) {
      const x = xOf(timeS - at);
      context.fillStyle = colours.line;
      context.fillRect(x, AXIS - 4, 1, surface.height);
      context.fillStyle = colours.muted;
      context.textAlign = at === 0 ? "right" : "center";
      context.fillText(at === 0 ? "now" : `−${at} s`, at === 0 ? x + 8 : x, 1);
    }
  }

  function drawGroups(context) {
    context.textAlign = "left";
    context.textBaseline = "top";
    for (const group of groups) {
      context.fillStyle = colours.line;
      context.fillRect(0, group.top - 4, surface.width, 1);
      context.fillStyle = colours.text;
      context.font = "600 12px system-ui, sans-serif";
      const label = group.name || "not placed";
      context.fillText(label.length > 13 ? `${label.slice(0, 12)}…` : label, 2, group.top, GUTTER - 8);
    }
  }

  function drawRequest(context, request, { y, height, pitch }, atS) {
    const endS = Math.min(endOf(request), atS);
    for (const [name, beginS, untilS] of segments(request, atS)) {
      if (untilS < stripS - SHOWN_S) continue;
      const group = GROUP[name] ?? "queue";
      const [x, width] = [xOf(beginS), Math.max(1, xOf(untilS) - xOf(beginS))];
      context.fillStyle = colours[group];
      // Queues are thinner than work, so that the eye finds where time is spent.
      const inset = group === "queue" && height >= 6 ? Math.floor(height / 4) : group === "messages" && height >= 4 ? Math.floor(height / 3) : 0;
      context.fillRect(x, y + inset, width, height - 2 * inset);
      if (group === "lost") fillHatch(context, x, y, width, height);
      if (pitch >= 15 && width > 26 && (name === "prefill" || name === "decode")) label(context, name === "prefill" ? prefillsOn(request) : request.decode_worker, x, y, width, height);
    }
    drawTarget(context, request, y, height, endS, atS);
    if (hasEnded(request, atS) && (pitch >= 5 || request.outcome !== "served"))
      drawMark(context, request.outcome, xOf(request.ended_s) + 1, y + height / 2, Math.max(6, Math.min(10, height)), colours);
  }

  function label(context, text, x, y, width, height) {
    context.font = "10px system-ui, sans-serif";
    context.textAlign = "left";
    context.textBaseline = "middle";
    if (context.measureText(text).width > width - 6) return;
    context.fillStyle = "#0b0f14";
    context.fillText(text, Math.max(x, GUTTER) + 4, y + height / 2 + 0.5);
  }

  // A tick at the TTFT target, and hatching from there to the late first token.
  function drawTarget(context, request, y, height, endS, atS) {
    const slo = request.slo_ttft_s;
    if (slo === null || slo === undefined || request.outcome === "rejected") return;
    const targetS = request.arrived_s + slo;
    const firstS = request.ttft_s === null ? endS : Math.min(request.arrived_s + request.ttft_s, atS);
    if (firstS > targetS) fillHatch(context, xOf(targetS), y, xOf(firstS) - xOf(targetS), height);
    if (height < 5 || targetS > atS || (request.ended_s !== null && targetS > request.ended_s)) return;
    context.fillStyle = colours.text;
    context.fillRect(xOf(targetS) - 0.75, y - 1, 1.5, height + 2);
  }

  function fillHatch(context, x, y, width, height) {
    context.fillStyle = hatch;
    context.fillRect(x, y, width, height);
  }

  function outline(context, request, isSelected) {
    const at = place(request);
    if (!at || request.arrived_s > timeS) return;
    const { y, height } = at;
    const endS = Math.min(endOf(request), timeS);
    context.strokeStyle = isSelected ? colours.focus : colours.text;
    context.lineWidth = 2;
    const x = Math.max(GUTTER, xOf(request.arrived_s));
    context.strokeRect(x - 2, y - 2, xOf(endS) - x + 4, height + 4);
  }

  function requestAt(event) {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let best = null;
    let bestDistance = 8; // pixels: thin bars are hard to hit
    for (const request of shown) {
      const at = place(request);
      if (!at) continue;
      const down = y < at.y ? at.y - y : Math.max(0, y - at.y - at.height);
      const [left, right] = [xOf(request.arrived_s), xOf(Math.min(endOf(request), timeS))];
      const across = x < left ? left - x : Math.max(0, x - right);
      const distance = Math.max(down, across);
      if (distance < bestDistance) [best, bestDistance] = [request, distance];
    }
    return best;
  }

  function hover(request) {
    selection.hoveredKey = request?.key ?? null;
    surface.changed = true;
    focusLine.textContent = request ? describe(request) : "Arrow keys move among requests. Enter opens one.";
  }

  function describe(request) {
    const ttft = request.ttft_s === null ? "no token yet" : `TTFT ${seconds(request.ttft_s)}`;
    const route = request.prefill_worker ? `${request.prefill_worker} → ${request.decode_worker}` : request.decode_worker || "not placed";
    return `${shortId(request.request_id)}: ${stateAt(request, timeS)}, ${route}, ${ttft}, TPOT ${seconds(request.tpot_s)}${isLate(request, timeS) ? ", late" : ""}`;
  }

  // Left and right by arrival; up and down to the row above and below.
  function step(key) {
    const visible = shown.filter((request) => place(request));
    if (!visible.length) return;
    const current = visible.find((request) => request.key === selection.hoveredKey);
    if (!current || key === "End") return hover(visible.at(-1));
    if (key === "Home") return hover(visible[0]);
    const at = visible.indexOf(current);
    if (key === "ArrowRight") return hover(visible[Math.min(at + 1, visible.length - 1)]);
    if (key === "ArrowLeft") return hover(visible[Math.max(at - 1, 0)]);
    const sign = key === "ArrowDown" ? 1 : -1;
    const here = place(current).y;
    const others = visible.filter((request) => Math.sign(place(request).y - here) === sign);
    const score = (request) => Math.abs(place(request).y - here) * 1000 + Math.abs(endOf(request) - endOf(current));
    if (others.length) hover(others.reduce((best, request) => (score(request) < score(best) ? request : best)));
  }

  canvas.addEventListener("pointermove", (event) => hover(requestAt(event)));
  canvas.addEventListener("pointerleave", () => hover(null));
  canvas.addEventListener("click", (event) => {
    const request = requestAt(event);
    if (request) selection.openRequest(request.key);
  });
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && selection.hoveredKey) {
      event.preventDefault();
      selection.openRequest(selection.hoveredKey);
    } else if (/^(Arrow(Up|Down|Left|Right)|Home|End)$/.test(event.key)) {
      event.preventDefault();
      step(event.key);
    }
  });
  groupSelect.addEventListener("change", () => {
    lanes = new Map();
    if (store) arrange(store, timeS);
    surface.changed = true;
  });

  return {
    surface,
    arrange,
    draw,
    newColours() {
      hatch = null;
      surface.changed = true;
    },
  };
}
