// The connection's state: the pill, the banner, the form for a token, and how to send a first request.

import { byId, setAttribute, setHidden, setText } from "./dom.js";
import { clockTime } from "./format.js";

const OWN_REQUESTS = 1; // `pdserve up` sends one before it says that it is ready

export function createStates(feed) {
  const [pill, pillText, banner, gate, board] = ["connection", "connection-text", "banner", "gate", "board"].map(byId);
  let state = { name: "connecting" };

  byId("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const input = byId("token");
    const token = input.value.trim();
    input.value = "";
    if (token) feed.useToken(token);
  });
  byId("other-token").addEventListener("click", () => feed.forgetToken());

  const GATES = {
    connecting: ["Connecting…", "The page waits for the router's first report."],
    token: ["This cluster asks for a token", "The token is kept in this tab only, and is forgotten when it is closed."],
    forbidden: ["Not allowed", "This token may not watch the cluster."],
    lost: ["No connection", "The page tries again by itself."],
  };

  function update(isPaused, hasFrames, isPlayback) {
    const name = isPlayback ? "playback" : state.name;
    // Before the first frame, and where the caller may not watch, there is nothing to show but this.
    const isGated = !isPlayback && (name === "token" || name === "forbidden" || !hasFrames);
    setHidden(gate, !isGated);
    setHidden(board, isGated);
    if (isGated) drawGate(name === "live" ? "connecting" : name);
    const texts = { connecting: "connecting", live: "live", lost: "connection lost", token: "token needed", forbidden: "not allowed", playback: "playback" };
    const isHeld = isPaused && name === "live";
    setAttribute(pill, "data-state", isHeld ? "paused" : name);
    setText(pillText, isHeld ? "paused" : texts[name]);
    const isLost = name === "lost" && hasFrames;
    setHidden(banner, !isLost);
    if (isLost) setText(banner, `Connection lost since ${clockTime(state.since)}${state.message ? `: ${state.message}` : ""}. The page reconnects by itself; what it shows is old.`);
  }

  function drawGate(name) {
    const [title, text] = GATES[name];
    setText(byId("gate-title"), title);
    setText(byId("gate-text"), state.message || text);
    setHidden(byId("token-form"), name !== "token");
    setHidden(byId("other-token"), name !== "forbidden");
    if (name === "token" && document.activeElement === document.body) byId("token").focus();
  }

  return {
    update,
    set(next) {
      state = next;
    },
  };
}

export function createEmpty(model) {
  const [box, code, copy] = ["empty", "empty-code", "copy"].map(byId);
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      setText(copy, "Copied");
    } catch {
      // The clipboard may be denied, as over plain HTTP; the text can be selected.
      getSelection().selectAllChildren(code);
    }
  });
  return (snapshot, isPlayback) => {
    const isEmpty = !isPlayback && snapshot !== null && snapshot.totals.arrived <= OWN_REQUESTS;
    setHidden(box, !isEmpty);
    if (!isEmpty) return;
    const body = JSON.stringify({ model: model(), messages: [{ role: "user", content: "Hello" }], max_tokens: 64 });
    const needsToken = sessionStorage.getItem("pdserve.token") ? ` \\\n  -H "authorization: Bearer $PDSERVE_TOKEN"` : "";
    setText(code, `curl ${location.origin}/v1/chat/completions${needsToken} \\\n  -H 'content-type: application/json' \\\n  -d '${body.replaceAll("'", "'\\''")}'`);
  };
}
