from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import InvalidRequest
from pdserve.core.grammar import Grammar, GrammarKind, choice
from pdserve.core.types import Sampling, Slo, TokenOut
from pdserve.v1 import inference_pb2
from pdserve.wire import convert
from pdserve.wire.protocol import TOKEN

SINGLE = {"width": 32, "allow_nan": False, "allow_infinity": False}
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
GRAMMARS = (
    st.builds(Grammar, st.sampled_from([GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.LARK]), TEXTS)
    | st.just(Grammar(GrammarKind.JSON_OBJECT))
    | st.builds(choice, st.lists(TEXTS, min_size=1, max_size=5))
)
SAMPLINGS = st.builds(
    Sampling,
    max_tokens=st.integers(10, 2**32 - 1),
    min_tokens=st.integers(0, 10),
    temperature=st.floats(0.0, 100.0, **SINGLE),
    top_k=st.integers(0, 2**32 - 1),
    top_p=st.floats(0.0, 1.0, exclude_min=True, **SINGLE),
    min_p=st.floats(0.0, 1.0, **SINGLE),
    top_n_sigma=st.floats(0.0, 100.0, **SINGLE),
    repetition_penalty=st.floats(0.015625, 100.0, **SINGLE),
    presence_penalty=st.floats(-2.0, 2.0, **SINGLE),
    frequency_penalty=st.floats(-2.0, 2.0, **SINGLE),
    seed=st.integers(0, 2**64 - 1),
    stop=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=20), max_size=16).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=64).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    include_stop_in_output=st.booleans(),
    skip_special_tokens=st.booleans(),
    logit_bias=st.dictionaries(st.integers(0, 2**32 - 1), st.floats(-100.0, 100.0, **SINGLE), max_size=8).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
    allowed_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=8).map(tuple),
    bad_token_ids=st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4).map(tuple), max_size=4).map(
        tuple
    ),
    prompt_logprobs=st.none() | st.integers(0, 20),
    grammar=st.none() | GRAMMARS,
)


@given(SAMPLINGS)
def test_sampling_survives_the_wire(sampling: Sampling) -> None:
    wire = convert.sampling_to_proto(sampling).SerializeToString()
    assert convert.sampling_from_proto(inference_pb2.SamplingParams.FromString(wire)) == sampling


def test_absent_fields_take_defaults_and_zero_is_not_absent() -> None:
    assert convert.sampling_from_proto(inference_pb2.SamplingParams()) == Sampling()
    given_zero = inference_pb2.SamplingParams(temperature=0.0, seed=0, logprobs=0, ignore_eos=False)
    got = convert.sampling_from_proto(given_zero, draw_seed=lambda: 7)
    assert (got.temperature, got.seed, got.logprobs) == (0.0, 0, 0)


def test_an_absent_seed_is_chosen_and_a_given_one_kept() -> None:
    assert convert.sampling_from_proto(inference_pb2.SamplingParams(), draw_seed=lambda: 7).seed == 7
    assert convert.sampling_from_proto(inference_pb2.SamplingParams(seed=3), draw_seed=lambda: 7).seed == 3


def test_the_default_of_max_tokens_makes_room_for_min_tokens() -> None:
    message = inference_pb2.SamplingParams(min_tokens=50)
    assert convert.sampling_from_proto(message, default_max_tokens=16).max_tokens == 50


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", math.nan),
        ("temperature", -0.5),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-39),
        ("presence_penalty", 2.5),
        ("frequency_penalty", math.nan),
        ("stop", ["x"] * 1000),
        ("stop", [""]),
        ("stop_token_ids", list(range(100))),
        ("logprobs", 65),
        ("prompt_logprobs", 21),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("allowed_token_ids", range(8193)),
        ("min_tokens", 1000),
    ],
)
def test_a_bad_value_names_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        convert.sampling_from_proto(inference_pb2.SamplingParams(**{field: value}))  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize("words", [[[]], [[1]] * 257, [[1] * 1025]])
def test_bad_token_ids_are_bounded(words: list[list[int]]) -> None:
    message = inference_pb2.SamplingParams(bad_token_ids=[inference_pb2.TokenIds(ids=word) for word in words])
    with pytest.raises(InvalidRequest) as caught:
        convert.sampling_from_proto(message)
    assert caught.value.field == "bad_words"


def test_absent_slo_targets_get_defaults() -> None:
    default = Slo(ttft_s=1.0, tpot_s=0.5)
    assert convert.slo_from_proto(inference_pb2.Slo(ttft_s=3.0), default) == Slo(ttft_s=3.0, tpot_s=0.5)
    assert convert.slo_from_proto(inference_pb2.Slo(itl_s=3.0), default) == Slo(ttft_s=1.0, tpot_s=0.5, itl_s=3.0)
    assert convert.slo_from_proto(inference_pb2.Slo(tpot_s=0.1), default) == Slo(ttft_s=1.0, tpot_s=0.1)
    with pytest.raises(InvalidRequest) as caught:
        convert.slo_from_proto(inference_pb2.Slo(tpot_s=math.nan), default)
    assert caught.value.field == "slo.tpot_s"


@pytest.mark.parametrize(
    "token", [TokenOut(token_id=5), TokenOut(token_id=5, logprob=-0.5, top=((5, -0.5), (6, -1.25)))]
)
def test_a_token_survives_the_wire(token: TokenOut) -> None:
    assert TOKEN.decode(TOKEN.encode(token)) == token
    if token.logprob is not None:
        sent = convert.logprobs_to_proto(token)
        assert (sent.token_id, sent.logprob, len(sent.top)) == (token.token_id, token.logprob, len(token.top))


@given(st.lists(st.integers(0, 200), unique=True))
def test_blocks_survive_as_extents(blocks: list[int]) -> None:
    extents = convert.extents_from_blocks(blocks)
    assert convert.blocks_from_extents(extents) == tuple(blocks)
    assert all(
        before.first_block + before.num_blocks != after.first_block for before, after in itertools.pairwise(extents)
    )


def test_a_huge_extent_is_rejected_before_allocation() -> None:
    from pdserve.v1 import transfer_pb2

    with pytest.raises(InvalidRequest):
        convert.blocks_from_extents([transfer_pb2.Extent(first_block=0, num_blocks=2**32 - 1)])


def test_structured_output_needs_a_kind() -> None:
    message = inference_pb2.SamplingParams(structured_output=inference_pb2.StructuredOutput())
    with pytest.raises(InvalidRequest, match="structured_output: got nothing"):
        convert.sampling_from_proto(message)
    message.structured_output.json_object = False
    assert convert.sampling_from_proto(message).grammar is None
    message.structured_output.choice.SetInParent()
    with pytest.raises(InvalidRequest, match="choice: got 0 strings"):
        convert.sampling_from_proto(message)
