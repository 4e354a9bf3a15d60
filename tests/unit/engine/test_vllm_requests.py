"""Rows become requests of vLLM's runner. The engine itself is tested in its own environment (tests/models)."""

from __future__ import annotations

import random
from typing import Any

from pdserve.engine.interface import Row
from pdserve.engine.vllm.pool import choose_layout
from pdserve.engine.vllm.requests import Place, Requests, divided

SIZE = 4


def row(start: int, count: int, blocks: list[int], drafts: int = 0, adapter: str = "") -> Row:
    return Row(tokens=[1] * count, start=start, blocks=blocks, drafts=[2] * drafts, adapter=adapter)


class Runner:
    """Keeps requests as vLLM's runner does."""

    def __init__(self) -> None:
        self.blocks: dict[str, list[int]] = {}

    def run(self, places: list[Place], ended: set[str]) -> None:
        for name in ended:
            del self.blocks[name]
        for place in places:
            assert place.is_new == (place.name not in self.blocks)
            self.blocks.setdefault(place.name, []).extend(place.blocks)
        assert set(self.blocks) == {place.name for place in places}


def test_a_decoding_row_continues_its_request_and_appends_blocks() -> None:
    requests = Requests(SIZE)
    [prompt], ended = requests.place([row(0, 6, [7, 3])])
    assert (prompt.is_new, prompt.blocks, prompt.end, ended) == (True, [7, 3], 6, set())
    for start in (6, 7):
        [place], ended = requests.place([row(start, 1, [7, 3])])
        assert (place.name, place.is_new, place.blocks, ended) == (prompt.name, False, [], set())
    [place], ended = requests.place([row(8, 1, [7, 3, 5])])
    assert (place.name, place.is_new, place.blocks, place.end) == (prompt.name, False, [5], 9)


def test_a_chunk_continues_the_chunk_before_although_its_list_of_blocks_is_new() -> None:
    requests = Requests(SIZE)
    [first], _ = requests.place([row(0, 4, [1])])
    [second], _ = requests.place([row(4, 4, [1, 2])])
    assert (second.name, second.is_new, second.blocks) == (first.name, False, [2])


def test_a_request_that_the_step_does_not_continue_ends() -> None:
    requests = Requests(SIZE)
    places, _ = requests.place([row(0, 3, [1]), row(0, 3, [2])])
    [left], ended = requests.place([row(3, 1, [2])])
    assert (left.name, ended) == (places[1].name, {places[0].name})
    [again], ended = requests.place([row(3, 1, [1])])  # it rested for a step
    assert again.is_new
    assert ended == {left.name}


def test_rows_that_share_a_prefix_are_different_requests() -> None:
    requests = Requests(SIZE)
    requests.place([row(0, 4, [1])])
    places, _ = requests.place([row(4, 1, [1, 2]), row(4, 1, [1, 3])])
    assert [place.is_new for place in places] == [False, True]
    assert places[0].name != places[1].name


def test_other_blocks_are_another_request() -> None:
    requests = Requests(SIZE)
    requests.place([row(0, 8, [1, 2])])
    [place], ended = requests.place([row(8, 1, [9, 2, 3])])
    assert (place.is_new, place.blocks, len(ended)) == (True, [9, 2, 3], 1)


def test_rejected_drafts_leave_blocks_that_the_next_row_does_not_need() -> None:
    requests = Requests(SIZE)
    [first], _ = requests.place([row(0, 3, [1, 2, 3], drafts=6)])
    assert first.blocks == [1, 2, 3]
    [second], _ = requests.place([row(4, 1, [1, 2, 3])])
    assert (second.name, second.is_new, second.blocks) == (first.name, False, [])


def test_every_request_ends_after_a_step_that_failed() -> None:
    requests = Requests(SIZE)
    [place], _ = requests.place([row(0, 3, [1])])
    assert requests.forget() == {place.name}
    [again], ended = requests.place([row(3, 1, [1])])
    assert again.is_new
    assert not ended


def test_the_runner_always_has_the_blocks_of_the_row() -> None:
    """Random texts that begin, decode, share blocks, rest and end."""
    rng = random.Random(0)
    requests, runner = Requests(SIZE), Runner()
    texts: list[Any] = []
    num_continued = 0
    for step in range(400):
        if rng.random() < 0.3:
            known = rng.choice(texts)[0][: rng.randrange(3)] if texts and rng.random() < 0.5 else []
            texts.append(([*known], len(known) * SIZE))
        texts = [text for text in texts if rng.random() < 0.95]
        rows, after = [], []
        for blocks, start in texts:
            if rng.random() < 0.2 or (start and start % SIZE and any(blocks[-1] in one.blocks for one in rows)):
                after.append((blocks, start))
                continue
            count, drafts = (rng.randrange(1, 9), 0) if rng.random() < 0.3 else (1, rng.randrange(3))
            while len(blocks) * SIZE < start + count + drafts:
                blocks.append(1000 * step + 10 * len(rows) + len(blocks) + 10**6 * len(blocks))
            rows.append(row(start, count, blocks, drafts))
            after.append((blocks, start + count))
        texts = after
        if not rows:
            continue
        places, ended = requests.place(rows)
        runner.run(places, ended)
        for one, place in zip(rows, places, strict=True):
            held = runner.blocks[place.name]
            assert len(held) * SIZE >= place.end == one.start + one.num_queries
            assert held == list(one.blocks[: len(held)])
            num_continued += not place.is_new
    assert num_continued > 100


def test_rows_are_divided_at_the_runners_limits() -> None:
    rows = [row(0, count, [at]) for at, count in enumerate((3, 3, 1, 1, 1, 9, 1))]
    assert [list(part) for part in divided(rows, most_rows=3, most_tokens=6)] == [[0, 1], [2, 3, 4], [5], [6]]


def test_another_adapter_is_another_request() -> None:
    requests = Requests(SIZE)
    [first], _ = requests.place([row(0, 3, [1], adapter="a")])
    [second], ended = requests.place([row(3, 1, [1], adapter="b")])
    assert (second.is_new, ended) == (True, {first.name})
    [third], ended = requests.place([row(3, 1, [1])])
    assert (third.is_new, ended) == (True, {second.name})
    [fourth], _ = requests.place([row(3, 1, [1])])
    assert fourth.name == third.name


def test_rows_are_divided_at_the_number_of_adapters() -> None:
    rows = [row(0, 1, [at], adapter=name) for at, name in enumerate(["a", "", "b", "a", "c", "b", "d", "a"])]
    for most, active, expected in (
        (4, (), [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (2, (), [[0, 1, 2, 3, 5, 7], [4, 6]]),
        (2, ("c", "d"), [[1, 4, 6], [0, 2, 3, 5, 7]]),
        (3, ("b", "c", "d"), [[1, 2, 4, 5, 6], [0, 3, 7]]),
        (1, ("d",), [[1, 6], [0, 3, 7], [2, 5], [4]]),
    ):
        parts = list(divided(rows, 8, 99, most, lambda active=active: active))  # type: ignore[misc]
        assert [list(part) for part in parts] == expected


def test_every_row_is_in_one_part_within_all_limits() -> None:
    rng = random.Random(0)
    for _ in range(300):
        names = ["", *map(str, range(rng.randrange(1, 9)))]
        rows = [row(0, rng.randrange(1, 5), [at], adapter=rng.choice(names)) for at in range(rng.randrange(1, 20))]
        most_adapters, active = rng.randrange(1, 5), {name for name in names if rng.random() < 0.3}
        parts = list(divided(rows, 4, 7, most_adapters, lambda active=active: active))  # type: ignore[misc]
        assert sorted(index for part in parts for index in part) == list(range(len(rows)))
        for part in parts:
            together = [rows[index] for index in part]
            assert 1 <= len(part) <= 4
            assert sum(one.num_queries for one in together) <= 7
            assert len({one.adapter for one in together} - {""}) <= most_adapters


def test_the_layout_has_blocks_outermost_where_the_backends_allow_it() -> None:
    assert choose_layout(["LBHNC"], ["CPU_ATTN"]) == "BLHNC"
    assert choose_layout(["LBHNC", "BLHNC"], ["FLASHINFER"]) == "BLHNC"
    assert choose_layout(["LBNHC", "LBHNC", "BLNHC", "BLHNC"], ["CPU_MLA"]) == "LBHNC"
    assert choose_layout(["LBHNC"], ["CPU_ATTN", "CPU_MLA"]) == "LBHNC"
    assert choose_layout(["LHBNC", "BHLNC"], ["OTHER"]) is None
