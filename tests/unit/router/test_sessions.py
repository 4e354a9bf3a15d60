"""What the router learns of sessions, and what a hint of a client may do."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from pdserve.core.protocol import Cancel, EndText, Prefill, Reserve
from router.state import sessions as rooms
from router.state import turns as learned
from router.state.conversations import MAX_HASHES, Conversation
from router.state.interface import ClientLeft, SessionEnded
from router.state.sessions import Sessions
from router.state.turns import IDLE_S, LEAST_SEEN, ReuseModel
from tests.unit.router.given import Given
from tests.unit.router.router_events import BLOCK, arrival

PLENTY = 10**9  # KV tokens


def chain(name: str, num_blocks: int) -> tuple[bytes, ...]:
    return tuple(f"{name}/{index}".encode() for index in range(num_blocks))


class World:
    """One Sessions and its clock."""

    def __init__(self, kv_tokens: int = PLENTY) -> None:
        self.counters: Counter[str] = Counter()
        self.sessions = Sessions(self.counters)
        self.now_s = 0.0
        self.kv_tokens = kv_tokens

    def begin(self, name: str = "a", blocks: int = 4, **facts: Any) -> Conversation:
        facts = {"block_hashes": chain(name, blocks), "prompt": blocks * BLOCK, **facts}
        found = self.sessions.arrived(arrival("r", **facts), self.kv_tokens, self.now_s)
        self.sessions.check()
        assert found is not None
        return found

    def end(self, conversation: Conversation, *, is_served: bool = True) -> None:
        self.sessions.ended(conversation, self.now_s, is_served=is_served)
        self.sessions.check()

    def turn(self, name: str = "a", blocks: int = 4, **facts: Any) -> Conversation:
        """A request of one second."""
        conversation = self.begin(name, blocks, **facts)
        self.now_s += 1.0
        self.end(conversation)
        return conversation

    def talk(self, name: str, turns: int, pause_s: float, **facts: Any) -> Conversation:
        for number in range(turns):
            self.now_s += pause_s if number else 0.0
            conversation = self.turn(name, 4 + number, **facts)
        return conversation


# --- which requests belong together -------------------------------------------------------------------------------


def test_a_prompt_that_extends_another_is_its_next_turn() -> None:
    world = World()
    first = world.turn("a", 4)
    assert world.turn("a", 7) is first
    assert (first.turns, first.session.is_named, first.num_blocks) == (2, False, 7)
    assert world.turn("b", 4) is not first


def test_a_branch_of_an_earlier_prompt_is_another_conversation() -> None:
    world = World()
    first = world.turn("a", 4)
    world.turn("a", 7)
    branch = world.turn("a", 4, block_hashes=(*chain("a", 4), b"other"))
    assert branch is not first
    assert first.turns == 2


def test_a_named_session_has_the_conversations_that_its_client_says() -> None:
    world = World()
    main = world.turn("a", 4, session_id="s")
    sub = world.turn("b", 4, session_id="s")
    other = world.turn("a", 4, session_id="t")
    assert main.session is sub.session is not other.session
    assert world.turn("b", 5, session_id="s") is sub
    assert main.session.turns == 3


def test_a_name_counts_within_its_tenant() -> None:
    world = World()
    assert world.turn(session_id="s", tenant="x").session is not world.turn(session_id="s", tenant="y").session
    assert [one.tenant for one in world.sessions.page("x", 0, 9)] == ["x"]


def test_serials_of_several_routers_have_one_order() -> None:
    worlds, found = (World(), World()), []
    for number in range(6):
        world = worlds[number % 2]
        world.now_s = number / 1e3
        for text in ("one", "at once"):
            found.append(world.begin(block_hashes=(b"system", f"{text} {number}".encode())).session)
    assert [one.serial for one in found] == sorted({one.serial for one in found})
    assert len({one.session_id for one in found}) == len(found)


def test_prompts_without_a_full_block_need_a_name() -> None:
    world = World()
    facts = arrival("r", block_hashes=())
    assert world.sessions.arrived(facts, 0, 0.0) is None
    named = world.turn(block_hashes=(), session_id="s")
    assert world.turn("a", 4, session_id="s") is named
    assert named.turns == 2


def test_a_client_may_name_its_session_as_the_router_has_named_another() -> None:
    world = World()
    made = world.turn("a", 4).session
    named = world.turn(block_hashes=(), session_id=made.session_id)
    assert named.session is not made
    assert (named.session.is_named, named.session.session_id) == (True, made.session_id)
    assert world.turn("a", 5, session_id=made.session_id) is named
    assert world.turn("a", 5).session is made


def test_users_of_one_system_prompt_have_conversations_of_their_own() -> None:
    """Their first questions are shorter than a block, so that all their prompts have the same full blocks."""
    world, system = World(), chain("system", 10)
    firsts = [world.turn(block_hashes=system, prompt=162 + 5 * user % 7) for user in range(20)]
    assert max(one.turns for one in firsts) <= 2
    for user in range(20):
        second = world.turn(block_hashes=(*system, *chain(f"user {user}", 3)), prompt=210)
        third = world.turn(block_hashes=(*system, *chain(f"user {user}", 5)), prompt=240)
        assert second is third
        assert second.turns <= 4
    assert len({*world.sessions._conversations.values()}) >= 20
    late = world.turn(block_hashes=system, prompt=165)
    assert late.turns == 1
    assert world.turn(block_hashes=(*system, b"of another"), prompt=190) is not late


def test_questions_at_the_same_time_belong_to_several_users() -> None:
    world, system = World(), chain("system", 10)
    begun = [world.begin(block_hashes=system, prompt=162 + user) for user in range(5)]
    assert len({one.number for one in begun}) == 5


def test_the_same_prompt_again_is_no_turn() -> None:
    world = World()
    first = world.turn("a", 4)
    assert world.turn("a", 4) is first
    assert first.turns == 1
    assert world.turn("a", 5) is first
    assert first.turns == 2


def test_answers_to_one_prompt_are_one_turn() -> None:
    world = World()
    both = [world.begin("a", 4) for _ in range(2)]
    assert both[0] is both[1]
    for one in both:
        world.end(one)
    assert (both[0].turns, both[0].running) == (1, 0)


def test_a_request_that_was_not_served_is_repeated_in_the_same_turn() -> None:
    world = World()
    conversation = world.begin("a", 4)
    world.end(conversation, is_served=False)
    assert world.turn("a", 4).turns == 1
    assert world.turn("a", 5).turns == 2


def test_a_turn_of_which_one_answer_was_served_is_not_repeated() -> None:
    world = World()
    both = [world.begin("a", 4) for _ in range(2)]
    for one, is_served in zip(both, (True, False), strict=True):
        world.end(one, is_served=is_served)
    assert world.turn("a", 9).turns == 2


# --- what is learned ----------------------------------------------------------------------------------------------


def test_a_pause_is_expected_once_enough_were_seen() -> None:
    world = World()
    assert world.talk("a", 3, 10.0).reuse_within_s is None
    world.talk("b", 20, 10.0)
    expected_s = world.turn("c", 4).reuse_within_s
    assert expected_s is not None
    assert 10.0 <= expected_s <= 10.0 * 2**0.5
    assert world.sessions.growth_tokens(world.turn("c", 5)) == pytest.approx(BLOCK)


def test_conversations_that_mostly_end_are_not_expected_again() -> None:
    world = World()
    for number in range(30):
        world.turn(f"once {number}", 4)
    world.talk("a", 6, 10.0)
    world.now_s += IDLE_S + 1.0
    assert world.turn("b", 4).reuse_within_s is None


def test_most_pauses_are_shorter_than_predicted() -> None:
    model, rng = ReuseModel(), random.Random(0)
    pauses = [rng.expovariate(0.1) for _ in range(400)]
    for pause_s in pauses:
        model.continued(pause_s, 0)
    within_s = model.within_s()
    assert within_s is not None
    assert 0.8 < sum(one <= within_s for one in pauses) / len(pauses) < 0.99


def test_pauses_of_any_length_have_a_bin() -> None:
    model = ReuseModel()
    for pause_s in (0.0, 1e9, float("inf")) * int(LEAST_SEEN):
        model.continued(pause_s, -5)
    assert model.within_s() == pytest.approx(learned.SHORTEST_PAUSE_S * 2.0 ** (0.5 * (learned.NUM_BINS - 1)))
    assert model.growth_tokens == 0.0


def test_tenants_learn_apart() -> None:
    world = World()
    world.talk("a", 20, 10.0, tenant="x")
    assert world.turn("b", 4, tenant="x").reuse_within_s is not None
    assert world.turn("b", 4, tenant="y").reuse_within_s is None


def test_a_conversation_that_goes_on_after_long_is_no_end() -> None:
    world = World()
    conversation = world.talk("a", 2, 5.0)
    world.now_s += IDLE_S + 1.0
    world.turn("b", 4)
    assert conversation.is_over
    assert world.turn("a", 9) is conversation
    assert not conversation.is_over
    model = world.sessions._tenants[""].model(0)
    assert (model._continued, model._ended) == (pytest.approx(2.0, abs=0.1), pytest.approx(0.0, abs=0.1))


# --- hints --------------------------------------------------------------------------------------------------------


def test_a_hint_has_precedence() -> None:
    world = World()
    world.talk("a", 20, 10.0)
    conversation = world.turn("b", 4, reuse_within_s=300.0)
    assert (conversation.reuse_within_s, conversation.until_s) == (300.0, world.now_s + 300.0)


def test_a_client_may_say_that_its_session_ends() -> None:
    world = World()
    conversation = world.turn("a", 4, reuse_within_s=0.0)
    assert (conversation.reuse_within_s, conversation.until_s, conversation.is_over) == (0.0, None, True)
    assert not world.turn("a", 5).is_over  # it was wrong


def test_broken_hints_are_not_believed_until_later_ones_come_true() -> None:
    world = World()
    for number in range(6):
        world.turn(f"lie {number}", 4, reuse_within_s=5.0)
        world.now_s += 6.0
    assert world.turn("a", 4, reuse_within_s=5.0).reuse_within_s is None
    assert world.turn("a", 4, reuse_within_s=5.0, tenant="other").reuse_within_s == 5.0
    for number in range(8):
        conversation = world.turn("true", 4 + number, reuse_within_s=5.0)
    assert conversation.reuse_within_s == 5.0


def test_hints_hold_no_more_than_the_tenants_part_of_memory() -> None:
    world = World(kv_tokens=10 * 4 * BLOCK)
    world.turn("other", 4, tenant="y")
    told = [world.turn(f"a{number}", 4, reuse_within_s=600.0, tenant="x") for number in range(8)]
    assert [one.reuse_within_s for one in told] == [600.0] * 5 + [None] * 3
    world.now_s += 601.0  # the hints are over, and broken
    world.turn("b", 4, tenant="x")
    assert world.sessions._tenants["x"].held_tokens == 0


def test_tenants_that_are_gone_have_no_part_of_memory() -> None:
    world = World(kv_tokens=1000)
    for number in range(8):
        world.turn("once", 4, tenant=f"gone {number}")
    world.end(world.begin("failed", 4, tenant="failed"), is_served=False)
    world.turn("over", 4, tenant="over", reuse_within_s=0.0)
    assert world.turn("a", 32, tenant="x", reuse_within_s=60.0).reuse_within_s is None
    world.now_s += 10 * IDLE_S
    assert world.turn("b", 32, tenant="x", reuse_within_s=60.0).reuse_within_s == 60.0


def test_a_hint_that_came_true_frees_its_part() -> None:
    world = World(kv_tokens=6 * BLOCK)
    for number in range(3):
        assert world.turn("a", 4 + number, reuse_within_s=60.0).reuse_within_s == 60.0


# --- bounds -------------------------------------------------------------------------------------------------------


def test_every_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in {
        "MAX_CONVERSATIONS": 40,
        "MAX_OF_TENANT": 12,
        "MAX_OF_SESSION": 3,
        "MAX_TENANTS": 10,
    }.items():
        monkeypatch.setattr(rooms, name, most)
    world, rng = World(kv_tokens=4000), random.Random(3)
    running: list[Conversation] = []
    for number in range(3000):
        world.now_s += rng.choice([0.01, 1.0, 30.0, IDLE_S])
        if running and rng.random() < 0.5:
            world.end(running.pop(rng.randrange(len(running))), is_served=rng.random() < 0.8)
            continue
        tenant, listed = f"t{int(rng.expovariate(0.1))}", ""
        for session in world.sessions.page(tenant, 0, 1 + number % 4):
            listed = session.session_id  # of the router's making, or of a client's
            if rng.random() < 0.1:
                world.sessions.end(session, world.now_s)
                world.sessions.check()
        session_id = rng.choice(["", "", "s", f"s{rng.randrange(9)}", listed])
        running.append(
            world.begin(
                f"c{rng.randrange(60)}",
                rng.randrange(0 if session_id else 1, 9),
                tenant=tenant,
                session_id=session_id,
                reuse_within_s=rng.choice([None, None, 0.0, 20.0, 4000.0]),
                slo_task_s=rng.choice([None, 1.0, 100.0, 86_400.0]),
            )
        )
    for one in running:
        world.end(one)
    assert 0 < len(world.sessions) <= 40
    assert len(world.sessions._tenants) <= 40 + 10
    assert {"task_in_time", "task_late", "task_unknown"} == world.counters.keys()


def test_what_leaves_for_lack_of_room_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of its tenant nor of others, and conversations that go on stay."""
    for name, most in {"MAX_CONVERSATIONS": 40, "MAX_OF_TENANT": 24}.items():
        monkeypatch.setattr(rooms, name, most)
    world = World()
    agents = {f"agent {number}": "xy"[number % 2] for number in range(8)}
    for turn in range(12):
        for name, tenant in agents.items():
            conversation = world.turn(name, 4 + turn, tenant=tenant)
            assert conversation.turns == turn + 1
            if turn > 1:  # the first turns have few others between them
                for number in range(9):
                    world.turn(f"once {turn} {name} {number}", 4, tenant="xz"[number % 2])
    assert all(model._ended == 0.0 for tenant in world.sessions._tenants.values() for model in tenant.models.values())
    for name, tenant in agents.items():
        assert world.turn(name, 20, tenant=tenant).reuse_within_s is not None


def test_the_tenant_with_most_conversations_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "MAX_CONVERSATIONS", 10)
    world = World()
    for number in range(3):
        world.turn(f"a{number}", 4, tenant="x")
    for number in range(100):
        world.turn(f"b{number}", 4, tenant="y")
    assert len([*world.sessions.page("x", 0, 99)]) == 3
    assert len([*world.sessions.page("y", 0, 99)]) == 7
    for number in range(12):
        world.turn("c", 4, tenant=f"t{number}")
    assert len(world.sessions) == 10


def test_few_hashes_of_a_long_prompt_are_kept() -> None:
    conversation = World().turn("a", 1000)
    assert len(conversation.hashes) <= MAX_HASHES + 1
    assert conversation.hashes[-1] == chain("a", 1000)[-1]
    assert conversation.cached_blocks(0) == 0
    assert conversation.cached_blocks(1) == conversation.stride == 16
    assert conversation.cached_blocks(len(conversation.hashes)) == 1000


def test_pages_have_the_last_used_session_first() -> None:
    world = World()
    for name in "abcde":
        world.turn(name, 4, session_id=name)
    world.turn("b", 5, session_id="b")

    def names(after: int, most: int) -> Sequence[str]:
        return [one.session_id for one in world.sessions.page("", after, most)]

    assert names(0, 2) == ["b", "e"]
    last = [*world.sessions.page("", 0, 2)][-1].serial
    assert names(last, 9) == ["d", "c", "a"]


# --- ends that a client tells -------------------------------------------------------------------------------------


def ended(world: World, session_id: str, tenant: str = "") -> list[tuple[bytes, ...]]:
    session = world.sessions.find(tenant, session_id)
    assert session is not None
    found = world.sessions.end(session, world.now_s)
    world.sessions.check()
    return [hashes for _, hashes in found]


def test_a_session_that_is_ended_expects_no_turn() -> None:
    world = World(1000)
    world.turn("c", 4, session_id="other", tenant="x")
    main = world.turn("a", 4, session_id="s", reuse_within_s=60.0, slo_task_s=9.0)
    sub = world.turn("b", 5, session_id="s", reuse_within_s=60.0)
    assert (main.is_over, main.held_tokens) == (False, 64)
    assert ended(world, "s") == [chain("a", 4), chain("b", 5)]
    for one in (main, sub):
        assert (one.is_over, one.until_s, one.held_tokens, one.hint_s) == (True, None, 0, None)
    assert main.session.task is not None
    assert main.session.task.state == "in_time"
    assert ended(world, "s") == [], "what was told already is not told again"
    assert world.turn("a", 6, session_id="s") is main, "its client may go on"
    assert not main.is_over


def test_a_session_without_a_name_ends_by_the_one_that_is_listed() -> None:
    world = World()
    first = world.turn("a", 4)
    assert ended(world, first.session.session_id) == [chain("a", 4)]
    assert first.is_over
    assert world.sessions.find("", "unknown") is None


def test_a_client_ends_sessions_of_its_tenant_only() -> None:
    world = World()
    world.turn("a", 4, session_id="s", tenant="x")
    assert world.sessions.find("y", "s") is None
    assert world.sessions.find("", "s") is None


def test_a_session_that_runs_ends_with_its_answer() -> None:
    world = World()
    one = world.begin("a", 4, session_id="s", slo_task_s=9.0)
    assert ended(world, "s") == []
    task = one.session.task
    assert task is not None
    assert (task.is_running, one.is_over) == (True, False)
    world.now_s += 1.0
    assert world.sessions.ended(one, world.now_s, is_served=True) == chain("a", 4)
    world.sessions.check()
    assert (task.state, one.is_over) == ("in_time", True)


def test_a_session_goes_on_if_a_turn_comes_after_its_end() -> None:
    world = World()
    one = world.begin("a", 4, session_id="s")
    ended(world, "s")
    assert world.begin("a", 5, session_id="s") is one
    for _ in range(2):
        assert world.sessions.ended(one, world.now_s, is_served=True) == ()
    assert not one.is_over


@pytest.mark.parametrize("lengths", [(40, 50), (40, 600), (600, 40), (600, 600), (600, 120), (65, 4000)])
@pytest.mark.parametrize("common", [0, 1, 7, 33, 40])
def test_blocks_that_another_session_has_too_are_not_ended(lengths: tuple[int, int], common: int) -> None:
    """Nor those that it may have, because not all hashes of long prompts are kept."""
    world = World()
    texts = [(*chain("common", common), *chain(name, most))[:most] for name, most in zip("ab", lengths, strict=True)]
    one, other = (world.turn(block_hashes=text, session_id=name) for text, name in zip(texts, "ab", strict=True))
    step = max(one.stride, other.stride)
    own = [text for text in one.hashes if texts[0].index(text) >= (common // step + 1) * step - 1]
    assert ended(world, "a") == [tuple(own)]
    assert ended(world, "b") == [other.hashes], "no other session is left"


# --- in the router ------------------------------------------------------------------------------------------------


def test_the_workers_of_an_ended_session_are_told(given: Given) -> None:
    """Those of the session alone, if they read the message, and after they have released its request."""
    given.connect_decode("d1", ends_texts=True)
    given.lost("d0")
    given.connect_decode("d2", ends_texts=True)
    given.arrives("a", prompt=64, block_hashes=chain("a", 4), session_id="s")
    given.granted(worker_id="d1")
    end = SessionEnded(tenant="", session_id="s")
    assert given.submit(end) == [], "it runs"
    told = given.submit(ClientLeft(request_id="a"))
    ends = [one for one in told if isinstance(one, EndText)]
    assert ends == [EndText(worker_id="d1", block_hashes=chain("a", 4))], "p0 is older, and d2 has nothing"
    assert told.index(ends[0]) > max(at for at, one in enumerate(told) if isinstance(one, Cancel))
    assert given.submit(end) == []
    assert given.submit(SessionEnded(tenant="", session_id="unknown")) == []


def test_both_workers_are_told_when_the_prefix_is_used_again(given: Given) -> None:
    [reserve] = given.arrives("a", prompt=64, block_hashes=chain("a", 4), reuse_within_s=30.0)
    [prefill] = given.granted()
    assert isinstance(reserve, Reserve)
    assert isinstance(prefill, Prefill)
    assert (reserve.reuse_within_s, prefill.reuse_within_s) == (30.0, 30.0)


def test_a_hint_without_a_prefix_is_not_passed_on(given: Given) -> None:
    [reserve] = given.arrives("a", prompt=5, reuse_within_s=30.0)
    assert isinstance(reserve, Reserve)
    assert reserve.reuse_within_s is None
