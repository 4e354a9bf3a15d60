// Requests in motion: queue, prefill worker, KV transfer, decode worker, end. A canvas over the cards of the workers.

import { createSurface, drawMark } from "./canvas.js";
import { beginOf, endOf, GROUP, hasEnded, isLate, phaseAt, prefillsOn, workerIn } from "./phases.js";
import { colours } from "./theme.js";

const MOVE_S = 0.4; // a move shorter than this could not be seen
const SEND_S = 0.7;
const RECENT_S = 60;
const SPACINGS = [9, 7, 6, 5, 4, 3];

// The box that a request that ended in this way moves to.
const END_BOX = { served: "served", late: "late", expired: "late", failed: "late", rejected: "rejected" };

// Moves of a request that are visible at `atS`: {from, to, share, kind}. Pure.
export function movesAt(request, atS) {
  const moves = [];
  const add = (from, to, beginS, lengthS, kind) => {
    if (beginS !== null && atS >= beginS && atS < beginS + lengthS) moves.push({ from, to, kind, share: (atS - beginS) / lengthS });
  };
  const placedS = beginOf(request, "prefill_queue") ?? beginOf(request, "prefill");
  if (placedS !== null) add("queue", prefillsOn(request), placedS, MOVE_S, "request");
  if (request.prefill_worker) {
    const phase = request.phases.find(([name]) => name === "transfer_wait");
    if (phase) add(request.prefill_worker, request.decode_worker, request.arrived_s + phase[1], Math.max(SEND_S, phase[2]), "transfer");
  }
  if (request.ended_s !== null && END_BOX[request.outcome])
    add(request.outcome === "rejected" ? "queue" : request.decode_worker || prefillsOn(request) || "queue", END_BOX[request.outcome], request.ended_s, MOVE_S, request.outcome);
  return moves;
}

// `canvas` is above the cards, `routesCanvas` below them.
export function createFlow(root, canvas, routesCanvas, still) {
  const surface = createSurface(canvas);
  const routes = createSurface(routesCanvas);
  let boxes = new Map(); // name -> {box, slots}, relative to the canvas

  let isStacked = false; // the columns are below each other, as on a phone
  let isMoved = true; // the cards may have another place
  let active = []; // requests that may be drawn until the next arrangement

  const watcher = new ResizeObserver(() => (isMoved = true));
  for (const node of [root, ...root.querySelectorAll(".cards")]) watcher.observe(node);

  const measure = () => {
    isMoved = false;
    const origin = canvas.getBoundingClientRect();
    const relative = (node) => {
      const { left, top, width, height } = node.getBoundingClientRect();
      return { left: left - origin.left, top: top - origin.top, width, height, right: left - origin.left + width, bottom: top - origin.top + height };
    };
    isStacked = relative(root.querySelector("#prefill-cards")).bottom <= relative(root.querySelector("#decode-cards")).top;
    boxes = new Map();
    const put = (name, node, slots) => boxes.set(name, { box: relative(node), slots: slots ? relative(slots) : null });
    for (const card of root.querySelectorAll(".card")) put(card.dataset.worker, card, card.querySelector(".slots"));
    put("queue", root.querySelector("#queue-box"), root.querySelector("#queue-slots"));
    for (const name of ["rejected", "served", "late"]) put(name, root.querySelector(`#${name}-box`));
  };

  // A few times a second: which requests are drawn, and the routes, which change slowly.
  function arrange(store, atS) {
    const pairs = new Map();
    active = [];
    for (const request of store.requests.values()) {
      const endS = endOf(request);
      if (endS < atS - RECENT_S) continue;
      if (request.arrived_s <= atS) countPair(pairs, request, atS);
      if (endS >= atS - 2) active.push(request);
    }
    if (root.querySelectorAll(".card").length !== boxes.size - 4) isMoved = true;
    if (routes.isVisible && routes.begin()) drawRoutes(routes.context, pairs);
  }

  function draw(atS, selectedKey) {
    if (isMoved) measure();
    if (!surface.begin()) return;
    const { context } = surface;
    const residents = new Map();
    const moves = [];
    for (const request of active) {
      if (request.arrived_s > atS || endOf(request) < atS - 2) continue;
      const mine = movesAt(request, atS);
      for (const move of mine) moves.push([request, move]);
      if (mine.length && !still.matches) continue;
      if (hasEnded(request, atS) || atS > endOf(request) + 1.5) continue;
      const phase = phaseAt(request, atS);
      const place = workerIn(request, phase) || "queue";
      if (!residents.has(place)) residents.set(place, []);
      residents.get(place).push([request, GROUP[phase] ?? "queue"]);
    }
    for (const [place, requests] of residents) drawResidents(context, place, requests, atS, selectedKey);
    if (!still.matches) for (const [request, move] of moves) drawMove(context, request, move, request.key === selectedKey);
  }

  function countPair(pairs, request, atS) {
    if (!request.prefill_worker || !request.decode_worker || !request.transfer_bytes) return;
    const beginS = beginOf(request, "transfer_wait");
    if (beginS === null || beginS > atS) return;
    const key = `${request.prefill_worker}\n${request.decode_worker}`;
    const found = pairs.get(key) ?? { from: request.prefill_worker, to: request.decode_worker, bytes: 0 };
    // What was sent lately weighs more: the width follows the rate.
    found.bytes += request.transfer_bytes * Math.exp((beginS - atS) / 5);
    pairs.set(key, found);
  }

  function drawRoutes(context, pairs) {
    const most = Math.max(1, ...[...pairs.values()].map((pair) => pair.bytes));
    context.lineCap = "round";
    for (const { from, to, bytes } of pairs.values()) {
      const path = curve(from, to);
      if (!path) continue;
      context.strokeStyle = colours.transfer;
      context.globalAlpha = 0.16 + 0.34 * Math.sqrt(bytes / most);
      context.lineWidth = 1 + 7 * Math.sqrt(bytes / most);
      strokePath(context, path);
    }
    context.globalAlpha = 0.45;
    context.lineWidth = 1;
    context.strokeStyle = colours.muted;
    for (const [name, { slots }] of boxes) {
      if (!slots || name === "queue") continue;
      const isPrefill = root.querySelector("#prefill-cards").contains(cardOf(name));
      if (isPrefill) strokePath(context, curve("queue", name));
      else strokePath(context, curve(name, "served"));
    }
    strokePath(context, curve("queue", "rejected"));
    context.globalAlpha = 1;
  }

  const cards = new Map();
  function cardOf(name) {
    let card = cards.get(name);
    if (!card?.isConnected) {
      card = [...root.querySelectorAll(".card")].find((node) => node.dataset.worker === name) ?? null;
      if (cards.size > 500) cards.clear();
      cards.set(name, card);
    }
    return card;
  }

  function strokePath(context, path) {
    if (!path) return;
    context.beginPath();
    context.moveTo(path[0], path[1]);
    context.bezierCurveTo(...path.slice(2));
    context.stroke();
  }

  // A Bezier curve between the facing sides of two boxes: eight numbers, or null if one of them is not shown.
  function curve(from, to) {
    const a = boxes.get(from)?.box;
    const b = boxes.get(to)?.box;
    if (!a || !b) return null;
    const isBeside = b.left >= a.right - 1 && (!isStacked || Math.abs(a.top - b.top) < 8);
    if (isBeside) {
      const [x0, y0, x1, y1] = [a.right, a.top + a.height / 2, b.left, b.top + b.height / 2];
      const bend = (x1 - x0) / 2;
      return [x0, y0, x0 + bend, y0, x1 - bend, y1, x1, y1];
    }
    const [x0, x1] = [a.left + a.width / 2, b.left + b.width / 2];
    const isDown = b.top >= a.bottom - 1;
    const [y0, y1] = isDown ? [a.bottom, b.top] : [a.top, b.bottom];
    const bend = (y1 - y0) / 2;
    return [x0, y0, x0, y0 + bend, x1, y1 - bend, x1, y1];
  }

  function pointOn(path, share) {
    const eased = share * share * (3 - 2 * share);
    const rest = 1 - eased;
    const weights = [rest ** 3, 3 * rest * rest * eased, 3 * rest * eased * eased, eased ** 3];
    let [x, y] = [0, 0];
    weights.forEach((weight, at) => {
      x += weight * path[2 * at];
      y += weight * path[2 * at + 1];
    });
    return [x, y];
  }

  function drawMove(context, request, move, isSelected) {
    const path = curve(move.from, move.to);
    if (!path) return;
    const [x, y] = pointOn(path, move.share);
    if (move.kind === "transfer") {
      // A train of blocks: longer for more bytes.
      const size = Math.min(7, 1 + Math.log2(1 + (request.transfer_bytes || 0) / 65536));
      context.fillStyle = colours.transfer;
      for (let block = 0; block < size; block += 1) {
        const [bx, by] = pointOn(path, Math.max(0, move.share - block * 0.035));
        context.globalAlpha = 1 - block * 0.1;
        context.fillRect(bx - 3, by - 3, 6, 6);
      }
      context.globalAlpha = 1;
    } else if (move.kind === "request") {
      context.fillStyle = colours.prefill;
      context.beginPath();
      context.arc(x, y, 4, 0, 2 * Math.PI);
      context.fill();
    } else {
      drawMark(context, move.kind, x, y, 9, colours);
    }
    if (isSelected) ring(context, x, y, 8);
  }

  function ring(context, x, y, radius) {
    context.strokeStyle = colours.focus;
    context.lineWidth = 2;
    context.beginPath();
    context.arc(x, y, radius, 0, 2 * Math.PI);
    context.stroke();
  }

  function drawResidents(context, place, requests, atS, selectedKey) {
    const slots = boxes.get(place)?.slots;
    if (!slots) return;
    const spacing = SPACINGS.find((size) => Math.floor(slots.width / size) * Math.floor(slots.height / size) >= requests.length) ?? SPACINGS.at(-1);
    const perRow = Math.max(1, Math.floor(slots.width / spacing));
    const rows = Math.max(1, Math.floor(slots.height / spacing));
    requests.slice(0, perRow * rows).forEach(([request, group], at) => {
      const x = slots.left + (at % perRow) * spacing + spacing / 2;
      const y = slots.top + Math.floor(at / perRow) * spacing + spacing / 2;
      context.fillStyle = colours[group];
      const size = Math.max(2, spacing - 2);
      if (isLate(request, atS) && spacing > 4) drawMark(context, "late", x, y, size, colours);
      else context.fillRect(x - size / 2, y - size / 2, size, size);
      if (request.key === selectedKey) ring(context, x, y, spacing);
    });
  }

  return { surface, arrange, draw };
}
