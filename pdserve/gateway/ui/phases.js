// What a request is doing at a time: its phases, where it is, and how it ended. Pure.

// The four colours of the page, and the phases that they stand for.
export const GROUP = {
  prepare: "queue",
  prefix_lookup: "queue",
  queue: "queue",
  reserve: "queue",
  prefill_queue: "queue",
  prefill: "prefill",
  transfer_wait: "transfer",
  decode_queue: "queue",
  decode: "decode",
  preempted: "lost",
  lost: "lost",
  messages: "messages",
};

export const LABEL = {
  prepare: "prepare",
  prefix_lookup: "prefix lookup",
  queue: "queue",
  reserve: "reserve",
  prefill_queue: "prefill queue",
  prefill: "prefill",
  transfer_wait: "KV transfer",
  decode_queue: "decode queue",
  decode: "decode",
  preempted: "preempted",
  lost: "lost",
  messages: "messages",
};

const ON_PREFILL = new Set(["prefill_queue", "prefill"]);
const ON_DECODE = new Set(["decode_queue", "decode", "preempted", "messages"]);

// When it ended, or was last reported: a request that the feed omits is drawn no further than it is known.
export function endOf(request) {
  return request.ended_s ?? request.seen_s;
}

export function hasEnded(request, atS) {
  return request.ended_s !== null && request.ended_s <= atS;
}

// A request that was live when the feed last reported it, but is no longer reported.
export function isLive(request, atS) {
  return request.arrived_s <= atS && !hasEnded(request, atS) && atS <= endOf(request) + 1.5;
}

// [name, begin, end] in the router's time, cut at `atS`.
export function segments(request, atS) {
  const found = [];
  for (const [name, beginS, lengthS] of request.phases) {
    const begin = request.arrived_s + beginS;
    if (begin > atS) break;
    found.push([name, begin, Math.min(begin + lengthS, atS)]);
  }
  return found;
}

export function phaseAt(request, atS) {
  let name = "queue";
  for (const [phase, beginS] of request.phases) {
    if (request.arrived_s + beginS > atS) break;
    name = phase;
  }
  return name;
}

// The worker that computes the prompt: the decode worker, if prefill is local.
export function prefillsOn(request) {
  return request.prefill_worker || request.decode_worker;
}

// The id of the worker that holds it in this phase, or "" in the router's queue or between two workers.
export function workerIn(request, phase) {
  if (ON_PREFILL.has(phase)) return prefillsOn(request);
  return ON_DECODE.has(phase) ? request.decode_worker : "";
}

export function beginOf(request, name) {
  for (const [phase, beginS] of request.phases) if (phase === name) return request.arrived_s + beginS;
  return null;
}

// Whether it missed a target by then: also before its end, when its first token is overdue.
export function isLate(request, atS) {
  if (hasEnded(request, atS)) return request.outcome === "late";
  const slo = request.slo_ttft_s;
  if (slo === null || slo === undefined) return false;
  return request.ttft_s === null ? atS - request.arrived_s > slo : request.ttft_s > slo;
}

// Met, missed, or null if it has no target or the number is missing.
export function meets(value, target) {
  if (value === null || value === undefined || target === null || target === undefined) return null;
  return value <= target;
}

// What the table and the panel call its state at that time.
export function stateAt(request, atS) {
  if (hasEnded(request, atS)) return request.outcome || "ended";
  return LABEL[phaseAt(request, atS)] ?? phaseAt(request, atS);
}

export const OUTCOME_MARK = { served: "●", late: "▲", rejected: "✕", cancelled: "–", expired: "▼", failed: "■" };
