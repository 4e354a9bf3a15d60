// The history of the last minutes, from frames of the feed, in bounded memory. Pure.

import { noticeRequest, noticeWorkers } from "./notable.js";

export const KEEP_S = 300;
export const MAX_REQUESTS = 5000;
const MAX_EVENTS = 400;
const MIN_SPACING_S = 0.12; // of snapshots, so that a faster feed needs no more memory
const SWEEP_EVERY_S = 5;

export function createStore({ keepS = KEEP_S, maxRequests = MAX_REQUESTS } = {}) {
  const store = {
    snapshots: [], // frames without their requests, oldest first
    requests: new Map(), // by key, in the order of their first report
    events: [], // oldest first
    numEvents: 0, // noticed so far
    version: 0, // changes with every frame
  };
  let sweptS = -Infinity;

  store.clear = () => {
    store.snapshots.length = 0;
    store.requests.clear();
    store.events.length = 0;
    store.version += 1;
    sweptS = -Infinity;
  };

  store.ingest = (frame) => {
    const atS = frame.at_s;
    const before = store.snapshots.at(-1);
    // The clock is the router's own: it goes back only if another router answers.
    if (before && atS < before.at_s) store.clear();
    const previous = store.snapshots.at(-1);
    for (const event of noticeWorkers(previous, frame)) addEvent(event);
    for (const request of frame.requests) {
      // A client may use an id again after the first request with it has ended.
      const key = `${request.request_id}\n${request.arrived_s}`;
      const known = store.requests.get(key);
      if (known && known.ended_s !== null) continue;
      const record = { ...request, key, seen_s: atS };
      for (const event of noticeRequest(known, record, atS)) addEvent(event);
      store.requests.set(key, record);
    }
    addSnapshot(frame);
    if (atS - sweptS >= SWEEP_EVERY_S || store.requests.size > maxRequests) sweep(atS);
    store.version += 1;
  };

  function addEvent(event) {
    store.events.push(event);
    store.numEvents += 1;
    if (store.events.length > MAX_EVENTS) store.events.shift();
  }

  function addSnapshot(frame) {
    const { snapshots } = store;
    const snapshot = {
      at_s: frame.at_s,
      queued: frame.queued,
      running: frame.running,
      omitted: frame.omitted,
      totals: frame.totals,
      workers: frame.workers,
    };
    if (snapshots.length > 1 && snapshots.at(-1).at_s - snapshots.at(-2).at_s < MIN_SPACING_S) snapshots[snapshots.length - 1] = snapshot;
    else snapshots.push(snapshot);
    while (snapshots[0].at_s < frame.at_s - keepS) snapshots.shift();
  }

  function sweep(atS) {
    sweptS = atS;
    for (const [key, request] of store.requests)
      if ((request.ended_s ?? request.seen_s) < atS - keepS) store.requests.delete(key);
    let excess = store.requests.size - maxRequests;
    if (excess > 0) {
      // Ended requests go first. More live requests than this are not reported.
      for (const [key, request] of store.requests) {
        if (excess <= 0) break;
        if (request.ended_s === null && request.seen_s === atS) continue;
        store.requests.delete(key);
        excess -= 1;
      }
    }
    while (store.events.length && store.events[0].at_s < atS - keepS) store.events.shift();
  }

  // The newest snapshot that is not later than `atS`, or null.
  store.snapshotAt = (atS) => {
    const { snapshots } = store;
    let low = 0;
    let high = snapshots.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (snapshots[middle].at_s <= atS) low = middle + 1;
      else high = middle;
    }
    return low ? snapshots[low - 1] : null;
  };

  // [oldest, newest] time, or null before the first frame.
  store.range = () => (store.snapshots.length ? [store.snapshots[0].at_s, store.snapshots.at(-1).at_s] : null);

  return store;
}
