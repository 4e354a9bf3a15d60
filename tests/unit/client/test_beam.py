"""Beam search finds the same beams as transformers, and repeats exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from pdserve.client.beam import BeamSearch
from pdserve.core.errors import InvalidRequest

VOCAB = 24


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    made = transformers.LlamaForCausalLM(config)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.35)
    # Float64, because float32 rounding would depend on the number of beams and decide near-ties.
    return made.double().eval()


def search(model: Any, prompt: list[int], **settings: Any) -> BeamSearch:
    one = BeamSearch(**settings)
    while not one.is_over:
        ids = torch.tensor([[*prompt, *tokens] for tokens in one.living])
        with torch.inference_mode():
            logprobs = model(ids).logits[:, -1].log_softmax(-1)
        top = logprobs.topk(min(one.num_top, VOCAB))
        one.take(
            [
                list(zip(ids, values, strict=True))
                for ids, values in zip(*(top.indices.tolist(), top.values.tolist()), strict=True)
            ]
        )
    return one


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "ends"),
    [
        (False, 1.0, ()),
        (False, 1.0, (2,)),
        (False, 0.0, (2, 9, 11)),
        (False, 2.5, (2, 9)),
        (True, 1.0, (2, 9, 11)),
        (True, -1.0, (2,)),
        ("never", 1.0, (2, 9, 11)),
        ("never", 2.5, (2,)),
        ("never", -1.0, (2, 9)),
    ],
)
def test_beams_match_transformers(
    model: Any, early_stopping: Any, length_penalty: float, ends: tuple[int, ...]
) -> None:
    for width, prompt in ((1, [3, 4]), (3, [5]), (5, [1, 8, 6])):
        ours = search(
            model,
            prompt,
            width=width,
            max_tokens=10,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            end_ids=ends,
        )
        theirs = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=10,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=list(ends) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        if width == 1:  # transformers decodes greedily
            [beam] = ours.found
            assert list(beam.token_ids) == theirs.sequences[0][len(prompt) :].tolist()
            continue
        expected = []
        for sequence, score in zip(theirs.sequences.tolist(), theirs.sequences_scores.tolist(), strict=True):
            tokens = sequence[len(prompt) :]
            cut = next((at + 1 for at, token in enumerate(tokens) if token in ends), len(tokens))
            expected.append((tuple(tokens[:cut]), pytest.approx(score, abs=1e-4)))
        assert [(beam.token_ids, beam.score) for beam in ours.found] == expected


def test_ties_go_to_the_better_beam() -> None:
    one = BeamSearch(width=2, max_tokens=2)
    one.take([[(5, -1.0), (3, -1.0), (4, -2.0)]])
    assert one.living == [(5,), (3,)]
    one.take([[(1, -1.0), (9, -1.0)], [(1, -1.0)]])
    assert [beam.token_ids for beam in one.found] == [(5, 1), (5, 9)]
    assert [beam.finish_reason for beam in one.found] == ["length", "length"]
    assert one.is_over


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("width", {"width": 0}),
        ("width", {"width": 33}),
        ("width", {"width": 17, "end_ids": (1, 2, 3)}),
        ("max_tokens", {"max_tokens": 0}),
        ("early_stopping", {"early_stopping": "always"}),
    ],
)
def test_an_impossible_beam_search_is_rejected(field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        BeamSearch(**settings)
    assert caught.value.field == field
