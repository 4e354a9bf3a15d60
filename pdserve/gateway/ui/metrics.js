// Numbers of the tiles and charts, from the history up to a time. Pure.

import { hasEnded } from "./phases.js";

export const WINDOW_S = 60; // of shares and percentiles
const RATE_S = 10; // of rates
const MISSES = ["late", "rejected", "expired", "failed"];

// The value below which `share` of the sorted values lie (nearest rank), or null.
export function percentile(sorted, share) {
  return sorted.length ? sorted[Math.max(0, Math.ceil(share * sorted.length) - 1)] : null;
}

// Increase of a total over the `spanS` before `atS`, and the seconds that the history really covers.
export function increase(store, atS, spanS, name) {
  const last = store.snapshotAt(atS);
  if (!last) return [null, 0];
  const first = store.snapshotAt(last.at_s - spanS) ?? store.snapshots[0];
  return [last.totals[name] - first.totals[name], last.at_s - first.at_s];
}

function perSecond(store, atS, name) {
  const [total, covered] = increase(store, atS, RATE_S, name);
  return covered > 0 ? total / covered : null;
}

// Increase in the last minute. Scaled to a minute only when half of it is known: one rejection after a second is not
// sixty per minute.
export function perMinute(store, atS, name) {
  const [total, covered] = increase(store, atS, WINDOW_S, name);
  return covered > WINDOW_S / 2 ? (total * 60) / covered : total;
}

// Share of the requests that met both targets, of those that ended in the span and were not cancelled; null if none did.
export function attainment(store, atS, spanS) {
  const [served] = increase(store, atS, spanS, "served");
  if (served === null) return null;
  let missed = 0;
  for (const name of MISSES) missed += increase(store, atS, spanS, name)[0];
  return served + missed ? served / (served + missed) : null;
}

// Sorted TTFT and TPOT of the requests whose first token, or end, lies in the window.
export function latencies(store, atS) {
  const ttft = [];
  const tpot = [];
  let late = 0;
  for (const request of store.requests.values()) {
    if (request.arrived_s > atS) continue;
    const firstS = request.ttft_s === null ? null : request.arrived_s + request.ttft_s;
    if (firstS !== null && firstS <= atS && firstS > atS - WINDOW_S) ttft.push(request.ttft_s);
    if (hasEnded(request, atS) && request.ended_s > atS - WINDOW_S) {
      if (request.tpot_s !== null) tpot.push(request.tpot_s);
      if (request.outcome === "late") late += 1;
    }
  }
  const ascending = (a, b) => a - b;
  return { ttft: ttft.sort(ascending), tpot: tpot.sort(ascending), late };
}

export function summary(store, atS) {
  const { ttft, tpot } = latencies(store, atS);
  const snapshot = store.snapshotAt(atS);
  return {
    requests_per_s: perSecond(store, atS, "arrived"),
    attainment: attainment(store, atS, WINDOW_S),
    ttft_p50: percentile(ttft, 0.5),
    ttft_p99: percentile(ttft, 0.99),
    tpot_p50: percentile(tpot, 0.5),
    tpot_p99: percentile(tpot, 0.99),
    tokens_per_s: perSecond(store, atS, "output_tokens"),
    transfer_per_s: perSecond(store, atS, "transfer_bytes"),
    queued: snapshot ? snapshot.queued : null,
    running: snapshot ? snapshot.running : null,
    rejected_per_min: perMinute(store, atS, "rejected"),
    targets: commonTargets(store, atS),
  };
}

// The targets of most recent requests: [TTFT, TPOT] in seconds, each null if there is none.
export function commonTargets(store, atS) {
  const votes = [new Map(), new Map()];
  for (const request of store.requests.values()) {
    if (request.arrived_s > atS || request.arrived_s < atS - WINDOW_S) continue;
    [request.slo_ttft_s, request.slo_tpot_s].forEach((target, at) => {
      if (target !== null && target !== undefined) votes[at].set(target, (votes[at].get(target) ?? 0) + 1);
    });
  }
  return votes.map((counted) => {
    let best = null;
    for (const [target, count] of counted) if (best === null || count > counted.get(best)) best = target;
    return best;
  });
}

// Ends per bucket of `bucketS` seconds: [{begin_s, served, late, rejected, failed}], oldest first.
export function ends(store, atS, spanS, bucketS) {
  const buckets = new Map();
  const first = Math.floor((atS - spanS) / bucketS) + 1;
  for (let at = first; at <= Math.floor(atS / bucketS); at += 1)
    buckets.set(at, { begin_s: at * bucketS, served: 0, late: 0, rejected: 0, failed: 0 });
  let before = null;
  for (const snapshot of store.snapshots) {
    if (snapshot.at_s > atS) break;
    const bucket = buckets.get(Math.floor(snapshot.at_s / bucketS));
    if (before && bucket) {
      const grown = (name) => snapshot.totals[name] - before.totals[name];
      bucket.served += grown("served");
      bucket.late += grown("late");
      bucket.rejected += grown("rejected");
      bucket.failed += grown("failed") + grown("expired");
    }
    before = snapshot;
  }
  return [...buckets.values()];
}

// Rejections by reason since `spanS` before: [{reason, count, last_s}], most frequent first.
export function rejectionReasons(store, atS, spanS) {
  const reasons = new Map();
  for (const request of store.requests.values()) {
    if (request.outcome !== "rejected" || !hasEnded(request, atS) || request.ended_s < atS - spanS) continue;
    // Reasons differ in their numbers: "best TTFT 1.2 s" and "best TTFT 1.3 s" are one reason.
    const reason = (request.why || "no reason given").replace(/\d+(?:[.,]\d+)*/g, "#");
    const found = reasons.get(reason) ?? { reason, count: 0, last_s: 0, example: "" };
    found.count += 1;
    if (request.ended_s >= found.last_s) {
      found.last_s = request.ended_s;
      found.example = request.why || "no reason given";
    }
    reasons.set(reason, found);
  }
  return [...reasons.values()].sort((a, b) => b.count - a.count);
}
