// The panel of one request: what was predicted, what was chosen and why, and what then happened.

import { element, setText } from "./dom.js";
import { count, minutes, roundSeconds, seconds } from "./format.js";
import { judged } from "./lists.js";
import { describeTransfer, misses } from "./notable.js";
import { GROUP, hasEnded, LABEL, segments, stateAt } from "./phases.js";

const ASK_AGAIN_MS = 2000; // while the request runs

export function createRequestDetail(body, explain) {
  let shown = null; // {key, state} that the panel was built for
  let explanation = null;
  let problem = "";
  let askedMs = 0;
  let askedFor = "";
  let asking = 0;
  let parts = null;

  function ask(request, state) {
    const now = performance.now();
    const wanted = `${request.key}\n${state}`;
    if (wanted === askedFor && (request.ended_s !== null || now - askedMs < ASK_AGAIN_MS)) return;
    askedFor = wanted;
    askedMs = now;
    const mine = ++asking;
    explain(request.request_id)
      .then((found) => {
        if (mine !== asking) return;
        explanation = found;
        problem = found ? "" : "The router no longer keeps the decision about this request.";
      })
      .catch((error) => {
        if (mine === asking) problem = `The decision could not be read: ${error.message}`;
      })
      .finally(() => {
        if (mine === asking && parts) drawDecision();
      });
  }

  function build() {
    const section = (title) => {
      const heading = element("h3", { text: title });
      const node = element("div");
      body.append(heading, node);
      return node;
    };
    body.replaceChildren();
    parts = { verdict: element("p", { className: "verdict" }) };
    body.append(parts.verdict);
    parts.phases = section("Where the time went");
    parts.phases.className = "bars";
    parts.numbers = section("Predicted and measured");
    parts.decision = section("Decision and candidates");
    parts.facts = section("Request");
    parts.facts.className = "facts-list";
  }

  function drawVerdict(request, atS) {
    const ended = hasEnded(request, atS);
    const state = stateAt(request, atS);
    let text = `Now: ${state}.`;
    let level = "";
    if (ended) {
      const retry = request.retry_after_s === null ? "" : ` The client may retry after ${seconds(request.retry_after_s)}.`;
      const texts = {
        served: "Served, and both targets were met.",
        late: `Served late: ${misses(request).join("; ") || "a target was missed"}.`,
        rejected: `Rejected: ${request.why || "no reason given"}.${retry}`,
        cancelled: "Cancelled by the client.",
        expired: `Its deadline passed: ${request.why}.`,
        failed: `Failed: ${request.why}.`,
      };
      text = texts[request.outcome] ?? state;
      level = { served: "good", rejected: "reject", cancelled: "" }[request.outcome] ?? "bad";
    }
    setText(parts.verdict, text.replace(/\.\.$/, "."));
    parts.verdict.dataset.level = level;
  }

  function drawPhases(request, atS) {
    const spans = segments(request, atS);
    const total = Math.max(1e-6, ...spans.map(([, , untilS]) => untilS - request.arrived_s));
    parts.phases.replaceChildren(
      ...spans.map(([name, beginS, untilS]) => {
        const fill = element("span", { className: `fill ${GROUP[name] ?? "queue"}` });
        fill.style.left = `${(((beginS - request.arrived_s) / total) * 100).toFixed(2)}%`;
        fill.style.width = `${(((untilS - beginS) / total) * 100).toFixed(2)}%`;
        return element("div", { className: "bar" }, [
          element("span", { text: LABEL[name] ?? name }),
          element("span", { className: "track" }, [fill]),
          element("span", { className: "number", text: seconds(untilS - beginS) }),
        ]);
      }),
    );
  }

  function table(headings, rows) {
    const head = element("tr", {}, headings.map((text, at) => element("th", { text, className: at ? "number" : "", attributes: { scope: "col" } })));
    return element("div", { className: "scroll" }, [element("table", {}, [element("thead", {}, [head]), element("tbody", {}, rows)])]);
  }

  function drawNumbers(request) {
    const row = (name, predicted, actual, target) => {
      const measured = element("td", { className: "number" });
      judged(measured, actual, target);
      return element("tr", {}, [
        element("th", { text: name, attributes: { scope: "row" } }),
        element("td", { className: "number", text: seconds(predicted) }),
        measured,
        element("td", { className: "number", text: roundSeconds(target) }),
      ]);
    };
    parts.numbers.replaceChildren(
      table(["", "predicted", "measured", "target"], [
        row("TTFT", request.predicted_ttft_s, request.ttft_s, request.slo_ttft_s),
        row("TPOT", request.predicted_tpot_s, request.tpot_s, request.slo_tpot_s),
      ]),
    );
  }

  function drawDecision() {
    if (!explanation) return parts.decision.replaceChildren(element("p", { className: "muted", text: problem || "Asking the router…" }));
    const { decision, reason, waited_s: waited, candidates } = explanation;
    const nodes = [
      element("p", {}, [element("strong", { text: decision || "no decision" }), ` after ${seconds(waited)} in the queue`]),
      element("p", { className: "muted", text: reason }),
    ];
    if (explanation.ended_because) nodes.push(element("p", { text: `Ended: ${explanation.ended_because}` }));
    if (candidates?.length) nodes.push(table(["placement", "TTFT", "TPOT", "slack", "keeps TPOT", "lost", "preference", "cost"], candidates.map(candidateRow)));
    else nodes.push(element("p", { className: "muted", text: "No placement was compared." }));
    return parts.decision.replaceChildren(...nodes);
  }

  function candidateRow(candidate) {
    const cell = (value, target) => {
      const node = element("td", { className: "number" });
      judged(node, value, target);
      return node;
    };
    const route = candidate.prefill_worker ? `${candidate.prefill_worker} → ${candidate.decode_worker}` : `${candidate.decode_worker} (local)`;
    // The smaller margin of both targets, as a share of the target.
    const slack = candidate.slack === null || candidate.slack === undefined ? "–" : `${candidate.slack > 0 ? "+" : ""}${Math.round(candidate.slack * 100)} %`;
    // The time that this and other requests lose, in shares of their targets, plus the policy's preference.
    const share = (value) => Number.isFinite(value) ? `${(value * 100).toFixed(1)} %` : "–";
    const { cost = null, preference = null } = candidate;
    const lost = cost === null || preference === null ? null : cost - preference;
    // Predictions count from the decision.
    const ttftTarget = explanation.slo_ttft_s === null ? null : explanation.slo_ttft_s - explanation.waited_s;
    return element("tr", { className: candidate.is_chosen ? "chosen" : "" }, [
      element("td", { text: `${candidate.is_chosen ? "▸ " : ""}${route}` }),
      cell(candidate.predicted_ttft_s, ttftTarget),
      cell(candidate.predicted_tpot_s, explanation.slo_tpot_s),
      element("td", { className: "number", text: slack }),
      element("td", { className: "number", text: candidate.is_feasible ? "yes" : "no" }),
      element("td", { className: "number", text: share(lost) }),
      element("td", { className: "number", text: share(cost === null ? null : preference) }),
      element("td", { className: "number", text: share(cost) }),
    ]);
  }

  function drawFacts(request, atS, since) {
    const route = request.prefill_worker ? `prefill on ${request.prefill_worker}, decode on ${request.decode_worker}` : request.decode_worker ? `prefill and decode on ${request.decode_worker}` : "not placed";
    const facts = [
      ["Placement", route],
      ["KV transfer", describeTransfer(request)],
      ["Prompt", `${count(request.prompt_tokens)} tokens, ${count(request.cached_tokens)} from the prefix cache`],
      ["Output", `${count(request.output_tokens)} of at most ${count(request.max_tokens)} tokens`],
      ["Attempt", `${request.attempt}${request.preemptions ? `, preempted ${request.preemptions} times` : ""}`],
      ["Tenant", request.tenant || "none"],
      ["Priority", String(request.priority)],
      ["Arrived", since === null ? `${seconds(atS - request.arrived_s)} ago` : `at ${minutes(request.arrived_s - since)}`],
      ["Request id", request.request_id],
    ];
    const nodes = parts.facts.children;
    if (!nodes.length) for (const [name] of facts) parts.facts.append(element("dt", { text: name }), element("dd"));
    facts.forEach(([, value], at) => setText(nodes[2 * at + 1], value));
  }

  return {
    forget() {
      shown = null;
      parts = null;
      explanation = null;
      askedFor = "";
      asking += 1;
    },
    update(request, atS, since) {
      if (shown !== request.key) {
        shown = request.key;
        explanation = null;
        problem = "";
        build();
        drawDecision();
      }
      drawVerdict(request, atS);
      drawPhases(request, atS);
      drawNumbers(request);
      drawFacts(request, atS, since);
      ask(request, `${request.attempt} ${request.ended_s !== null}`);
    },
  };
}
