// The list of events and the tables: KV transfers, rejections by reason, sessions, latest requests. DOM, with a keyboard.

import { element, reconcile, roving, setAttribute, setHidden, setText } from "./dom.js";
import { bytes, clockTime, count, minutes, rate, seconds, shortId } from "./format.js";
import { percentile, rejectionReasons } from "./metrics.js";
import { transfersBefore } from "./notable.js";
import { hasEnded, isLate, meets, OUTCOME_MARK, phaseAt, stateAt, GROUP } from "./phases.js";

const MAX_EVENTS_SHOWN = 80;
const MAX_ROWS = 25;
const SIGN = { rejected: "✕", late: "▲", failed: "■", expired: "▼", lost: "■", joined: "●", drained: "◇", draining: "◇", resumed: "●", preempted: "↺", moved: "→" };

export function createEventList(list, none, filter, selection, timeline) {
  const refresh = roving(list, ".event");
  const create = (event) => {
    const [when, who, what] = [element("span", { className: "when" }), element("span", { className: "who" }), element("span", { className: "what" })];
    const button = element(
      "button",
      {
        className: "event opens",
        attributes: { type: "button", tabindex: "-1", "data-kind": event.kind },
        on: { click: () => (event.worker_id ? selection.openWorker(event.worker_id) : selection.openRequest(event.request_key)) },
      },
      [when, element("span", { className: "sign", text: SIGN[event.kind] ?? "•", attributes: { "aria-hidden": "true" } }), element("span", {}, [who, " ", what])],
    );
    setText(who, event.worker_id ?? shortId(event.request_id));
    setText(what, event.text);
    button.when = when;
    const item = element("li", {}, [button]);
    item.button = button;
    return item;
  };
  return (store, atS) => {
    const shown = [];
    for (let at = store.events.length - 1; at >= 0 && shown.length < MAX_EVENTS_SHOWN; at -= 1) {
      const event = store.events[at];
      if (event.at_s > atS) continue;
      if (filter.value && (filter.value === "workers") !== Boolean(event.worker_id)) continue;
      shown.push(event);
    }
    let number = 0;
    reconcile(list, shown, {
      key: (event) => (event.number ??= ++lastNumber.value),
      create,
      update: (node, event) => {
        number += 1;
        const wall = timeline.wallClock(event.at_s);
        setText(node.button.when, wall === null ? minutes(event.at_s - timeline.range()[0]) : clockTime(Math.round(wall / 1000) * 1000));
      },
    });
    refresh();
    setHidden(none, number > 0);
  };
}

const lastNumber = { value: 0 };

function cells(row, texts) {
  texts.forEach((text, at) => setText(row.cells[at], text));
}

function tableRow(numbers, size) {
  const row = element("tr");
  for (let at = 0; at < size; at += 1) row.append(element("td", { className: numbers.includes(at) ? "number" : "" }));
  return row;
}

export function createTransferTable(body, none) {
  return (store, atS) => {
    const pairs = transfersBefore(store.requests.values(), atS, 60);
    reconcile(body, pairs, {
      key: (pair) => pair.pair,
      create: () => tableRow([1, 2, 3, 4, 5], 6),
      update: (row, pair) => {
        const times = pair.times.sort((a, b) => a - b);
        const busy = times.reduce((sum, time) => sum + time, 0);
        cells(row, [pair.pair, count(pair.count), bytes(pair.bytes / pair.count), bytes(pair.bytes), seconds(percentile(times, 0.5)), busy > 0 ? rate(pair.bytes / busy) : "–"]);
      },
    });
    setHidden(none, pairs.length > 0);
    setHidden(body.closest(".scroll"), pairs.length === 0);
  };
}

export function createReasonTable(body, none) {
  return (store, atS) => {
    const reasons = rejectionReasons(store, atS, 300).slice(0, 8);
    reconcile(body, reasons, {
      key: ({ reason }) => reason,
      create: () => tableRow([0], 2),
      update: (row, { count: number, example }) => cells(row, [count(number), example]),
    });
    setHidden(none, reasons.length > 0);
    setHidden(body.closest(".scroll"), reasons.length === 0);
  };
}

export function createRecentTable(body, selection) {
  const refresh = roving(body, "tr");
  const create = (request) => {
    const row = tableRow([3, 4, 5, 6], 7);
    row.className = "opens";
    row.tabIndex = -1;
    row.addEventListener("click", () => selection.openRequest(request.key));
    row.addEventListener("keydown", (event) => {
      if (event.key === "Enter") selection.openRequest(request.key);
    });
    row.sign = element("span", { className: "sign", attributes: { "aria-hidden": "true" } });
    row.state = element("span");
    row.cells[1].append(row.sign, row.state);
    setText(row.cells[0], shortId(request.request_id));
    row.cells[0].title = request.request_id;
    return row;
  };
  const update = (row, { request, atS }) => {
    const ended = hasEnded(request, atS);
    setText(row.sign, ended ? (OUTCOME_MARK[request.outcome] ?? "") : "■");
    const level = !ended ? (GROUP[phaseAt(request, atS)] ?? "queue") : request.outcome === "served" ? "good" : ({ rejected: "text", cancelled: "muted" }[request.outcome] ?? "bad");
    row.sign.style.color = `var(--${level})`;
    setText(row.state, `${stateAt(request, atS)}${!ended && isLate(request, atS) ? ", late" : ""}`);
    const route = request.prefill_worker ? `${request.prefill_worker} → ${request.decode_worker}` : request.decode_worker ? `${request.decode_worker} (local)` : "–";
    setText(row.cells[2], route);
    setText(row.cells[3], `${count(request.prompt_tokens)} (${count(request.cached_tokens)})`);
    setText(row.cells[4], `${count(request.output_tokens)} of ${count(request.max_tokens)}`);
    judged(row.cells[5], request.ttft_s, request.slo_ttft_s);
    judged(row.cells[6], request.tpot_s, request.slo_tpot_s);
    setAttribute(row, "aria-current", String(selection.isRequest(request.key)));
  };
  return (store, atS) => {
    const shown = [];
    for (const request of [...store.requests.values()].reverse()) {
      if (request.arrived_s > atS) continue;
      shown.push({ request, atS });
      if (shown.length === MAX_ROWS) break;
    }
    reconcile(body, shown, { key: ({ request }) => request.key, create: ({ request }) => create(request), update });
    refresh();
  };
}

const SESSIONS_MS = 5000;
const MAX_CONVERSATIONS = 12;

// Asks for the sessions while the page is shown, and draws their last used conversations. `read`: null in a recording.
export function createSessionTable(body, none, read) {
  let askedMs = -Infinity;
  let isAsking = false;
  const cached = (one) => (one.cached.length ? one.cached.map((held) => `${held.worker_id} ${count(held.tokens)}`).join(", ") : one.is_cached_known ? "nowhere" : "not known");
  // Of the session's task: its verdict, or the time that is left.
  const taskText = (task, nowS) => {
    if (task === null) return "–";
    if (task.state === "running") return nowS > task.due_at_s ? "late" : `${seconds(task.due_at_s - nowS)} left`;
    return task.state === "in_time" ? "in time" : task.state === "late" ? "late" : "not known";
  };
  const show = (sessions) => {
    const nowS = Date.now() / 1000;
    const shown = sessions.flatMap((session) => session.conversations.map((one, at) => ({ session, one, at })));
    shown.sort((a, b) => b.one.used_at_s - a.one.used_at_s);
    reconcile(body, shown.slice(0, MAX_CONVERSATIONS), {
      key: ({ session, at }) => `${session.router_id}/${session.tenant}/${session.session_id}/${at}`,
      create: () => tableRow([1, 2, 3, 4, 5], 7),
      update: (row, { session, one }) => {
        const next = one.running ? "running" : one.is_over ? "over" : one.until_s === null ? "–" : seconds(Math.max(one.until_s - nowS, 0));
        const name = session.tenant ? `${session.tenant}/${shortId(session.session_id)}` : shortId(session.session_id);
        cells(row, [name, count(one.turns), count(one.prompt_tokens), seconds(Math.max(nowS - one.used_at_s, 0)), next, taskText(session.task, nowS), cached(one)]);
        row.cells[0].title = session.session_id;
      },
    });
    setHidden(none, shown.length > 0);
    setHidden(body.closest(".scroll"), shown.length === 0);
  };
  show([]);
  if (read === null) setText(none, "A recording contains no sessions.");
  return async () => {
    if (read === null || isAsking || document.hidden || performance.now() - askedMs < SESSIONS_MS) return;
    isAsking = true;
    try {
      show(await read());
      setText(none, "No session is known.");
    } catch (error) {
      setText(none, `The sessions could not be read: ${error.message}`);
      setHidden(none, false);
    }
    askedMs = performance.now();
    isAsking = false;
  };
}

// A value with its verdict: a tick or a triangle beside the number.
export function judged(node, value, target) {
  setText(node, seconds(value));
  const verdict = meets(value, target);
  node.classList.toggle("miss", verdict === false);
  node.classList.toggle("hit", verdict === true);
}
