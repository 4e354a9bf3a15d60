// Reads the live feed: an event stream over fetch, because EventSource cannot send a token. Reconnects with backoff.

const TOKEN_KEY = "pdserve.token";
const FIRST_WAIT_S = 0.5;
const LONGEST_WAIT_S = 8;
const SILENCE_S = 15; // without a byte, the connection counts as lost
const MAX_BUFFERED = 16 * 1024 * 1024; // characters of one event

// States: connecting, live, token (401), forbidden (403), lost.
export function createFeed({ onFrame, onHello, onState }) {
  let token = sessionStorage.getItem(TOKEN_KEY);
  let waitS = FIRST_WAIT_S;
  let lostSince = null;
  let attempt = null; // AbortController of the connection in progress
  let timer = 0;
  let isRejected = false; // the token that was given is wrong

  function authorization() {
    return token ? { authorization: `Bearer ${token}` } : {};
  }

  async function connect() {
    clearTimeout(timer);
    const mine = new AbortController();
    attempt?.abort();
    attempt = mine;
    onState(lostSince === null ? { name: "connecting" } : { name: "lost", since: lostSince, message: "reconnecting" });
    let watchdog = 0;
    const watch = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => mine.abort(new Error(`no data for ${SILENCE_S} s`)), SILENCE_S * 1000);
    };
    try {
      watch();
      const response = await fetch("/ui/events", {
        headers: { accept: "text/event-stream", ...authorization() },
        signal: mine.signal,
        cache: "no-store",
        credentials: "omit",
        redirect: "error",
      });
      if (!response.ok) {
        const message = await errorMessage(response);
        if (mine !== attempt) return;
        if (response.status === 401) return askForToken(message);
        if (response.status === 403) return onState({ name: "forbidden", message });
        throw new Error(message);
      }
      await read(response.body, mine, watch);
      throw new Error("the router ended the stream");
    } catch (error) {
      if (mine === attempt) lose(mine.signal.aborted ? mine.signal.reason : error);
    } finally {
      clearTimeout(watchdog);
      mine.abort();
    }
  }

  async function read(body, mine, watch) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done || mine !== attempt) return;
      watch();
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      if (rest.length > MAX_BUFFERED) throw new Error("an event of the feed is too long");
      for (const event of events) handle(event);
    }
  }

  function handle(event) {
    const data = event
      .split("\n")
      .filter((line) => line.startsWith("data:"))
      .map((line) => line.slice(5))
      .join("\n");
    if (!data) return;
    const frame = JSON.parse(data);
    if (frame.error) throw new Error(String(frame.error.message));
    if (frame.hello) {
      waitS = FIRST_WAIT_S;
      lostSince = null;
      isRejected = false;
      onHello(frame.hello);
      onState({ name: "live" });
    } else {
      onFrame(frame);
    }
  }

  function askForToken(message) {
    isRejected = token !== null;
    onState({ name: "token", message: isRejected ? `The cluster rejected this token: ${message}` : "" });
  }

  function lose(error) {
    lostSince ??= Date.now();
    onState({ name: "lost", since: lostSince, message: error?.message ?? "" });
    // Jitter, so that the pages of a whole team do not return in the same moment.
    timer = setTimeout(connect, waitS * 1000 * (0.75 + Math.random() / 2));
    waitS = Math.min(waitS * 2, LONGEST_WAIT_S);
  }

  return {
    connect,
    useToken(given) {
      token = given;
      sessionStorage.setItem(TOKEN_KEY, given);
      connect();
    },
    forgetToken() {
      token = null;
      sessionStorage.removeItem(TOKEN_KEY);
      connect();
    },
    // The explanation of a request; null if it is no longer kept.
    async explain(requestId) {
      const response = await fetch(`/ui/requests/${encodeURIComponent(requestId)}`, {
        headers: authorization(),
        cache: "no-store",
        credentials: "omit",
      });
      if (response.status === 404) return null;
      if (!response.ok) throw new Error(await errorMessage(response));
      return response.json();
    },
    // The last lines of a worker's log, the oldest first.
    async workerLog(workerId) {
      const response = await fetch(`/ui/workers/${encodeURIComponent(workerId)}/log`, {
        headers: authorization(),
        cache: "no-store",
        credentials: "omit",
      });
      if (!response.ok) throw new Error(await errorMessage(response));
      return (await response.json()).lines;
    },
    // The last used sessions that the router knows.
    async sessions() {
      const response = await fetch("/v1/sessions?limit=8", { headers: authorization(), cache: "no-store", credentials: "omit" });
      if (!response.ok) throw new Error(await errorMessage(response));
      return (await response.json()).data;
    },
    // `action`: "drain" or "undrain".
    async changeWorker(workerId, action) {
      const response = await fetch(`/ui/workers/${encodeURIComponent(workerId)}/${action}`, {
        method: "POST",
        headers: { "x-pdserve-ui": "1", ...authorization() },
        credentials: "omit",
      });
      if (!response.ok) throw new Error(await errorMessage(response));
    },
  };
}

async function errorMessage(response) {
  try {
    const answer = await response.json();
    return String(answer.error.message);
  } catch {
    return `HTTP status ${response.status}`;
  }
}
