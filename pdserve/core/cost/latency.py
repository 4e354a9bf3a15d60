"""Cost models of batches and transfers in closed form, corrected online by each finished batch. Pure.

    decode_s(rows, context) = decode_base + per_row * rows + per_context_token * context
    prefill_s(u, cached)    = max(decode_base, prefill_base + per_token * u) + per_token_context * u * (cached + u / 2)
    step_s(both)            = max(decode_base, prefill_base + per_token * u)
                              + per_row * rows + per_context_token * context + per_token_context * u * (cached + u / 2)
    transfer_s(bytes)       = latency + bytes / bandwidth

Every step reads the weights once, which takes `decode_base`. As long as the arithmetic of a prompt chunk takes less
than that, the chunk adds only its attention to a step with decode rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import mul
from typing import Final

from pdserve.core.durations import DAY_S
from pdserve.core.protocol import BatchTimed

# --- fit of a duration ----------------------------------------------------------------------------------------
# A linear model of a duration, fitted online by recursive least squares with forgetting.
#
# - Errors are log ratios, so long and short batches have equal weight, and so do twice and half of the predicted time.
#   Batches are late by much and early by little, so the model predicts their median, not their mean.
# - Samples are clipped to CLIP_SIGMAS around the prediction, so a single stall has little effect. With a stall in every
#   tenth batch, coefficients and error stay near those of the other nine.
# - CHANGE_STREAK consecutive samples beyond CHANGE_SIGMAS on one side mean that the machine has changed. Their common
#   factor scales all coefficients at once, and learning restarts. For this test the error counts as at most
#   WIDEST_BAND: a larger error means that the coefficients are wrong, for instance after other processes have stopped.
# - Predictions are finite and never negative, for any samples.

LONGEST_S: Final = DAY_S  # limit of samples and predictions: a day
NO_TIME_S: Final = 1e-12  # below the resolution of any clock: not a sample
CLIP_SIGMAS: Final = 2.0
CLIPPED_SHARE: Final = 0.92  # share of a normal variable's variance that remains after clipping there
BAND_GAIN: Final = 0.05
CHANGE_SIGMAS: Final = 3.0
CHANGE_STREAK: Final = 5
SMALLEST_ERROR: Final = 0.02  # lower bound of the relative error
FIRST_ERROR: Final = 0.5  # relative error before the first sample
WIDEST_ERROR: Final = 2.0
WIDEST_BAND: Final = 0.25  # upper bound of the relative error of a machine with right coefficients
FORGETTING: Final = 0.99
NOISE: Final = 0.1  # assumed relative standard deviation of a typical sample
PRIOR_SPREAD: Final = 2.0  # assumed error of a coefficient's prior, relative to a typical batch
SHORTEST_S: Final = 1e-3  # lower bound of a typical batch, so that a prior of zeros can change


class Fit:
    """Non-negative linear model of a duration; `scales` are typical feature values, for conditioning.

    It works on features divided by their scale, and on durations divided by the prediction.
    """

    __slots__ = (
        "_covariance",
        "_recent",
        "_scales",
        "_streak",
        "_theta",
        "_widest",
        "coefficients",
        "error",
        "num_samples",
    )

    def __init__(self, prior: Sequence[float], scales: Sequence[float]) -> None:
        self._scales = tuple(scales)
        self._theta = [coefficient * scale for coefficient, scale in zip(prior, scales, strict=True)]
        self._relearn()
        self.coefficients = tuple(prior)
        self.error = FIRST_ERROR  # relative standard deviation of recent residuals
        self.num_samples = 0
        self._recent = 0  # samples since the last change
        self._streak: list[float] = []  # log ratios of consecutive outliers on one side

    def predict(self, features: Sequence[float]) -> float:
        total: float = sum(map(mul, self.coefficients, features))
        return min(total, LONGEST_S)

    def observe(self, features: Sequence[float], seconds: float, known_s: float = 0.0) -> bool:
        """Corrects the coefficients. False: the sample is invalid (not finite, not positive) and was dropped.

        Other models predict `known_s` of the `seconds`. Errors stay relative to the whole.
        """
        usable = math.isfinite(seconds) and NO_TIME_S < seconds <= LONGEST_S
        if not usable or not all(math.isfinite(f) and 0.0 <= f <= 1e15 for f in features) or not any(features):
            return False
        predicted = self._floored(features, known_s, seconds)
        if self._has_changed(math.log(seconds / predicted)):
            predicted = self._floored(features, known_s, seconds)
        ratio = math.log(seconds / predicted)
        if self._recent < CHANGE_STREAK:
            believed = math.exp(ratio)  # the first samples after a change determine its size
        else:
            believed = 1.0 + math.tanh(_clip(ratio, CLIP_SIGMAS * self.error))
        x = [feature / scale / predicted for feature, scale in zip(features, self._scales, strict=True)]
        self._correct(x, believed - known_s / predicted - sum(map(mul, self._theta, x)))
        shown = _clip(ratio, CLIP_SIGMAS * self.error)
        # The first residuals come from a model that is still learning, and FIRST_ERROR is only an assumption. The n-th
        # sample has weight n, so both count little by the time the error is used.
        gain = max(BAND_GAIN, 2.0 / (self._recent + 3))
        variance = (1.0 - gain) * self.error**2 + gain * shown**2 / CLIPPED_SHARE
        self.error = min(max(math.sqrt(variance), SMALLEST_ERROR), WIDEST_ERROR)
        self.num_samples += 1
        self._recent += 1
        if self._recent == CHANGE_STREAK:
            self._relearn()  # the first samples have corrected the scale, however wrong the prior was
        return True

    def _relearn(self) -> None:
        """Makes the current coefficients the prior."""
        typical = max(sum(self._theta), SHORTEST_S)
        # The assumed error of each coefficient is its own size, or a share of a typical batch.
        self._widest = [max(PRIOR_SPREAD * theta, 0.2 * typical) ** 2 for theta in self._theta]
        size = len(self._theta)
        self._covariance = [[self._widest[i] if i == j else 0.0 for j in range(size)] for i in range(size)]

    def _floored(self, features: Sequence[float], known_s: float, seconds: float) -> float:
        """The prediction, bounded below for use as a divisor."""
        return max(self.predict(features) + known_s, 1e-3 * seconds, 1e-9)

    def _has_changed(self, ratio: float) -> bool:
        """True if this sample completes a streak; the coefficients were then scaled by the streak's common factor."""
        streak = self._streak
        if abs(ratio) <= CHANGE_SIGMAS * min(self.error, WIDEST_BAND):
            streak.clear()
            return False
        if streak and (ratio > 0.0) is not (streak[0] > 0.0):
            streak.clear()
        streak.append(ratio)
        if len(streak) < CHANGE_STREAK:
            return False
        factor = math.exp(min(streak, key=abs))
        streak.clear()
        self._believe([min(theta * factor, LONGEST_S) for theta in self._theta])
        self._relearn()
        self._recent = 0
        self.error = FIRST_ERROR
        return True

    def _believe(self, theta: list[float]) -> None:
        self._theta = theta
        self.coefficients = tuple(one / scale for one, scale in zip(theta, self._scales, strict=True))

    def _correct(self, x: list[float], residual: float) -> None:
        covariance, noise = self._covariance, NOISE**2
        size = len(x)
        px = [sum(map(mul, row, x)) for row in covariance]
        denominator = noise + sum(map(mul, x, px))
        gain = [one / denominator for one in px]
        theta = [old + step * residual for old, step in zip(self._theta, gain, strict=True)]
        if min(theta) < 0.0:
            # Correlated coefficients move in opposite directions. If one reaches zero, the other would continue alone,
            # away from the sample. So they are treated as independent, and all move in the same direction.
            covariance = [[covariance[i][i] if i == j else 0.0 for j in range(size)] for i in range(size)]
            px = [covariance[i][i] * x[i] for i in range(size)]
            denominator = noise + sum(map(mul, x, px))
            gain = [one / denominator for one in px]
            theta = [max(0.0, old + step * residual) for old, step in zip(self._theta, gain, strict=True)]
        # Uncertainty in directions without samples would grow without bound, so forgetting stops at the prior's spread.
        forget = FORGETTING if all(covariance[i][i] < self._widest[i] for i in range(size)) else 1.0
        updated = [
            [(held - step * one) / forget for held, one in zip(row, px, strict=True)]
            for row, step in zip(covariance, gain, strict=True)
        ]
        for i in range(size):
            updated[i][i] = min(max(updated[i][i], 1e-12 * self._widest[i]), self._widest[i])
            for j in range(i):  # kept symmetric and positive despite rounding
                bound = math.sqrt(updated[i][i] * updated[j][j])
                mean = _clip(0.5 * (updated[i][j] + updated[j][i]), 0.999 * bound)
                updated[i][j] = updated[j][i] = mean
        if all(math.isfinite(one) and one <= LONGEST_S for one in theta):
            self._covariance = updated
            self._believe(theta)


def _clip(value: float, bound: float) -> float:
    return min(max(value, -bound), bound)


# --- cost models ----------------------------------------------------------------------------------------------

MAX_WORK: Final = 1e15  # limit of tokens times context of a batch
TYPICAL_TRANSFER_BYTES: Final = 1e7
# Multiple of the time for reading the weights. A longer step, rows and attention excluded, is limited by arithmetic.
HIDDEN_SHARE: Final = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPrior:
    """Coefficients of the closed forms, in seconds; measured by a worker at start, or from a profile."""

    prefill_base_s: float = 1e-3
    prefill_per_token_s: float = 1e-4
    prefill_per_token_context_s: float = 1e-8
    decode_base_s: float = 1e-2
    decode_per_row_s: float = 1e-4
    decode_per_context_token_s: float = 1e-7

    def sane(self) -> CostPrior:
        """A copy with defaults in place of coefficients that are negative or not finite."""
        default = CostPrior()
        held = {one.name: getattr(self, one.name) for one in fields(self)}
        return CostPrior(
            **{
                name: value if math.isfinite(value) and 0.0 <= value <= LONGEST_S else getattr(default, name)
                for name, value in held.items()
            }
        )


class CostModel:
    """The cost model of one worker. `observe` corrects it with every reported batch."""

    __slots__ = ("_decode", "_prefill", "decode_coefficients", "prefill_coefficients", "weights_s")

    def __init__(self, prior: CostPrior | None = None) -> None:
        prior = (prior or CostPrior()).sane()
        self._prefill = Fit(
            (prior.prefill_base_s, prior.prefill_per_token_s, prior.prefill_per_token_context_s),
            (1.0, 512.0, 512.0 * 1024.0),
        )
        self._decode = Fit(
            (prior.decode_base_s, prior.decode_per_row_s, prior.decode_per_context_token_s),
            (1.0, 16.0, 16.0 * 1024.0),
        )
        #: (base, per token, per token and token of context) and (base, per row, per context token), for callers that
        #: compare many workers.
        self.prefill_coefficients: tuple[float, ...] = self._prefill.coefficients
        self.decode_coefficients: tuple[float, ...] = self._decode.coefficients
        self.weights_s = self.decode_coefficients[0]  # to read the weights once

    def prefill_s(self, uncached: float, cached: float = 0.0, chunk_tokens: int = 0) -> float:
        """Seconds to compute `uncached` tokens after `cached` ones, in chunks of `chunk_tokens`; 0: in one chunk."""
        if uncached <= 0.0:
            return 0.0
        base, per_token, per_token_context = self.prefill_coefficients
        weights_s, rest = self.weights_s, uncached
        seconds = per_token_context * uncached * (cached + 0.5 * uncached)
        if 0 < chunk_tokens < uncached:
            chunks, rest = divmod(uncached, chunk_tokens)
            chunk_s = base + per_token * chunk_tokens
            seconds += chunks * (chunk_s if chunk_s > weights_s else weights_s)
        if rest:
            rest_s = base + per_token * rest
            seconds += rest_s if rest_s > weights_s else weights_s
        return seconds if seconds < LONGEST_S else LONGEST_S

    def decode_s(self, rows: float, context_tokens: float) -> float:
        """Seconds of one decode step of `rows` sequences with `context_tokens` in total."""
        if rows <= 0.0:
            return 0.0
        base, per_row, per_context_token = self.decode_coefficients
        seconds = base + per_row * rows + per_context_token * context_tokens
        return seconds if seconds < LONGEST_S else LONGEST_S

    def step_s(
        self, rows: float, context_tokens: float, prefill_tokens: float = 0.0, prefill_token_context: float = 0.0
    ) -> float:
        """Seconds of one step that decodes, prefills, or both.

        `prefill_token_context` is the sum of count * (cached + count / 2) over the chunks.
        """
        if prefill_tokens <= 0.0:
            return self.decode_s(rows, context_tokens)
        prefill_base, per_token, per_token_context = self.prefill_coefficients
        decode_base, per_row, per_context_token = self.decode_coefficients
        compute_s = prefill_base + per_token * prefill_tokens
        seconds = compute_s if compute_s > decode_base else decode_base
        seconds += per_row * rows + per_context_token * context_tokens + per_token_context * prefill_token_context
        return seconds if seconds < LONGEST_S else LONGEST_S

    def chunk_tokens(self, step_s: float, rows: float, context_tokens: float, cached: float) -> float:
        """The inverse of `step_s`: the maximum length of a chunk after `cached` tokens. May be infinite."""
        prefill_base, per_token, per_token_context = self.prefill_coefficients
        decode_base, per_row, per_context_token = self.decode_coefficients
        left_s = step_s - per_row * rows - per_context_token * context_tokens
        context_s = per_token_context * cached
        # A maximum is within the limit if both of its arguments are.
        beside_weights = _length(left_s - decode_base, context_s, per_token_context)
        alone = _length(left_s - prefill_base, per_token + context_s, per_token_context)
        return alone if alone < beside_weights else beside_weights

    def observe_batch(self, batch: BatchTimed) -> bool:
        """`observe` with the fields of a report."""
        return self.observe(
            rows=batch.rows,
            prefill_tokens=batch.prefill_tokens,
            prefill_token_context=batch.prefill_token_context,
            context_tokens=batch.context_tokens,
            step_s=batch.step_s,
        )

    def observe(
        self, *, rows: int, prefill_tokens: int, prefill_token_context: float, context_tokens: int, step_s: float
    ) -> bool:
        """Learns from one finished batch. A mixed batch corrects the model of the side that limited it."""
        is_sample = self._learn(rows, prefill_tokens, prefill_token_context, context_tokens, step_s)
        self.prefill_coefficients, self.decode_coefficients = self._prefill.coefficients, self._decode.coefficients
        self.weights_s = self.decode_coefficients[0]
        return is_sample

    def _learn(
        self, rows: int, prefill_tokens: int, prefill_token_context: float, context_tokens: int, step_s: float
    ) -> bool:
        if prefill_tokens <= 0:
            return self._decode.observe((1.0, rows, context_tokens), step_s) if rows > 0 else False
        base, per_token, per_token_context = self.prefill_coefficients
        if rows < 0 or context_tokens < 0 or not 0.0 <= prefill_token_context <= MAX_WORK:
            return False
        weights_s, per_row, per_context_token = self.decode_coefficients
        rows_s = min(per_row * rows + per_context_token * context_tokens, LONGEST_S)
        attention_s = min(per_token_context * prefill_token_context, LONGEST_S)
        # A step that took longer than reading the weights was limited by arithmetic, whatever was predicted.
        hides = base + per_token * prefill_tokens < weights_s
        if hides and step_s - rows_s - attention_s <= HIDDEN_SHARE * weights_s:
            return self._decode.observe((1.0, rows, context_tokens), step_s, known_s=attention_s)
        return self._prefill.observe((1.0, prefill_tokens, prefill_token_context), step_s, known_s=rows_s)

    @property
    def coefficients(self) -> CostPrior:
        """The current coefficients, in the form of the prior."""
        prefill, decode = self._prefill.coefficients, self._decode.coefficients
        return CostPrior(
            prefill_base_s=prefill[0],
            prefill_per_token_s=prefill[1],
            prefill_per_token_context_s=prefill[2],
            decode_base_s=decode[0],
            decode_per_row_s=decode[1],
            decode_per_context_token_s=decode[2],
        )

    @property
    def prefill_error(self) -> float:
        """Relative standard deviation of recent prefill batches around their prediction."""
        return self._prefill.error

    @property
    def decode_error(self) -> float:
        return self._decode.error

    @property
    def step_error(self) -> float:
        """For a mixed step: the larger of both."""
        prefill, decode = self._prefill.error, self._decode.error
        return prefill if prefill > decode else decode

    @property
    def num_prefill_samples(self) -> int:
        return self._prefill.num_samples

    @property
    def num_decode_samples(self) -> int:
        return self._decode.num_samples


class CostModels:
    """The cost models of several workers, to compare many of them: one loop instead of a call for each."""

    __slots__ = ("_chunks", "_least_chunk", "_models")

    def __init__(self, models: Sequence[CostModel], chunk_tokens: Sequence[int]) -> None:
        """`chunk_tokens` of each model, as in CostModel.prefill_s."""
        self._models = models
        self._chunks = [one or math.inf for one in chunk_tokens]  # 0: prompts are computed whole
        self._least_chunk = min(self._chunks, default=0.0)

    def prefill_s(self, uncached: float) -> list[float]:
        """CostModel.prefill_s of a prompt without cached tokens, for each model. Without its limit if all compute it in
        one chunk."""
        half = 0.5 * uncached
        if uncached <= self._least_chunk:
            return [
                per_token_context * uncached * half + (batch_s if batch_s > weights_s else weights_s)
                for model in self._models
                for base, per_token, per_token_context in (model.prefill_coefficients,)
                for batch_s in (base + per_token * uncached,)
                for weights_s in (model.weights_s,)
            ]
        times = []
        for model, chunk_tokens in zip(self._models, self._chunks, strict=True):
            base, per_token, per_token_context = model.prefill_coefficients
            weights_s = model.weights_s
            seconds = per_token_context * uncached * half
            rest = uncached
            if uncached > chunk_tokens:
                chunks, rest = divmod(uncached, chunk_tokens)
                chunk_s = base + per_token * chunk_tokens
                seconds += chunks * (chunk_s if chunk_s > weights_s else weights_s)
            if rest:
                rest_s = base + per_token * rest
                seconds += rest_s if rest_s > weights_s else weights_s
            times.append(seconds if seconds < LONGEST_S else LONGEST_S)
        return times

    def least_decode_s(self, context_tokens: float) -> float:
        """The shortest decode step of one sequence; infinite without models."""
        least_s = math.inf
        for model in self._models:
            base, per_row, per_context_token = model.decode_coefficients
            seconds = base + per_row + per_context_token * context_tokens
            if seconds < least_s:
                least_s = seconds
        return least_s


class LinkModel:
    """Predicts the seconds of a KV transfer between two workers, including the effect of other traffic."""

    __slots__ = ("_fit", "coefficients")

    def __init__(self, latency_s: float = 1e-3, bandwidth_bytes_s: float = 1e9) -> None:
        self._fit = Fit((latency_s, 1.0 / max(bandwidth_bytes_s, 1.0)), (1.0, TYPICAL_TRANSFER_BYTES))
        #: (latency, seconds per byte), for callers that compare many pairs.
        self.coefficients: tuple[float, ...] = self._fit.coefficients

    def transfer_s(self, num_bytes: float) -> float:
        if num_bytes <= 0.0:
            return 0.0
        latency_s, per_byte_s = self.coefficients
        seconds = latency_s + per_byte_s * num_bytes
        return seconds if seconds < LONGEST_S else LONGEST_S

    def observe(self, num_bytes: float, busy_s: float) -> bool:
        """Learns from one finished transfer, without its waits for KV. False: it was no valid sample."""
        is_sample = self._fit.observe((1.0, num_bytes), busy_s) if num_bytes > 0.0 else False
        self.coefficients = self._fit.coefficients
        return is_sample

    @property
    def latency_s(self) -> float:
        return self.coefficients[0]

    @property
    def bandwidth_bytes_s(self) -> float:
        return 1.0 / max(self.coefficients[1], 1e-15)

    @property
    def error(self) -> float:
        """Relative standard deviation of recent transfers around their prediction."""
        return self._fit.error

    @property
    def num_samples(self) -> int:
        return self._fit.num_samples


def _length(left_s: float, linear_s: float, per_token_context_s: float) -> float:
    """The largest u with linear * u + per_token_context * u * u / 2 <= left."""
    if left_s <= 0.0:
        return 0.0
    divisor_s = linear_s + math.sqrt(linear_s * linear_s + 2.0 * per_token_context_s * left_s)
    return 2.0 * left_s / divisor_s if divisor_s > 0.0 else math.inf
