"""The requests of a turn: arrivals, lengths and prompts."""

from __future__ import annotations

import pytest

from pdserve.core.errors import ConfigError
from simulator.bench.load import LoadLevel, LoadPlan, PromptMaker, SyntheticLoad, as_text
from simulator.model import TraceRequest

SYNTHETIC = SyntheticLoad(input_tokens=(10, 20), output_tokens=(5, 9), seed=3)


class ListTrace:
    name = "list"

    def __init__(self, *requests: TraceRequest, block_tokens: int = 0) -> None:
        self._requests, self.block_tokens = requests, block_tokens

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._requests)


def request(arrival_s: float, prompt: int = 100, output: int = 10, ids: tuple[int, ...] = ()) -> TraceRequest:
    return TraceRequest(arrival_s=arrival_s, prompt_tokens=prompt, output_tokens=output, block_ids=ids)


def plan(source: object, **values: object) -> LoadPlan:
    return LoadPlan(**{"source": source, "num_requests": None, "duration_s": None, **values})  # type: ignore[arg-type]


def test_lengths_are_the_same_at_every_rate() -> None:
    one = plan(SYNTHETIC, num_requests=50)
    slow, fast = (list(one.requests(LoadLevel(rate_rps=rate))) for rate in (1.0, 8.0))
    assert [(r.prompt_tokens, r.output_tokens) for r in slow] == [(r.prompt_tokens, r.output_tokens) for r in fast]
    assert [r.arrival_s / 8.0 for r in slow] == pytest.approx([r.arrival_s for r in fast])
    assert all(10 <= r.prompt_tokens <= 20 and 5 <= r.output_tokens <= 9 for r in slow)


def test_a_duration_ends_an_open_loop() -> None:
    found = list(plan(SYNTHETIC, duration_s=20.0).requests(LoadLevel(rate_rps=10.0)))
    assert 150 <= len(found) <= 250
    assert found[-1].arrival_s < 20.0


def test_a_trace_keeps_its_arrivals_or_gets_a_rate() -> None:
    trace = ListTrace(request(5.0), request(7.0), request(9.0))
    assert [one.arrival_s for one in plan(trace).requests(LoadLevel())] == [5.0, 7.0, 9.0]
    scaled = list(plan(trace).requests(LoadLevel(rate_rps=2.0)))  # it has one every two seconds
    assert scaled[-1].arrival_s - scaled[0].arrival_s == pytest.approx(1.0)
    assert len(list(plan(trace, num_requests=2).requests(LoadLevel()))) == 2
    assert len(list(plan(trace, duration_s=3.0).requests(LoadLevel()))) == 2


def test_a_trace_without_a_span_has_no_rate() -> None:
    with pytest.raises(ConfigError, match="all arrive at once"):
        plan(ListTrace(request(1.0), request(1.0))).requests(LoadLevel(rate_rps=1.0))


def test_lengths_of_a_trace_can_be_scaled() -> None:
    [one] = plan(ListTrace(request(0.0, prompt=1000, output=30)), length_scale=0.01).requests(LoadLevel())
    assert (one.prompt_tokens, one.output_tokens) == (10, 1)


@pytest.mark.parametrize(
    "values", [{"num_requests": 0}, {"duration_s": 0.0}, {"length_scale": 0.0}, {"num_requests": 10**7}]
)
def test_plans_have_limits(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        plan(SYNTHETIC, **values)


@pytest.mark.parametrize("values", [{"rate_rps": 0.0}, {"rate_rps": float("inf")}, {"concurrency": 0}])
def test_levels_have_limits(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        LoadLevel(**values)  # type: ignore[arg-type]


def test_equal_block_ids_have_equal_tokens() -> None:
    maker = PromptMaker(seed=0, turn="a", block_tokens=8)
    first = maker.token_ids(0, request(0.0, prompt=20, ids=(1, 2, 3)))
    second = maker.token_ids(1, request(0.0, prompt=20, ids=(1, 2, 4)))
    assert len(first) == len(second) == 20
    assert first[:16] == second[:16]
    assert first[16:] != second[16:]


def test_turns_have_different_texts_and_equal_turns_equal_ones() -> None:
    texts = [
        PromptMaker(seed=0, turn=turn, block_tokens=8).token_ids(0, request(0.0, prompt=30, ids=(1, 2, 3, 4)))
        for turn in ("a", "a", "b")
    ]
    assert texts[0] == texts[1]
    assert texts[0][:8] != texts[2][:8]


def test_prompts_share_one_of_the_prefixes() -> None:
    source = SyntheticLoad(input_tokens=(4, 8), output_tokens=(1, 1), prefix_tokens=64, num_prefixes=2)
    one = plan(source, num_requests=40)
    maker = PromptMaker(seed=0, turn="a", block_tokens=one.block_tokens)
    prompts = [maker.token_ids(n, r) for n, r in enumerate(one.requests(LoadLevel(concurrency=1)))]
    assert len({tuple(prompt[:64]) for prompt in prompts}) == 2
    assert len({tuple(prompt) for prompt in prompts}) == 40
    assert all(68 <= len(prompt) <= 72 for prompt in prompts)


def test_ids_stay_in_their_range() -> None:
    maker = PromptMaker(seed=0, turn="a", block_tokens=0, ids=(500, 503))
    assert set(maker.token_ids(0, request(0.0, prompt=200))) == {500, 501, 502}
    for wrong in ((5, 5), (-1, 4)):
        with pytest.raises(ConfigError):
            PromptMaker(seed=0, turn="a", block_tokens=0, ids=wrong)


def test_a_text_has_a_word_for_each_id() -> None:
    assert len(as_text([1, 2, 3]).split()) == 3
