"""What the live page shows, in headless Chromium, over the feed of a test server."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="the extra `ui-test` is not installed; see `make ui-test`")

from playwright.sync_api import expect

from tests.support.ui_browser import wait_for_draws, wait_until
from tests.support.ui_frames import Frame, FrameSource, Load, recorded
from tests.support.ui_server import UiServer

Serve = Callable[..., UiServer]
Open = Callable[..., Any]

expect.set_options(timeout=60_000)
BUSY = Load(seed=3, rate_rps=10.0)
OVERLOAD = Load(seed=5, rate_rps=60.0)
HOSTILE = '<img src=x onerror="window.hacked=1">${1}"\' \u202e;'


@pytest.fixture(scope="module")
def busy() -> tuple[list[Frame], FrameSource]:
    return recorded(BUSY)


def settle(page: Any, frames: list[Frame]) -> None:
    """Waits until the page shows the last frame, which does not change any more."""
    wait_until(page, f"window.pdserve.timeline.time() === {frames[-1]['at_s']}")
    wait_for_draws(page, 3)


def ended(frames: list[Frame], outcome: str) -> list[Frame]:
    return [request for frame in frames for request in frame["requests"] if request["outcome"] == outcome]


# --- what it shows


def test_tiles_show_the_totals_of_the_feed(serve: Serve, open_page: Open, busy: Any) -> None:
    frames, _ = busy
    page = open_page(serve(frames).url + "/ui")
    settle(page, frames)
    last, before = frames[-1], next(frame for frame in frames if frame["at_s"] == frames[-1]["at_s"] - 10)
    arrived = (last["totals"]["arrived"] - before["totals"]["arrived"]) / 10
    number = page.locator("[data-tile=requests] .number")
    expect(number).to_have_text(f"{arrived:.2f}" if arrived < 10 else f"{arrived:.1f}")
    expect(page.locator("[data-tile=requests] .sub")).to_have_text(f"{last['running']} running")
    expect(page.locator("[data-tile=queue] .number")).to_have_text(str(last["queued"]))
    totals = last["totals"]
    counted = totals["served"] + totals["late"] + totals["rejected"]
    expect(page.locator("[data-tile=attainment] .number")).to_have_text(f"{100 * totals['served'] / counted:.1f}")
    expect(page.locator("[data-tile=ttft] .note")).to_have_text("≤ 600 ms")
    expect(page.locator("#connection-text")).to_have_text("live")
    expect(page.locator("#model")).to_have_text("toy-model")


def test_cards_show_each_worker_in_its_role(serve: Serve, open_page: Open, busy: Any) -> None:
    frames, _ = busy
    page = open_page(serve(frames).url + "/ui")
    settle(page, frames)
    for worker in frames[-1]["workers"]:
        card = page.locator(f"#{worker['role']}-cards [data-worker={worker['worker_id']}]")
        expect(card).to_contain_text(f"batch {worker['running']}")
        used = worker["num_blocks"] - worker["free_blocks"] - worker["cached_blocks"]
        expect(card).to_contain_text(f"KV {round(100 * used / worker['num_blocks'])} % used")
        expect(card).to_have_attribute("aria-label", re.compile(rf"{used} of {worker['num_blocks']} KV blocks used"))


def test_rejections_appear_with_their_reason(serve: Serve, open_page: Open) -> None:
    frames, source = recorded(OVERLOAD, 30.0)
    last = ended(frames, "rejected")[-1]
    page = open_page(serve(frames, source).url + "/ui")
    settle(page, frames)
    expect(page.locator("#reasons tr")).to_have_count(1)
    expect(page.locator("#reasons td").nth(0)).to_have_text(str(len(ended(frames, "rejected"))))
    expect(page.locator("#reasons td").nth(1)).to_have_text(last["why"])
    event = page.locator(".event[data-kind=rejected]", has_text=last["request_id"][:12]).first
    expect(event).to_contain_text(last["why"])
    expect(event).to_contain_text("retry after")
    expect(page.locator("#rejected-count")).to_have_text(str(len(ended(frames, "rejected"))))


def test_a_lost_worker_and_its_requests_are_reported(serve: Serve, open_page: Open) -> None:
    frames, _ = recorded(Load(seed=3, rate_rps=10.0, lost={"d1": 50.0}, drained={"p1": 40.0}), 55.0)
    page = open_page(serve(frames).url + "/ui")
    settle(page, frames)
    expect(page.locator("[data-worker=d1]")).to_have_attribute("data-state", "gone")
    expect(page.locator("[data-worker=p1]")).to_have_attribute("data-state", "drained")
    page.select_option("#event-filter", "workers")
    expect(page.locator(".event[data-kind=lost]")).to_contain_text("d1 decode worker left the cluster")
    expect(page.locator(".event[data-kind=drained]")).to_contain_text("p1")
    page.select_option("#event-filter", "requests")
    expect(page.locator(".event[data-kind=moved]").first).to_contain_text("attempt 2")
    expect(page.locator(".event[data-kind=lost]")).to_have_count(0)


def test_a_preemption_is_reported_by_its_worker(serve: Serve, open_page: Open) -> None:
    frames, _ = recorded(Load(seed=3, rate_rps=2.0), 5.0)
    for frame in frames[-3:]:
        next(one for one in frame["workers"] if one["worker_id"] == "d1")["preemptions"] = 3
    page = open_page(serve(frames).url + "/ui")
    settle(page, frames)
    expect(page.locator(".event[data-kind=preempted]")).to_have_text(
        re.compile("d1 preempted 3 sequences for lack of KV")
    )


def test_transfers_are_counted_per_pair(serve: Serve, open_page: Open, busy: Any) -> None:
    frames, _ = busy
    page = open_page(serve(frames).url + "/ui")
    settle(page, frames)
    newest = {request["request_id"]: request for frame in frames for request in frame["requests"]}
    pairs: dict[str, int] = {}
    for request in newest.values():
        if request["transfer_bytes"]:
            pair = f"{request['prefill_worker']} → {request['decode_worker']}"
            pairs[pair] = pairs.get(pair, 0) + 1
    rows = page.locator("#transfers tr")
    expect(rows).to_have_count(len(pairs))
    for pair, count in pairs.items():
        expect(rows.filter(has_text=pair).locator("td").nth(1)).to_have_text(str(count))


def test_an_empty_cluster_says_how_to_send_a_request(serve: Serve, open_page: Open) -> None:
    frames, _ = recorded(Load(rate_rps=0.0), 2.0)
    server = serve(frames)
    page = open_page(server.url + "/ui")
    expect(page.locator("#empty-code")).to_contain_text(f"curl {server.url}/v1/chat/completions")
    expect(page.locator("#empty-code")).to_contain_text('"model":"toy-model"')


# --- selecting


def test_a_request_opens_with_its_candidates(serve: Serve, open_page: Open, busy: Any) -> None:
    frames, source = busy
    page = open_page(serve(frames, source).url + "/ui")
    settle(page, frames)
    served = ended(frames, "served")[-1]
    row = page.locator("#recent tr", has_text=served["request_id"][:12])
    row.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#detail-title")).to_have_text(f"Request {served['request_id']}")
    expect(page.locator(".verdict")).to_have_text("Served, and both targets were met.")
    explanation = source.explanations[served["request_id"]]
    expect(page.locator("#detail tr.chosen")).to_contain_text(served["decode_worker"])
    candidates = page.locator("#detail table").nth(1).locator("tbody tr")
    expect(candidates).to_have_count(len(explanation["candidates"]))
    expect(page.locator("#detail-body")).to_contain_text(explanation["reason"])
    expect(row).to_have_attribute("aria-current", "true")
    page.keyboard.press("Escape")
    expect(page.locator("#detail")).to_be_hidden()
    expect(row).to_be_focused()


def test_a_dropped_decision_is_reported(serve: Serve, open_page: Open, busy: Any) -> None:
    frames, _ = busy
    page = open_page(serve(frames).url + "/ui")
    settle(page, frames)
    page.locator("#recent tr").last.click()
    expect(page.locator("#detail-body")).to_contain_text("no longer keeps the decision")


def test_arrow_keys_move_among_bars(serve: Serve, open_page: Open, busy: Any) -> None:
    frames, source = busy
    page = open_page(serve(frames, source).url + "/ui")
    settle(page, frames)
    page.locator("#waterfall").focus()
    line = page.locator("#waterfall-focus")
    seen = []
    for key in ("End", "ArrowLeft", "ArrowUp", "Home"):
        page.keyboard.press(key)
        seen.append(line.inner_text())
    assert len(set(seen)) == 4
    page.keyboard.press("Enter")
    expect(page.locator("#detail-title")).to_contain_text(seen[-1].split("…")[0])


def test_arrow_keys_move_among_workers(serve: Serve, open_page: Open, busy: Any) -> None:
    frames, _ = busy
    page = open_page(serve(frames).url + "/ui")
    settle(page, frames)
    page.locator("[data-worker=d0]").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("[data-worker=d1]")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#detail-title")).to_have_text("Worker d1")
    page.keyboard.press("Escape")
    expect(page.locator("[data-worker=d1]")).to_be_focused()


def test_a_worker_is_drained_and_resumed(serve: Serve, open_page: Open, busy: Any) -> None:
    frames, _ = busy
    server = serve(frames)
    page = open_page(server.url + "/ui")
    settle(page, frames)
    page.locator("[data-worker=d2]").click()
    page.get_by_role("button", name="Drain").click()
    expect(page.locator("#detail [role=status]")).to_have_text("The router sends it no new requests.")
    assert server.actions == [("d2", "drain", "1")]
    server.worker_error = (403, "only the operator may drain")
    page.get_by_role("button", name="Drain").click()
    expect(page.locator("#detail [role=status]")).to_have_text("This was not done: only the operator may drain")


def test_a_worker_shows_the_last_lines_of_its_log(serve: Serve, open_page: Open, busy: Any) -> None:
    frames, _ = busy
    server = serve(frames)
    line = {"at_unix_s": 1.8e9, "level": "INFO", "text": "pdserve.worker.host: worker is ready worker_id=d2"}
    server.logs["d2"] = [line, line]
    page = open_page(server.url + "/ui")
    settle(page, frames)
    page.locator("[data-worker=d2]").click()
    lines = page.locator("#detail .log li")
    expect(lines).to_have_count(2)
    expect(lines.first).to_contain_text("INFO pdserve.worker.host: worker is ready worker_id=d2")
    server.logs["d2"] = [line, {**line, "at_unix_s": 1.8e9 + 1, "level": "ERROR", "text": HOSTILE}]
    expect(lines.last).to_contain_text(HOSTILE)
    expect(lines.last).to_have_attribute("data-level", "ERROR")
    assert page.evaluate("window.hacked") is None
    server.worker_error = (503, "worker d2 did not answer within 2 s")
    expect(page.locator("#detail-body")).to_contain_text("could not be read: worker d2 did not answer within 2 s")
    expect(lines).to_have_count(2)
    page.locator("[data-worker=p0]").click()
    expect(lines).to_have_count(0)


def test_a_drained_worker_offers_to_resume(serve: Serve, open_page: Open) -> None:
    frames, _ = recorded(Load(seed=3, drained={"d2": 1.0}), 5.0)
    server = serve(frames)
    page = open_page(server.url + "/ui")
    settle(page, frames)
    page.locator("[data-worker=d2]").click()
    page.get_by_role("button", name="Resume").last.click()
    expect(page.locator("#detail [role=status]")).to_have_text("The router sends it new requests again.")
    assert server.actions == [("d2", "undrain", "1")]


def test_only_the_operator_may_drain(serve: Serve, open_page: Open, busy: Any) -> None:
    frames, _ = busy
    server = serve(frames)
    server.hello["is_operator"] = False
    page = open_page(server.url + "/ui")
    settle(page, frames)
    page.locator("[data-worker=d2]").click()
    expect(page.get_by_role("button", name="Drain")).to_be_disabled()
    expect(page.locator("#detail-body")).to_contain_text("needs the operator's token")


# --- time


def test_space_pauses_and_resumes(serve: Serve, open_page: Open, busy: Any) -> None:
    frames, _ = busy
    page = open_page(serve(frames).url + "/ui")
    settle(page, frames)
    page.keyboard.press("Space")
    expect(page.locator("#connection-text")).to_have_text("paused")
    expect(page.locator("#pause-text")).to_have_text("Resume")
    # On a card, too: Enter opens it, Space does not.
    page.locator("[data-worker=d0]").focus()
    page.keyboard.press("Space")
    expect(page.locator("#connection-text")).to_have_text("live")
    expect(page.locator("#detail")).to_be_hidden()


def test_scrubbing_shows_an_earlier_time(serve: Serve, open_page: Open, busy: Any) -> None:
    frames, _ = busy
    page = open_page(serve(frames).url + "/ui")
    settle(page, frames)
    page.locator("#scrub").focus()
    page.keyboard.press("Home")
    expect(page.locator("#scrub-text")).to_contain_text("−60.0 s")
    expect(page.locator("#served-count")).to_have_text("0")
    page.locator("#scrub").fill("-30")
    then = next(frame for frame in frames if frame["at_s"] == frames[-1]["at_s"] - 30)
    expect(page.locator("#served-count")).to_have_text(str(then["totals"]["served"]))
    card = page.locator("[data-worker=d0]")
    expect(card).to_contain_text(f"batch {next(w for w in then['workers'] if w['worker_id'] == 'd0')['running']}")
    page.locator("#to-live").click()
    expect(page.locator("#served-count")).to_have_text(str(frames[-1]["totals"]["served"]))
    expect(page.locator("#scrub-text")).to_have_text("live")


def test_another_router_begins_a_new_history(serve: Serve, open_page: Open, busy: Any) -> None:
    frames, _ = busy
    server = serve(frames)
    page = open_page(server.url + "/ui")
    settle(page, frames)
    server.hello["router_id"] = "router-2"
    short = frames[:9]
    server.feed, server.burst = (lambda: iter(short)), len(short)
    server.drop()
    settle(page, short)
    assert page.evaluate("window.pdserve.store.range()") == [short[0]["at_s"], short[-1]["at_s"]]


# --- limits and what a caller may contain


def test_a_hostile_request_id_is_text(serve: Serve, open_page: Open) -> None:
    load = Load(seed=3, rate_rps=4.0, name=lambda number: f"{number} {HOSTILE}", tenants=(HOSTILE,), slo_ttft_s=0.05)
    frames, source = recorded(load, 10.0)
    frames = copy.deepcopy(frames)
    for frame in frames:
        for worker in frame["workers"]:
            worker["worker_id"] = HOSTILE + worker["worker_id"]
    page = open_page(serve(frames, source).url + "/ui")
    settle(page, frames)
    page.locator("#recent tr").last.click()
    expect(page.locator("#detail-title")).to_contain_text(HOSTILE)
    expect(page.locator("#detail-body")).to_contain_text(HOSTILE)
    assert page.locator("#board img, #detail img").count() == 0
    assert page.evaluate("window.hacked") is None


def test_the_history_is_bounded(serve: Serve, open_page: Open) -> None:
    frames, _ = recorded(Load(seed=1, rate_rps=10.0), 2.0)
    page = open_page(serve(frames).url + "/ui")
    settle(page, frames)
    sizes = page.evaluate(
        """frame => {
          const { store } = window.pdserve, sizes = [];
          for (let number = 1; number <= 8000; number += 1) {
            const at_s = frame.at_s + number / 10;
            const requests = [0, 1, 2].map(part => ({ ...frame.requests[0], request_id: `${number}-${part}`,
              arrived_s: at_s, ended_s: at_s, outcome: "rejected", why: "full" }));
            store.ingest({ ...frame, at_s, requests });
            if (number % 2000 === 0) sizes.push([store.requests.size, store.snapshots.length, store.events.length]);
          }
          return sizes;
        }""",
        next(frame for frame in reversed(frames) if frame["requests"]),
    )
    for requests, snapshots, events in sizes:
        assert requests <= 5000
        assert snapshots <= 300 / 0.12 + 2
        assert events <= 400


def test_a_quiet_cluster_keeps_only_its_last_minutes(serve: Serve, open_page: Open) -> None:
    frames, _ = recorded(Load(seed=1, rate_rps=10.0), 2.0)
    page = open_page(serve(frames).url + "/ui")
    settle(page, frames)
    sizes = page.evaluate(
        """frame => {
          const { store } = window.pdserve;
          for (let number = 1; number <= 3000; number += 1) store.ingest({ ...frame, at_s: frame.at_s + number / 4 });
          return [store.requests.size, store.snapshots.length];
        }""",
        frames[-1],
    )
    live = sum(request["ended_s"] is None for request in frames[-1]["requests"])
    assert sizes[0] <= live + len(frames[-1]["requests"])
    assert sizes[1] <= 300 * 4 + 2


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_nothing_is_wider_than_a_phone(serve: Serve, open_page: Open, busy: Any, theme: str) -> None:
    frames, source = busy
    page = open_page(serve(frames, source).url + "/ui", width=360, height=740, color_scheme=theme)
    settle(page, frames)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.locator("[data-worker=d0]").click()
    expect(page.locator("#detail")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate("document.getElementById('detail').scrollWidth") <= 360


def test_the_theme_is_chosen_and_remembered(serve: Serve, open_page: Open, busy: Any) -> None:
    frames, _ = busy
    page = open_page(serve(frames).url + "/ui", color_scheme="light")
    root = page.locator("html")
    expect(root).to_have_attribute("data-theme", "light")
    page.keyboard.press("t")
    expect(root).to_have_attribute("data-theme", "dark")
    page.reload()
    expect(root).to_have_attribute("data-theme", "dark")


def test_every_control_has_an_accessible_name(serve: Serve, open_page: Open, busy: Any) -> None:
    frames, _ = busy
    page = open_page(serve(frames).url + "/ui")
    settle(page, frames)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, canvas[tabindex]")]
          .filter(node => node.checkVisibility())
          .filter(node => !(node.ariaLabel || node.textContent.trim() || node.labels?.length))
          .map(node => node.outerHTML)"""
    )
    assert nameless == []


def test_tab_reaches_every_part(serve: Serve, open_page: Open, busy: Any) -> None:
    frames, _ = busy
    page = open_page(serve(frames).url + "/ui")
    settle(page, frames)
    reached = set()
    for _ in range(25):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.closest('[id]')?.id"))
    parts = {"pause", "scrub", "help-open", "theme", "prefill-cards", "decode-cards", "waterfall", "events", "recent"}
    assert parts <= reached
