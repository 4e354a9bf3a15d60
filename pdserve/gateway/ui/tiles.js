// The row of key figures. DOM, updated a few times a second.

import { curveLine, element, setAttribute, setText } from "./dom.js";
import { bytes, count, digits, percent, roundSeconds, seconds, split } from "./format.js";
import { WINDOW_S, attainment, increase } from "./metrics.js";

const GOAL = 0.9; // share of requests that meet both targets, as goodput is defined
const POINTS = 30;

const overTime = (name) => (store, atS) => {
  const [total, covered] = increase(store, atS, 4, name);
  return covered > 0 ? total / covered : null;
};

const TILES = [
  { id: "requests", label: "Requests", show: (now) => [now.requests_per_s === null ? "–" : digits(now.requests_per_s), "per s"], sub: (now) => `${count(now.running)} running`, curve: overTime("arrived") },
  { id: "attainment", label: "In time", show: (now) => split(percent(now.attainment)), sub: () => "met both targets", note: () => "≥ 90 %", level: (now) => level(now.attainment, (share) => share >= GOAL), curve: (store, atS) => attainment(store, atS, 10), most: 1 },
  { id: "ttft", label: "TTFT", note: (now) => goal(now.targets[0]), show: (now) => split(seconds(now.ttft_p50)), sub: (now) => `p50 · p99 ${seconds(now.ttft_p99)}`, level: (now) => within(now.ttft_p99, now.targets[0]) },
  { id: "tpot", label: "TPOT", note: (now) => goal(now.targets[1]), show: (now) => split(seconds(now.tpot_p50)), sub: (now) => `p50 · p99 ${seconds(now.tpot_p99)}`, level: (now) => within(now.tpot_p99, now.targets[1]) },
  { id: "tokens", label: "Output", show: (now) => [count(now.tokens_per_s), "tok/s"], sub: () => "all workers", curve: overTime("output_tokens") },
  { id: "transfer", label: "KV transfer", show: (now) => { const [value, unit] = split(bytes(now.transfer_per_s)); return [value, unit ? `${unit}/s` : ""]; }, sub: () => "prefill to decode", curve: overTime("transfer_bytes") },
  { id: "queue", label: "Queue", show: (now) => [count(now.queued), now.queued === 1 ? "request" : "requests"], sub: () => "in the router", curve: (store, atS) => store.snapshotAt(atS)?.queued ?? null },
  { id: "rejections", label: "Rejections", show: (now) => [count(now.rejected_per_min), "per min"], sub: () => "with a retry time", level: (now) => (now.rejected_per_min > 0 ? "bad" : ""), curve: overTime("rejected") },
];

function level(value, isGood) {
  if (value === null) return "";
  return isGood(value) ? "good" : "bad";
}

function within(value, target) {
  return target === null || value === null ? "" : level(value, (number) => number <= target);
}

function goal(target) {
  return target === null ? "" : `≤ ${roundSeconds(target)}`;
}

export function createTiles(parent) {
  const drawn = TILES.map((tile) => {
    const value = element("span", { className: "number" });
    const unit = element("span", { className: "unit" });
    const note = element("span", { className: "note", attributes: { title: "target" } });
    const sub = element("p", { className: "sub" });
    const node = element("div", { className: "tile", attributes: { "data-tile": tile.id, role: "group", "aria-label": tile.label } }, [
      element("h3", {}, [element("span", { text: tile.label }), note]),
      element("p", { className: "value" }, [value, unit]),
      sub,
    ]);
    const line = curveLine(node, "spark");
    parent.append(node);
    return { tile, node, value, unit, note, sub, line };
  });

  return (store, atS, now) => {
    for (const { tile, node, value, unit, note, sub, line } of drawn) {
      const [number, suffix] = tile.show(now);
      setText(value, number);
      setText(unit, suffix);
      setText(sub, tile.sub(now));
      setText(note, tile.note?.(now) ?? "");
      setAttribute(node, "data-level", tile.level?.(now) ?? "");
      if (tile.curve) setAttribute(line, "points", points(tile, store, atS));
      else setAttribute(line, "points", latencyPoints(tile.id === "ttft" ? "ttft_s" : "tpot_s", store, atS));
    }
  };
}

function points(tile, store, atS) {
  const first = store.range()?.[0] ?? atS;
  const values = [];
  for (let at = 0; at <= POINTS; at += 1) {
    const timeS = atS - WINDOW_S + (WINDOW_S * at) / POINTS;
    values.push(timeS < first ? null : tile.curve(store, timeS));
  }
  return polyline(values, tile.most);
}

// The median of what ended in each span.
function latencyPoints(field, store, atS) {
  const spans = Array.from({ length: POINTS + 1 }, () => []);
  for (const request of store.requests.values()) {
    const value = request[field];
    if (value === null || request.ended_s === null || request.ended_s > atS) continue;
    const place = POINTS - Math.floor(((atS - request.ended_s) * POINTS) / WINDOW_S);
    if (place >= 0) spans[place].push(value);
  }
  return polyline(spans.map((span) => (span.length ? span.sort((a, b) => a - b)[span.length >> 1] : null)));
}

function polyline(values, most = Math.max(...values.map((value) => value ?? 0))) {
  const found = [];
  values.forEach((value, at) => {
    if (value !== null) found.push(`${((at / POINTS) * 100).toFixed(1)},${(most > 0 ? 19 - (value / most) * 18 : 19).toFixed(1)}`);
  });
  return found.join(" ");
}
