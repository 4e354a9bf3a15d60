// The panel at the side: shows the selected request or worker, takes the focus, and gives it back.

import { setHidden, setText } from "./dom.js";
import { workersAt } from "./workers.js";

export function createPanel({ panel, title, body, close }, selection, requestDetail, workerDetail, timeline) {
  let opener = null;

  selection.onChange((selected) => {
    requestDetail.forget();
    workerDetail.forget();
    body.replaceChildren();
    if (selected) {
      if (panel.hidden) opener = document.activeElement;
      setHidden(panel, false);
      setText(title, selected.kind === "request" ? "Request" : `Worker ${selected.id}`);
      title.focus({ preventScroll: true });
      panel.scrollTop = 0;
    } else {
      setHidden(panel, true);
      if (opener?.isConnected) opener.focus({ preventScroll: true });
      opener = null;
    }
  });
  close.addEventListener("click", () => selection.close());

  return (store, atS) => {
    const selected = selection.current;
    if (!selected) return;
    if (selected.kind === "request") {
      const request = store.requests.get(selected.key);
      if (!request) return void setText(body, "This request is older than the history of this page.");
      setText(title, `Request ${request.request_id}`);
      requestDetail.update(request, atS, timeline.isPlayback ? timeline.range()[0] : null);
    } else {
      const found = workersAt(store, atS).find(({ worker }) => worker.worker_id === selected.id) ?? lastSeen(store, selected.id);
      if (!found) return void setText(body, "This worker has left the cluster.");
      workerDetail.update(store, found, atS);
    }
  };
}

function lastSeen(store, id) {
  for (let at = store.snapshots.length - 1; at >= 0; at -= 1) {
    const worker = store.snapshots[at].workers.find(({ worker_id: other }) => other === id);
    if (worker) return { worker, isGone: true };
  }
  return null;
}
