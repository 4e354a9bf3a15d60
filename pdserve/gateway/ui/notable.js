// Notable events, from the difference of two frames. Pure.

import { bytes, roundSeconds, seconds } from "./format.js";

const ENDS = new Set(["rejected", "late", "failed", "expired"]);

// Events of one request. `known`: its record in an earlier frame, or undefined.
export function noticeRequest(known, request, atS) {
  const events = [];
  const add = (kind, text, whenS = atS) =>
    events.push({ at_s: whenS, kind, text, request_key: request.key, request_id: request.request_id });
  if (known && request.attempt > known.attempt && known.attempt > 0) {
    const route = request.prefill_worker ? `${request.prefill_worker} → ${request.decode_worker}` : request.decode_worker;
    add("moved", `placed again${route ? ` on ${route}` : ""} (attempt ${request.attempt})`);
  }
  if (known && request.preemptions > known.preemptions)
    add("preempted", `preempted on ${request.decode_worker} for lack of KV blocks`);
  if (request.ended_s !== null && ENDS.has(request.outcome))
    add(request.outcome, describeEnd(request), request.ended_s);
  return events;
}

function describeEnd(request) {
  if (request.outcome === "late") return `late: ${misses(request).join(", ") || request.why || "target missed"}`;
  let text = request.why ? `${request.outcome}: ${request.why}` : request.outcome;
  if (request.retry_after_s !== null) text += `; retry after ${seconds(request.retry_after_s)}`;
  return text;
}

export function misses(request) {
  const found = [];
  if (request.ttft_s !== null && request.slo_ttft_s !== null && request.ttft_s > request.slo_ttft_s)
    found.push(`TTFT ${seconds(request.ttft_s)}, target ${roundSeconds(request.slo_ttft_s)}`);
  if (request.tpot_s !== null && request.slo_tpot_s !== null && request.tpot_s > request.slo_tpot_s)
    found.push(`TPOT ${seconds(request.tpot_s)}, target ${roundSeconds(request.slo_tpot_s)}`);
  return found;
}

// Events of the workers. `before`: the snapshot before, or undefined for the first frame, which reports nothing.
export function noticeWorkers(before, frame) {
  if (!before) return [];
  const events = [];
  const add = (kind, worker, text) => events.push({ at_s: frame.at_s, kind, text, worker_id: worker.worker_id });
  const known = new Map(before.workers.map((worker) => [worker.worker_id, worker]));
  for (const worker of frame.workers) {
    const old = known.get(worker.worker_id);
    known.delete(worker.worker_id);
    if (!old) add("joined", worker, `${worker.role} worker joined with ${worker.num_blocks.toLocaleString("en-US")} KV blocks`);
    else noticeWorker(old, worker, add);
  }
  for (const worker of known.values()) add("lost", worker, `${worker.role} worker left the cluster`);
  return events;
}

function noticeWorker(old, worker, add) {
  if (old.is_connected && !worker.is_connected) add("lost", worker, "connection lost");
  if (!old.is_connected && worker.is_connected) add("joined", worker, "connected again");
  if (!old.is_draining && worker.is_draining) add("draining", worker, "draining: no new requests");
  if (old.is_draining && !worker.is_draining) add("resumed", worker, "resumed");
  const preempted = worker.preemptions - old.preemptions;
  if (preempted > 0) add("preempted", worker, `preempted ${preempted === 1 ? "a sequence" : `${preempted} sequences`} for lack of KV blocks`);
  if (!hasDrained(old) && hasDrained(worker)) add("drained", worker, "drained: no requests left");
}

// Whether an operator has drained it and its last request has ended.
export function hasDrained(worker) {
  return worker.is_drained && worker.running + worker.waiting + worker.booked === 0;
}

// KV transfers per pair of workers that began in the seconds before `atS`: [{pair, from, to, count, bytes, times}].
export function transfersBefore(requests, atS, spanS) {
  const pairs = new Map();
  for (const request of requests) {
    if (!request.prefill_worker || !request.decode_worker || !request.transfer_bytes) continue;
    const phase = request.phases.find(([name]) => name === "transfer_wait");
    if (!phase) continue;
    const beginS = request.arrived_s + phase[1];
    if (beginS > atS || beginS < atS - spanS) continue;
    const pair = `${request.prefill_worker} → ${request.decode_worker}`;
    const found = pairs.get(pair) ?? { pair, from: request.prefill_worker, to: request.decode_worker, count: 0, bytes: 0, times: [] };
    found.count += 1;
    found.bytes += request.transfer_bytes;
    if (request.transfer_s !== null) found.times.push(request.transfer_s);
    pairs.set(pair, found);
  }
  return [...pairs.values()].sort((a, b) => a.pair.localeCompare(b.pair, "en", { numeric: true }));
}

export function describeTransfer(request) {
  if (!request.transfer_bytes) return "none";
  const speed = request.transfer_s ? ` (${bytes(request.transfer_bytes / request.transfer_s)}/s)` : "";
  return `${bytes(request.transfer_bytes)} in ${seconds(request.transfer_s)}${speed}`;
}
