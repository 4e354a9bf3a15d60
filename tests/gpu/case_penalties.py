"""Checks of penalise (resample.py) against sampling.penalise on the CPU, bit for bit."""

from __future__ import annotations

import random

import torch

from pdserve.core.types import Sampling
from pdserve.engine.gpu.resample import Penalties, penalise
from pdserve.engine.interface import Row
from pdserve.engine.sampling.sampler import Draw
from pdserve.engine.sampling.sampler import penalise as penalise_on_host
from tests.gpu.cases import Case, Launch, draw

_SAMPLINGS = (
    Sampling(temperature=0.0, repetition_penalty=1.3),
    Sampling(temperature=0.0, presence_penalty=-0.7),
    Sampling(temperature=0.0, frequency_penalty=0.1),
    Sampling(temperature=0.0, repetition_penalty=0.7, presence_penalty=0.3, frequency_penalty=-0.9),
)


def _check(vocab_size: int, num_steps: int) -> Case:
    """Samples several steps; from the second one on, the device itself counts the tokens."""

    def check(device: torch.device) -> float:
        rng = random.Random(vocab_size)
        penalties = Penalties(vocab_size, len(_SAMPLINGS), device)
        prompts = [[rng.randrange(vocab_size) for _ in range(5 * row)] for row in range(len(_SAMPLINGS))]
        texts = [[*prompt, 1, 1] for prompt in prompts]
        num_wrong = 0
        for step in range(num_steps):
            rows = [
                Row(
                    tokens=text[-1:],
                    start=len(text) - 1,
                    blocks=(),
                    sample=sampling,
                    history=text,
                    prompt_len=len(prompt),
                )
                for text, prompt, sampling in zip(texts, prompts, _SAMPLINGS, strict=True)
            ]
            # Other rows have no penalties; some tokens are banned.
            logits_SV = draw((len(rows) + 2, vocab_size), torch.float32, step, size=4.0)
            logits_SV[:, ::7] = -torch.inf
            ours_SV = logits_SV.to(device, copy=True)
            row_P = torch.arange(1, len(rows) + 1, device=device).flip(0)
            slot_P = penalties.apply(rows, ours_SV, row_P)
            for at, row in zip(row_P.tolist(), rows, strict=True):
                assert row.sample is not None
                penalise_on_host(logits_SV[at], Draw(row.sample, row.history, row.prompt_len))
            num_wrong += not torch.equal(ours_SV.cpu(), logits_SV)
            sampled = [rng.choice([1, 2, text[0], rng.randrange(vocab_size)]) for text in texts]
            penalties.count(slot_P, torch.tensor(sampled, device=device))
            for text, token in zip(texts, sampled, strict=True):
                text.append(token)
        return float(num_wrong)

    return Case(f"penalties v={vocab_size}", check, 0.0)


CASES = [_check(3000, 4), _check(33, 6)]


def _launch(num_rows: int) -> Launch:
    def make(device: torch.device):  # type: ignore[no-untyped-def]
        logits_SV = torch.zeros(num_rows, 128_256, device=device)
        word_CV = torch.zeros(num_rows, 128_256, dtype=torch.int32, device=device)
        row_P = torch.arange(num_rows, device=device)
        penalty_3P = torch.ones(3, num_rows, device=device)
        return lambda: penalise(logits_SV, word_CV, row_P, row_P, penalty_3P), None

    return Launch(f"penalise b={num_rows} v=128256", make, num_rows * 128_256 * 4)


LAUNCHES = [_launch(64)]
