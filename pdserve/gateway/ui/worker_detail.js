// The panel of one worker: its state over the last minute, its requests, its log, and drain or resume.

import { curveLine, element, reconcile, setHidden, setText } from "./dom.js";
import { count, seconds, shortId } from "./format.js";
import { WINDOW_S } from "./metrics.js";
import { isLive, phaseAt, stateAt, workerIn } from "./phases.js";
import { kvShares, stateOf, stateText } from "./workers.js";

export function createWorkerDetail(body, selection, permissions, changeWorker, log) {
  let shown = null;
  let parts = null;
  let message = "";
  let isBusy = false;

  async function change(action) {
    isBusy = true;
    message = action === "drain" ? "asking the worker to drain…" : "asking the worker to resume…";
    const mine = shown;
    try {
      await changeWorker(shown, action);
      message = action === "drain" ? "The router sends it no new requests." : "The router sends it new requests again.";
    } catch (error) {
      message = `This was not done: ${error.message}`;
    }
    isBusy = false;
    if (mine !== shown) message = "";
  }

  function build() {
    const curve = (name) => {
      const title = element("h3");
      body.append(title);
      return { name, title, line: curveLine(body, "curve spark") };
    };
    body.replaceChildren();
    parts = {
      verdict: element("p", { className: "verdict" }),
      drain: element("button", { text: "Drain", attributes: { type: "button" }, on: { click: () => change("drain") } }),
      resume: element("button", { text: "Resume", attributes: { type: "button" }, on: { click: () => change("undrain") } }),
      message: element("span", { className: "muted", attributes: { role: "status" } }),
    };
    body.append(parts.verdict, element("div", { className: "actions" }, [parts.drain, parts.resume, parts.message]));
    parts.hint = element("p", { className: "muted small" });
    body.append(parts.hint);
    parts.curves = [curve("batch"), curve("KV blocks used"), curve("step time")];
    parts.facts = element("dl", { className: "facts-list" });
    parts.requests = element("tbody");
    parts.requestsTitle = element("h3");
    body.append(element("h3", { text: "Now" }), parts.facts, parts.requestsTitle, element("div", { className: "scroll" }, [element("table", {}, [parts.requests])]));
    log.build(body);
  }

  function drawCurves(store, worker, atS) {
    const samples = [];
    for (const snapshot of store.snapshots) {
      if (snapshot.at_s > atS || snapshot.at_s < atS - WINDOW_S) continue;
      const then = snapshot.workers.find(({ worker_id: id }) => id === worker.worker_id);
      if (then) samples.push([snapshot.at_s, then]);
    }
    const values = { batch: (then) => then.running, "KV blocks used": (then) => kvShares(then).used, "step time": (then) => then.step_s };
    for (const { name, line, title } of parts.curves) {
      const all = samples.map(([whenS, then]) => [whenS, values[name](then) ?? 0]);
      const most = Math.max(0, ...all.map(([, value]) => value));
      const show = name === "step time" ? seconds : count;
      setText(title, `${name}, last minute: now ${all.length ? show(all.at(-1)[1]) : "–"}, at most ${show(most)}`);
      line.setAttribute("points", all.map(([whenS, value]) => `${(100 - ((atS - whenS) / WINDOW_S) * 100).toFixed(1)},${(19 - (most ? value / most : 0) * 17).toFixed(1)}`).join(" "));
    }
  }

  function drawFacts(worker) {
    const { used, usedShare, cachedShare } = kvShares(worker);
    const facts = [
      ["Role", worker.role],
      ["Weights", `revision ${worker.revision || "first"}`],
      ["Endpoint", worker.endpoint],
      ["Batch", `${count(worker.running)} running, ${count(worker.waiting)} waiting, ${count(worker.booked)} booked by the router`],
      ["KV blocks", `${count(used)} used (${Math.round(usedShare * 100)} %), ${count(worker.cached_blocks)} cached (${Math.round(cachedShare * 100)} %), ${count(worker.free_blocks)} free, of ${count(worker.num_blocks)}`],
      ["Context", `${count(worker.context_tokens)} tokens`],
      ["Prefill queue", `${count(worker.pending_prefill_tokens)} tokens`],
      ["Steps", `${count(worker.steps)}, the last in ${seconds(worker.step_s)}`],
      ["Last report", `${seconds(worker.silent_s)} ago`],
    ];
    if (!parts.facts.children.length) for (const [name] of facts) parts.facts.append(element("dt", { text: name }), element("dd"));
    facts.forEach(([, value], at) => setText(parts.facts.children[2 * at + 1], value));
  }

  function drawRequests(store, worker, atS) {
    const mine = [];
    for (const request of store.requests.values())
      if (isLive(request, atS) && workerIn(request, phaseAt(request, atS)) === worker.worker_id) mine.push(request);
    setText(parts.requestsTitle, mine.length > 20 ? `Requests: 20 of ${mine.length}` : `Requests: ${mine.length}`);
    reconcile(parts.requests, mine.slice(0, 20), {
      key: ({ key }) => key,
      create: (request) => {
        const button = element("button", { text: shortId(request.request_id), attributes: { type: "button" }, on: { click: () => selection.openRequest(request.key) } });
        return element("tr", {}, [element("td", {}, [button]), element("td"), element("td", { className: "number" })]);
      },
      update: (row, request) => {
        setText(row.cells[1], stateAt(request, atS));
        setText(row.cells[2], `${count(request.output_tokens)} tokens`);
      },
    });
  }

  return {
    forget() {
      shown = null;
      parts = null;
      message = "";
    },
    update(store, { worker, isGone }, atS) {
      if (shown !== worker.worker_id) {
        shown = worker.worker_id;
        message = "";
        build();
      }
      const state = stateOf(worker, isGone);
      setText(parts.verdict, `${worker.role} worker, ${stateText(worker, state)}.`);
      parts.verdict.dataset.level = state === "ready" ? "good" : state === "gone" || state === "lost" || state === "silent" ? "bad" : "";
      const { isAllowed, why } = permissions();
      setHidden(parts.drain, worker.is_draining);
      setHidden(parts.resume, !worker.is_draining);
      for (const button of [parts.drain, parts.resume]) button.disabled = !isAllowed || isBusy || isGone;
      setText(parts.message, message);
      setText(parts.hint, why || "A drained worker finishes its requests and gets no new ones. It can be resumed.");
      drawCurves(store, worker, atS);
      drawFacts(worker);
      drawRequests(store, worker, atS);
      log.update(worker.worker_id, isGone);
    },
  };
}
