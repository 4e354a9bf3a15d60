// Charts of the last minutes: SLO attainment, TTFT, TPOT, and both as shares of their targets.

import { createSurface, drawMark } from "./canvas.js";
import { roundSeconds } from "./format.js";
import { commonTargets, ends } from "./metrics.js";
import { hasEnded } from "./phases.js";
import { colours } from "./theme.js";

const SPANS_S = [60, 120, 300]; // the shortest that holds the history
const BUCKET_S = 5;
const LEFT = 50;
const BOTTOM = 16;
const TOP = 6;
const MAX_POINTS = 1500;

export function createCharts(canvases) {
  const surfaces = Object.fromEntries(Object.entries(canvases).map(([name, canvas]) => [name, createSurface(canvas)]));

  let spanS = SPANS_S[0];

  function frame(surface) {
    const { context, width, height } = surface;
    context.font = "11px system-ui, sans-serif";
    return { context, left: LEFT, right: width - 8, top: TOP, bottom: height - BOTTOM };
  }

  function timeAxis({ context, left, right, bottom }) {
    context.fillStyle = colours.muted;
    context.textBaseline = "top";
    for (const [share, align] of [[1, "left"], [0.5, "center"], [0, "right"]]) {
      const agoS = share * spanS;
      context.textAlign = align;
      context.fillText(agoS === 0 ? "now" : agoS < 60 ? `−${agoS} s` : `−${agoS / 60} min`, left + (right - left) * (1 - share), bottom + 4);
    }
  }

  function levelLine({ context, left, right }, y, text, { dashed = false, colour = colours.line } = {}) {
    context.strokeStyle = colour;
    context.lineWidth = dashed ? 1.5 : 1;
    context.setLineDash(dashed ? [5, 4] : []);
    context.beginPath();
    context.moveTo(left, y);
    context.lineTo(right, y);
    context.stroke();
    context.setLineDash([]);
    context.fillStyle = dashed ? colours.text : colours.muted;
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillText(text, left - 5, y);
  }

  function drawAttainment(store, atS) {
    const surface = surfaces.attainment;
    if (!surface.begin()) return;
    const area = frame(surface);
    const { context, left, right, top, bottom } = area;
    const yOf = (share) => bottom - share * (bottom - top);
    const buckets = ends(store, atS, spanS, BUCKET_S);
    const total = (bucket) => bucket.served + bucket.late + bucket.rejected + bucket.failed;
    const most = Math.max(1, ...buckets.map(total));
    const step = (right - left) / buckets.length;
    buckets.forEach((bucket, at) => {
      let y = bottom;
      for (const [name, colour, alpha] of [["served", colours.good, 0.35], ["late", colours.bad, 0.75], ["failed", colours.bad, 1], ["rejected", colours.reject, 0.45]]) {
        const height = (bucket[name] / most) * (bottom - top) * 0.6;
        context.globalAlpha = alpha;
        context.fillStyle = colour;
        context.fillRect(left + at * step + 0.5, y - height, Math.max(1, step - 1), height);
        y -= height;
      }
    });
    context.globalAlpha = 1;
    for (const share of [0, 0.5, 1]) levelLine(area, yOf(share), `${share * 100} %`);
    levelLine(area, yOf(0.9), "90 %", { dashed: true, colour: colours.muted });
    context.strokeStyle = colours.text;
    context.lineWidth = 2;
    context.lineJoin = "round";
    context.beginPath();
    let isOpen = false;
    buckets.forEach((bucket, at) => {
      // Three buckets, because one may hold only a few requests.
      const near = buckets.slice(Math.max(0, at - 2), at + 1);
      const all = near.reduce((sum, one) => sum + total(one), 0);
      if (!all) return void (isOpen = false);
      const y = yOf(near.reduce((sum, one) => sum + one.served, 0) / all);
      const x = left + (at + 0.5) * step;
      if (isOpen) context.lineTo(x, y);
      else context.moveTo(x, y);
      isOpen = true;
    });
    context.stroke();
    timeAxis(area);
  }

  // One mark per request over time, on a logarithmic axis from 1/30 of the target to 10 times it.
  function drawLatency(name, store, atS, valueOf, whenOf, sloOf, target) {
    const surface = surfaces[name];
    if (!surface.begin()) return;
    const area = frame(surface);
    const { context, left, right, top, bottom } = area;
    const points = [];
    for (const request of store.requests.values()) {
      const value = valueOf(request);
      const whenS = whenOf(request);
      if (value !== null && whenS !== null && whenS <= atS && whenS > atS - spanS) points.push([whenS, value, sloOf(request)]);
    }
    const values = points.map(([, value]) => value).filter((value) => value > 0);
    const low = 0.7 * Math.min(target ?? Infinity, ...values.slice(-MAX_POINTS), 1);
    const high = 1.4 * Math.max(target ?? 0, ...values.slice(-MAX_POINTS), low * 10);
    const yOf = (value) => bottom - (Math.log(Math.max(value, low) / low) / Math.log(high / low)) * (bottom - top);
    for (let power = Math.ceil(Math.log10(low)); 10 ** power < high; power += 1) {
      const nearTarget = target !== null && Math.abs(yOf(10 ** power) - yOf(target)) < 10;
      levelLine(area, yOf(10 ** power), nearTarget ? "" : roundSeconds(10 ** power));
    }
    for (const [whenS, value, slo] of points.slice(-MAX_POINTS)) {
      const x = left + (1 - (atS - whenS) / spanS) * (right - left);
      if (slo !== null && slo !== undefined && value > slo) drawMark(context, "late", x, yOf(value), 7, colours);
      else dot(context, x, yOf(value));
    }
    if (target !== null) levelLine(area, yOf(target), roundSeconds(target), { dashed: true, colour: colours.text });
    timeAxis(area);
  }

  function dot(context, x, y) {
    context.fillStyle = colours.decode;
    context.globalAlpha = 0.75;
    context.fillRect(x - 1.5, y - 1.5, 3, 3);
    context.globalAlpha = 1;
  }

  function drawBox(store, atS) {
    const surface = surfaces.box;
    if (!surface.begin()) return;
    const { context, left, right, top, bottom } = frame(surface);
    // From 3 % of the target to ten times the target.
    const [least, most] = [Math.log(0.03), Math.log(10)];
    const share = (value) => (Math.min(Math.max(Math.log(Math.max(value, 1e-9)), least), most) - least) / (most - least);
    const xOf = (value) => left + share(value) * (right - left);
    const yOf = (value) => bottom - share(value) * (bottom - top);
    context.fillStyle = colours.met;
    context.fillRect(left, yOf(1), xOf(1) - left, bottom - yOf(1));
    context.strokeStyle = colours.muted;
    context.lineWidth = 1;
    context.setLineDash([5, 4]);
    context.strokeRect(left, yOf(1), xOf(1) - left, bottom - yOf(1));
    context.setLineDash([]);
    context.fillStyle = colours.muted;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const value of [0.1, 1, 10]) context.fillText(`${value}×`, left - 5, Math.max(top + 5, yOf(value)));
    context.textBaseline = "top";
    context.textAlign = "center";
    for (const value of [0.1, 1]) context.fillText(`${value}×`, xOf(value), bottom + 4);
    context.textAlign = "right";
    context.fillText("TTFT", right, bottom + 4);
    context.textAlign = "left";
    context.textBaseline = "top";
    context.fillText("TPOT", left + 4, top);
    for (const request of store.requests.values()) {
      if (!hasEnded(request, atS) || request.ended_s < atS - spanS || request.ttft_s === null || request.slo_ttft_s === null) continue;
      const x = xOf(request.ttft_s / request.slo_ttft_s);
      const y = request.tpot_s === null || request.slo_tpot_s === null ? bottom : yOf(request.tpot_s / request.slo_tpot_s);
      if (request.outcome === "late") drawMark(context, "late", x, y, 7, colours);
      else dot(context, x, y);
    }
  }

  return (store, atS) => {
    const historyS = atS - (store.range()?.[0] ?? atS);
    spanS = SPANS_S.find((span) => historyS <= span) ?? SPANS_S.at(-1);
    const [ttftTarget, tpotTarget] = commonTargets(store, atS);
    const ttftAt = (request) => (request.ttft_s === null ? null : request.arrived_s + request.ttft_s);
    if (surfaces.attainment.isVisible) drawAttainment(store, atS);
    if (surfaces.ttft.isVisible) drawLatency("ttft", store, atS, (request) => request.ttft_s, ttftAt, (request) => request.slo_ttft_s, ttftTarget);
    if (surfaces.tpot.isVisible) drawLatency("tpot", store, atS, (request) => (hasEnded(request, atS) ? request.tpot_s : null), (request) => request.ended_s, (request) => request.slo_tpot_s, tpotTarget);
    if (surfaces.box.isVisible) drawBox(store, atS);
  };
}
