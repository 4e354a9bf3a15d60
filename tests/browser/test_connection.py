"""States of the live page's connection, and recordings, in headless Chromium."""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def some() -> tuple[list[Frame], FrameSource]:
    return recorded(Load(seed=3, rate_rps=10.0), 20.0)


def test_the_page_asks_for_a_token_and_keeps_it_in_the_tab(serve: Serve, open_page: Open, some: Any) -> None:
    server = serve(some[0])
    server.token = "right"
    page = open_page(server.url + "/ui")
    expect(page.locator("#gate-title")).to_have_text("This cluster asks for a token")
    expect(page.locator("#token")).to_be_focused()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#gate-text")).to_contain_text("rejected this token")
    page.locator("#token").fill("right")
    page.keyboard.press("Enter")
    expect(page.locator("#connection-text")).to_have_text("live")
    expect(page.locator("#board")).to_be_visible()
    assert page.evaluate("[sessionStorage.length, localStorage.length]") == [1, 0]
    page.reload()
    expect(page.locator("#connection-text")).to_have_text("live")


def test_a_token_without_permission_is_reported(serve: Serve, open_page: Open, some: Any) -> None:
    server = serve(some[0])
    server.refuse = (403, "only the operator may watch")
    page = open_page(server.url + "/ui")
    expect(page.locator("#gate-title")).to_have_text("Not allowed")
    expect(page.locator("#gate-text")).to_have_text("only the operator may watch")
    server.refuse = None
    page.locator("#other-token").click()
    expect(page.locator("#board")).to_be_visible()


def test_a_lost_connection_is_restored(serve: Serve, open_page: Open, some: Any) -> None:
    server = serve(some[0])
    page = open_page(server.url + "/ui")
    expect(page.locator("#connection-text")).to_have_text("live")
    expect(page.locator("#board")).to_be_visible()
    server.refuse = (503, "the router restarts")
    server.drop()
    expect(page.locator("#banner")).to_contain_text("the router restarts")
    expect(page.locator("#banner")).to_contain_text("Connection lost since")
    expect(page.locator("#connection-text")).to_have_text("connection lost")
    expect(page.locator("#board")).to_be_visible()
    server.refuse = None
    expect(page.locator("#connection-text")).to_have_text("live")
    expect(page.locator("#banner")).to_be_hidden()


def test_an_overloaded_gateway_is_retried(serve: Serve, open_page: Open, some: Any) -> None:
    server = serve(some[0])
    server.refuse = (429, "too many streams")
    page = open_page(server.url + "/ui")
    expect(page.locator("#gate-text")).to_have_text("too many streams")
    server.refuse = None
    expect(page.locator("#connection-text")).to_have_text("live")


def test_a_recording_plays_without_a_network(open_page: Open, recording: Callable[..., str], some: Any) -> None:
    frames, source = some
    page = open_page(recording(frames, source))
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    expect(page.locator("#connection-text")).to_have_text("playback")
    assert page.title() == "A recording"
    page.select_option("#speed", "8")
    wait_until(page, f"window.pdserve.timeline.time() === {frames[-1]['at_s']}")
    expect(page.locator("#scrub-text")).to_have_text("0:20 / 0:20")
    expect(page.locator("#served-count")).to_have_text(str(frames[-1]["totals"]["served"]))
    expect(page.locator("#pause-text")).to_have_text("Play")
    page.locator("#recent tr").last.click()
    expect(page.locator("#detail tr.chosen")).to_be_visible()
    page.locator("#detail-close").click()
    page.locator("#scrub").fill("5")
    then = next(frame for frame in frames if frame["at_s"] == frames[0]["at_s"] + 5)
    expect(page.locator("#served-count")).to_have_text(str(then["totals"]["served"]))
    page.locator("[data-worker=d0]").click()
    expect(page.get_by_role("button", name="Drain")).to_be_disabled()
    assert requested == []


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_reduced_motion_stops_animations(serve: Serve, open_page: Open, some: Any, motion: str) -> None:
    frames, _ = some
    page = open_page(serve(frames).url + "/ui", reduced_motion=motion)
    expect(page.locator("#served-count")).to_have_text(str(frames[-1]["totals"]["served"]))
    wait_for_draws(page, 5)
    assert (page.evaluate("window.pdserve.stats.animated") == 0) == (motion == "reduce")
