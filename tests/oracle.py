"""The oracle of all exactness tests: transformers in float64, one forward pass along the tokens that we answered.

At each position our token must be the one that float64 chooses, or be within `TIE` of it. Positions after a first
difference are judged as well, since the oracle reads our text and not its own. Float32 rounding differs between
processors and batch shapes: it may decide a near-tie, and nothing else. So a verdict does not depend on the processor.

How exact a logprob can be in float32 depends on its position: peaked attention multiplies an error of its inputs. So a
logprob may differ from that of float64 by what a change of all weights by `CHANGE` does at the same position.
"""

# Shapes: P positions of one answer, V vocabulary.

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, final

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pdserve.core.types import Sampling
from pdserve.engine.sampling.sampler import Draw, sample

TIE: Final = 1e-5  # of the standard deviation of the position's logits; float32 errs by up to 7e-6 of it
MAX_TIES: Final = 0.01  # of the positions that are judged together
CHANGE: Final = 2.0**-18  # of every weight; float32 changes a logprob by less than half of what this does
_MOST_KNOWN: Final = 16

Processor = Callable[[Tensor, Tensor], Tensor]  # of transformers: tokens [1, T], logits [1, V] -> logits


@dataclass(frozen=True, slots=True)
class Position:
    """One token of ours that is not the choice of float64."""

    answer: int
    at: int
    ours: int
    best: int
    gap: float  # of the two logits, in standard deviations; of a sampled token 0 or infinity


@dataclass(slots=True)
class Verdict:
    num_positions: int = 0
    ties: list[Position] = field(default_factory=list)
    wrong: list[Position] = field(default_factory=list)

    def check(self, most_ties: float = MAX_TIES) -> None:
        assert self.num_positions > 0, "no token was judged"
        assert not self.wrong, f"{len(self.wrong)} of {self.num_positions} tokens are wrong: {self.wrong[:5]}"
        limit = most_ties * self.num_positions
        assert not self.ties or len(self.ties) < limit, f"{len(self.ties)} near-ties, less than {limit:g} allowed"


class HasLogprobs(Protocol):
    """A sampled or scored token."""

    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float | None: ...
    @property
    def top(self) -> Sequence[tuple[int, float]]: ...


@final
class Oracle:
    """Judges tokens of the checkpoint in `folder`, or of a model of transformers that was made in a test."""

    def __init__(self, folder: Path | str, model: Any = None) -> None:
        torch.set_num_threads(1)
        self._model: Any = model or transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",  # the grouped product of experts takes no float64
        )
        self._model = self._model.double().eval()
        self._known: dict[tuple[int, ...], Tensor] = {}  # by the tokens and the first row, the latest last
        self._judged: dict[str, list[tuple[int, int, int, float]]] = {}  # tokens that differ from the choice of float64

    def logits(self, tokens: Sequence[int], first: int = 0) -> Tensor:
        """[T - first, V] in float64: row i has the logits after tokens[: first + i + 1]. Do not modify it.

        The last results are cached, because compared engines and batches give equal texts.
        """
        key = *tokens, first
        known = self._known.pop(key, None)
        if known is None:
            with torch.inference_mode(), _Float64Only():
                known = self._model(torch.tensor([list(tokens)])).logits[0, first:]
            assert known.dtype == torch.float64
            if len(self._known) == _MOST_KNOWN:
                del self._known[next(iter(self._known))]
        self._known[key] = known
        return known

    def assert_exact(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        *,
        sampling: Sampling | Sequence[Sampling | None] | None = None,
        processors: Sequence[Processor] = (),
        tie: float = TIE,
        most_ties: float = MAX_TIES,
    ) -> Verdict:
        """`sampling`: of all answers or one each, as our sampler reads it; greedy where it is None.

        `tie` and `most_ties` are larger for engines that round on purpose, such as those with int8 KV.
        """
        verdict = self.judge(prompts, answers, sampling=sampling, processors=processors, tie=tie)
        verdict.check(most_ties)
        return verdict

    def judge(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        *,
        sampling: Sampling | Sequence[Sampling | None] | None = None,
        processors: Sequence[Processor] = (),
        tie: float = TIE,
    ) -> Verdict:
        each = [sampling] * len(answers) if sampling is None or isinstance(sampling, Sampling) else sampling
        verdict = Verdict()
        for number, (prompt, answer, asked) in enumerate(zip(prompts, answers, each, strict=True)):
            # Runs that are compared give equal answers: each is judged once.
            key = "" if processors else repr((list(prompt), list(answer), asked, tie))
            others = self._judged.get(key) if key else None
            if others is None:
                others = list(self._others(prompt, answer, asked, processors, tie))
                if key:
                    self._judged[key] = others
            for at, ours, best, gap in others:
                (verdict.ties if gap < tie else verdict.wrong).append(Position(number, at, ours, best, gap))
            verdict.num_positions += len(answer)
        return verdict

    def _others(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        asked: Sampling | None,
        processors: Sequence[Processor],
        tie: float,
    ) -> Iterator[tuple[int, int, int, float]]:
        """(position, our token, the choice of float64, gap) where the two differ."""
        tokens = [*prompt, *answer]
        logits_PV = self.logits(tokens[:-1], len(prompt) - 1)
        for at, (ours, logits_V) in enumerate(zip(answer, logits_PV, strict=True)):
            history = tokens[: len(prompt) + at]
            std = float(logits_V.std())
            for process in processors:
                logits_V = process(torch.tensor([history]), logits_V[None])[0]
            best, gap = (
                _greedy(logits_V, ours, std)
                if asked is None
                else _sampled(logits_V, ours, tie * std, Draw(asked, history, len(prompt)), self._end_ids())
            )
            if ours != best:
                yield at, ours, best, gap

    def assert_logprobs(self, tokens: Sequence[int], first: int, found: Sequence[HasLogprobs]) -> None:
        """`found` are the tokens behind tokens[: first + 1], behind tokens[: first + 2] and so on."""
        logprob_PV = self.logits(tokens, first).log_softmax(-1)
        changed_PV = self._changed.logits(tokens, first).log_softmax(-1)
        tolerance_P = (changed_PV - logprob_PV).abs().amax(-1)
        for one, logprob_V, tolerance in zip(found, logprob_PV, tolerance_P.tolist(), strict=True):
            if one.logprob is not None:
                error = abs(one.logprob - float(logprob_V[one.token_id]))
                assert error <= tolerance, f"logprob {one.logprob} differs by {error:.2g} of at most {tolerance:.2g}"
            _check_top(one.top, logprob_V, tolerance)

    @functools.cached_property
    def _changed(self) -> Oracle:
        """Of the model with every weight changed by `CHANGE`, up or down at random."""
        model = copy.deepcopy(self._model)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.0 + CHANGE * (2 * torch.randint(2, weight.shape, generator=generator) - 1))
        return Oracle("", model)

    def logprob(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """Of the whole answer."""
        logprob_PV = self.logits([*prompt, *answer][:-1], len(prompt) - 1).log_softmax(-1)
        return float(logprob_PV.gather(1, torch.tensor(answer)[:, None]).sum())

    def beam(
        self, prompt: Sequence[int], *, width: int, max_tokens: int, length_penalty: float, end_ids: Sequence[int]
    ) -> list[int]:
        """The best beam that transformers finds."""
        with torch.inference_mode(), _Float64Only():
            done = self._model.generate(
                torch.tensor([list(prompt)]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                num_beams=width,
                max_new_tokens=max_tokens,
                length_penalty=length_penalty,
                eos_token_id=list(end_ids),
                pad_token_id=0,
            )
        tokens: list[int] = done[0, len(prompt) :].tolist()
        ends = [at + 1 for at, token in enumerate(tokens) if token in end_ids]
        return tokens[: ends[0]] if ends else tokens

    def _end_ids(self) -> list[int]:
        ids = self._model.config.eos_token_id
        return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def _check_top(top: Sequence[tuple[int, float]], logprob_V: Tensor, tolerance: float) -> None:
    """`top` has the largest logprobs in order; equal ones may be in any order."""
    tokens = [token for token, _ in top]
    assert len(set(tokens)) == len(tokens)
    seen = torch.tensor([value for _, value in top], dtype=torch.float64)
    torch.testing.assert_close(seen, logprob_V[tokens].double(), atol=tolerance, rtol=0)
    torch.testing.assert_close(seen, logprob_V.double().topk(len(tokens)).values, atol=tolerance, rtol=0)


def _greedy(logits_V: Tensor, ours: int, std: float) -> tuple[int, float]:
    best = int(logits_V.argmax())
    return best, float(logits_V[best] - logits_V[ours]) / std


def _sampled(logits_V: Tensor, ours: int, tie: float, draw: Draw, end_ids: Sequence[int]) -> tuple[int, float]:
    """What our sampler chooses by these logits; 0 for a near-tie or no difference, infinity for a wrong token.

    A near-tie may also be one with an edge of top_p, top_k or min_p. Our token must be chosen as soon as it gains, the
    other loses, or both change by less than half of `tie`, which is in logits here.
    """

    def choose(gain: float, loss: float) -> int:
        changed_1V = logits_V[None].clone()
        changed_1V[0, ours] += gain
        changed_1V[0, best] -= loss
        return sample(changed_1V, [draw], end_ids)[0].token_id

    best = ours
    best = choose(0.0, 0.0)
    half = 0.49 * tie
    is_near = best == ours or any(choose(*each) == ours for each in ((half, half), (half, 0.0), (0.0, half)))
    return best, 0.0 if is_near else math.inf


class _Float64Only(TorchFunctionMode):
    """Parts that transformers computes in float32 for any dtype of the model: norms, rotations, softmax, routers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        kwargs = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widened, args), **kwargs)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
