// Cards of the workers: role, state, batch, KV blocks, step time. DOM, updated a few times a second.

import { element, reconcile, roving, setAttribute, setClass, setText } from "./dom.js";
import { bytes, count, seconds } from "./format.js";

const GONE_FOR_S = 20; // a worker that left is shown for this long
const SILENT_S = 5;
const COMPACT_FROM = 5; // workers of one role

export function stateOf(worker, isGone) {
  if (isGone) return "gone";
  if (!worker.is_connected) return "lost";
  if (worker.is_drained) return "drained";
  if (worker.is_draining) return "draining";
  return worker.silent_s > SILENT_S ? "silent" : "ready";
}

const STATE_TEXT = { gone: "gone", lost: "not connected", drained: "drained", draining: "draining", ready: "ready" };

export function stateText(worker, state) {
  return state === "silent" ? `silent for ${seconds(worker.silent_s)}` : STATE_TEXT[state];
}

// Workers of the cluster at that time, and those that left shortly before: [{worker, isGone}], by id.
export function workersAt(store, atS) {
  const now = store.snapshotAt(atS);
  if (!now) return [];
  const found = new Map();
  for (let at = store.snapshots.length - 1; at >= 0; at -= 1) {
    const snapshot = store.snapshots[at];
    if (snapshot.at_s > now.at_s) continue;
    if (snapshot.at_s < now.at_s - GONE_FOR_S) break;
    for (const worker of snapshot.workers)
      if (!found.has(worker.worker_id)) found.set(worker.worker_id, { worker, isGone: snapshot !== now });
  }
  return [...found.values()].sort((a, b) => a.worker.worker_id.localeCompare(b.worker.worker_id, "en", { numeric: true }));
}

export function kvShares(worker) {
  const total = Math.max(1, worker.num_blocks);
  const used = Math.max(0, worker.num_blocks - worker.free_blocks - worker.cached_blocks);
  return { used, usedShare: used / total, cachedShare: worker.cached_blocks / total };
}

export function createWorkerCards(prefillBox, decodeBox, selection) {
  const refreshes = [roving(prefillBox, ".card"), roving(decodeBox, ".card")];

  function create({ worker }) {
    const part = (name, className = name) => [name, element("span", { className })];
    const parts = Object.fromEntries([part("name"), part("state"), part("slots"), part("used"), part("cached"), part("batch"), part("kv", "kv-text"), part("cached-text", "extra"), part("step", "extra"), part("transfer", "extra")]);
    parts.slots.className = "slots";
    const node = element(
      "button",
      {
        className: `card opens ${worker.role}`,
        attributes: { type: "button", tabindex: "-1", "data-worker": worker.worker_id },
        on: { click: () => selection.openWorker(worker.worker_id) },
      },
      [
        element("span", { className: "top" }, [parts.name, parts.state]),
        parts.slots,
        element("span", { className: "kv" }, [parts.cached, parts.used]),
        element("span", { className: "facts" }, [parts.batch, parts.kv, parts["cached-text"], parts.step, parts.transfer]),
      ],
    );
    parts.slots.style.display = "block";
    node.parts = parts;
    return node;
  }

  function update(node, { worker, isGone, transferPerS }) {
    const { parts } = node;
    const state = stateOf(worker, isGone);
    const { used, usedShare, cachedShare } = kvShares(worker);
    setText(parts.name, worker.worker_id);
    setText(parts.state, stateText(worker, state));
    setText(parts.batch, `batch ${count(worker.running)}${worker.waiting ? ` + ${count(worker.waiting)} waiting` : ""}`);
    setText(parts.kv, `KV ${Math.round(usedShare * 100)} % used`);
    setText(parts["cached-text"], `${Math.round(cachedShare * 100)} % cached`);
    setText(parts.step, `step ${seconds(worker.step_s)}`);
    setText(parts.transfer, `${worker.role === "prefill" ? "sends" : "receives"} ${bytes(transferPerS)}/s`);
    parts.used.style.transform = `scaleX(${usedShare.toFixed(3)})`;
    parts.cached.style.transform = `scaleX(${Math.min(1, usedShare + cachedShare).toFixed(3)})`;
    setAttribute(node, "data-state", state);
    setAttribute(node, "aria-current", String(selection.isWorker(worker.worker_id)));
    setAttribute(
      node,
      "aria-label",
      `${worker.role} worker ${worker.worker_id}, ${stateText(worker, state)}, batch ${worker.running}, ${worker.waiting} waiting, ` +
        `${used} of ${worker.num_blocks} KV blocks used, ${worker.cached_blocks} cached, step ${seconds(worker.step_s)}`,
    );
  }

  return (workers) => {
    for (const [box, role] of [[prefillBox, "prefill"], [decodeBox, "decode"]]) {
      const mine = workers.filter(({ worker }) => (worker.role === "prefill" ? "prefill" : "decode") === role);
      setClass(box, "compact", mine.length >= COMPACT_FROM);
      reconcile(box, mine, { key: ({ worker }) => worker.worker_id, create, update });
    }
    for (const refresh of refreshes) refresh();
  };
}
