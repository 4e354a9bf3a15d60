// The last lines of a worker's log. They are asked for while the panel of the worker is open.

import { element, reconcile, setText } from "./dom.js";

const READ_AGAIN_MS = 2000;
const timeOfDay = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

// `readLog` returns a promise of the lines, or is null if there are none to ask for, as in a recording.
export function createWorkerLog(readLog) {
  let body = null;
  let note = null;
  let asked = 0; // number of the newest call, so that an answer about another worker is dropped
  let askedMs = -Infinity;
  let isWaiting = false;

  function show(lines) {
    const atEnd = body.scrollTop + body.clientHeight >= body.scrollHeight - 4;
    const numbers = new Map(); // equal lines of one moment are told apart by their order
    const items = lines.map((line) => {
      const name = `${line.at_unix_s} ${line.text}`;
      numbers.set(name, (numbers.get(name) ?? 0) + 1);
      return { ...line, key: `${name} ${numbers.get(name)}` };
    });
    reconcile(body, items, {
      key: ({ key }) => key,
      create: ({ at_unix_s: atS, level, text }) =>
        element("li", { attributes: { "data-level": level } }, [
          element("span", { className: "muted", text: `${timeOfDay.format(atS * 1000)} ${level} ` }),
          element("span", { text }),
        ]),
      update: () => {},
    });
    setText(note, lines.length ? "" : "It has logged nothing yet.");
    if (atEnd) body.scrollTop = body.scrollHeight;
  }

  return {
    build(parent) {
      asked += 1;
      askedMs = -Infinity;
      isWaiting = false;
      body = element("ol", { className: "log", attributes: { tabindex: "0", "aria-label": "last lines of the worker's log" } });
      note = element("p", { className: "muted small", text: readLog ? "" : "A recording contains no logs." });
      parent.append(element("h3", { text: "Log" }), body, note);
    },
    update(workerId, isGone) {
      const now = performance.now();
      if (!readLog || isWaiting || now - askedMs < READ_AGAIN_MS) return;
      if (isGone) return setText(note, "The worker is gone. Its last lines before that are above.");
      askedMs = now;
      isWaiting = true;
      const mine = ++asked;
      readLog(workerId)
        .then((lines) => mine === asked && show(lines))
        .catch((error) => mine === asked && setText(note, `The log could not be read: ${error.message}`))
        .finally(() => {
          if (mine === asked) isWaiting = false;
        });
    },
  };
}
