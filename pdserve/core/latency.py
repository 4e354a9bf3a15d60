"""What a batch and a transfer will take, in closed form, corrected online by each finished batch. Pure.

    prefill_s(u, cached)      = base + per_token * u + per_token_context * u * (cached + u / 2)
    decode_s(batch, context)  = base + per_row * batch + per_context_token * context
    transfer_s(bytes)         = latency + bytes / bandwidth

The coefficients follow the batches that a worker reports by recursive least squares with forgetting, on relative
errors, so that long and short batches weigh the same. A sample far outside the error band weighs less (Huber) and
widens the band, so one stall moves little; several in a row on the same side are a machine that has changed, and
are learnt from anew.
Predictions are finite and never negative, whatever the samples were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

LONGEST_S: Final = 86_400.0  # samples and predictions beyond a day are nonsense
CLIP_SIGMAS: Final = 3.0  # residuals beyond weigh less in the coefficients
BAND_SIGMAS: Final = 5.0  # and are clipped in the band, which so grows by at most a factor per sample
CHANGE_STREAK: Final = 5  # residuals beyond CLIP_SIGMAS in a row, on one side, that are taken for a change
BAND_GAIN: Final = 0.05
SMALLEST_ERROR: Final = 0.02  # relative; a band never shrinks below it
FIRST_ERROR: Final = 0.5  # relative; before any sample
FORGETTING: Final = 0.99
NOISE: Final = 0.1  # relative standard deviation that a typical sample is believed to have
PRIOR_SPREAD: Final = 2.0  # how far a coefficient may be from its prior, relative to a typical batch


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
        """The same with every coefficient that is not a finite number >= 0 replaced by the default."""
        default = CostPrior()
        held = {one.name: getattr(self, one.name) for one in fields(self)}
        return CostPrior(
            **{
                name: value if math.isfinite(value) and 0.0 <= value <= LONGEST_S else getattr(default, name)
                for name, value in held.items()
            }
        )


class Fit:
    """Non-negative linear model of a duration; `scales` are typical feature values, for conditioning.

    Works on features divided by their scale and on targets divided by the prediction.
    """

    __slots__ = (
        "_covariance",
        "_scales",
        "_streak",
        "_theta",
        "_widest",
        "coefficients",
        "error",
        "num_rejected",
        "num_samples",
    )

    def __init__(self, prior: Sequence[float], scales: Sequence[float]) -> None:
        self._scales = tuple(scales)
        self._theta = [coefficient * scale for coefficient, scale in zip(prior, scales, strict=True)]
        typical = max(sum(self._theta), 1e-9)
        # Relative to a typical batch each coefficient may be off by its own size, or by a share of the whole.
        self._widest = [max(PRIOR_SPREAD * theta, 0.2 * typical) ** 2 for theta in self._theta]
        size = len(self._theta)
        self._covariance = [[self._widest[i] if i == j else 0.0 for j in range(size)] for i in range(size)]
        self.coefficients = tuple(prior)
        self.error = FIRST_ERROR  # relative standard deviation of recent residuals
        self.num_samples = 0
        self.num_rejected = 0
        self._streak = 0  # consecutive outliers; negative: below the prediction

    def predict(self, features: Sequence[float]) -> float:
        total = 0.0
        for coefficient, feature in zip(self.coefficients, features, strict=True):
            total += coefficient * feature
        return min(total, LONGEST_S)

    def observe(self, features: Sequence[float], seconds: float) -> bool:
        """Corrects the coefficients. False: the sample is no sample (not finite, not positive) and was dropped."""
        usable = math.isfinite(seconds) and 0.0 < seconds <= LONGEST_S
        if not usable or not all(math.isfinite(f) and 0.0 <= f <= 1e15 for f in features) or not any(features):
            self.num_rejected += 1
            return False
        predicted = max(self.predict(features), 1e-3 * seconds, 1e-9)
        x = [feature / scale / predicted for feature, scale in zip(features, self._scales, strict=True)]
        residual = seconds / predicted - sum(theta * one for theta, one in zip(self._theta, x, strict=True))
        self._watch(residual)
        self._correct(x, residual, noise=NOISE**2 * max(1.0, abs(residual) / (CLIP_SIGMAS * self.error)))
        shown = _clip(residual, BAND_SIGMAS * self.error)
        gain = max(BAND_GAIN, 1.0 / (self.num_samples + 3))
        variance = (1.0 - gain) * self.error**2 + gain * shown**2
        self.error = min(max(math.sqrt(variance), SMALLEST_ERROR), 10.0)
        self.num_samples += 1
        return True

    def _watch(self, residual: float) -> None:
        if abs(residual) <= CLIP_SIGMAS * self.error:
            self._streak = 0
            return
        side = 1 if residual > 0.0 else -1
        self._streak = self._streak + side if self._streak * side >= 0 else side
        if abs(self._streak) >= CHANGE_STREAK:
            self._streak = 0
            size = len(self._widest)
            self._covariance = [[self._widest[i] if i == j else 0.0 for j in range(size)] for i in range(size)]

    def _correct(self, x: list[float], residual: float, noise: float) -> None:
        covariance = self._covariance
        size = len(x)
        px = [sum(row[j] * x[j] for j in range(size)) for row in covariance]
        denominator = noise + sum(x[i] * px[i] for i in range(size))
        gain = [one / denominator for one in px]
        theta = [old + step * residual for old, step in zip(self._theta, gain, strict=True)]
        if min(theta) < 0.0:
            # Correlated coefficients move against each other. Where one may go no lower, its partner would go on
            # alone, away from the sample: so they are taken for independent, and all move the same way.
            covariance = [[covariance[i][i] if i == j else 0.0 for j in range(size)] for i in range(size)]
            px = [covariance[i][i] * x[i] for i in range(size)]
            denominator = noise + sum(x[i] * px[i] for i in range(size))
            gain = [one / denominator for one in px]
            theta = [max(0.0, old + step * residual) for old, step in zip(self._theta, gain, strict=True)]
        # Directions that no sample excites would grow without bound: forgetting stops at the prior's spread.
        forget = FORGETTING if all(covariance[i][i] < self._widest[i] for i in range(size)) else 1.0
        updated = [[(covariance[i][j] - gain[i] * px[j]) / forget for j in range(size)] for i in range(size)]
        for i in range(size):
            updated[i][i] = min(max(updated[i][i], 1e-12 * self._widest[i]), self._widest[i])
            for j in range(i):  # symmetric and positive, whatever rounding did
                bound = math.sqrt(updated[i][i] * updated[j][j])
                mean = _clip(0.5 * (updated[i][j] + updated[j][i]), 0.999 * bound)
                updated[i][j] = updated[j][i] = mean
        if all(math.isfinite(one) and one <= LONGEST_S for one in theta):
            self._theta, self._covariance = theta, updated
            self.coefficients = tuple(one / scale for one, scale in zip(theta, self._scales, strict=True))
        else:
            self.num_rejected += 1


class CostModel:
    """Seconds that one worker needs. Corrected by `observe` with every batch that it reports."""

    __slots__ = ("_decode", "_prefill")

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

    def prefill_s(self, uncached: float, cached: float = 0.0, chunk_tokens: int = 0) -> float:
        """Seconds of compute for `uncached` tokens after `cached` ones; `base` is paid once per chunk."""
        if uncached <= 0.0:
            return 0.0
        base, per_token, per_token_context = self._prefill.coefficients
        chunks = -(-uncached // chunk_tokens) if chunk_tokens > 0 else 1.0
        seconds = base * chunks + uncached * (per_token + per_token_context * (cached + 0.5 * uncached))
        return seconds if seconds < LONGEST_S else LONGEST_S

    def decode_s(self, batch: float, context: float) -> float:
        """Seconds of one decode step of `batch` sequences with `context` tokens in sum."""
        if batch <= 0.0:
            return 0.0
        base, per_row, per_context_token = self._decode.coefficients
        seconds = base + per_row * batch + per_context_token * context
        return seconds if seconds < LONGEST_S else LONGEST_S

    def observe(
        self, *, rows: int, prefill_tokens: int, prefill_token_context: float, context_tokens: int, step_s: float
    ) -> bool:
        """One finished batch. A mixed one corrects the prefill part with what the decode part leaves of it."""
        if prefill_tokens <= 0:
            return self._decode.observe((1.0, rows, context_tokens), step_s) if rows > 0 else False
        if rows <= 0:
            return self._prefill.observe((1.0, prefill_tokens, prefill_token_context), step_s)
        rest_s = step_s - self.decode_s(rows, context_tokens)
        return self._prefill.observe((0.0, prefill_tokens, prefill_token_context), rest_s)

    @property
    def decode_coefficients(self) -> tuple[float, ...]:
        """(base, per row, per context token), for who prices many workers at once."""
        return self._decode.coefficients

    @property
    def coefficients(self) -> CostPrior:
        """The present ones, in the prior's form."""
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
    def num_prefill_samples(self) -> int:
        return self._prefill.num_samples


class LinkModel:
    """Seconds that KV needs between one pair of workers.

    A transfer that overlaps the prefill lasts as long as the prefill, so its duration says little about the link.
    The fastest recent one says what the link can do: a new fastest is believed at once and fades slowly.
    """

    __slots__ = ("bandwidth_bytes_s", "latency_s", "num_samples")

    FADE: Final = 0.98

    def __init__(self, latency_s: float = 1e-3, bandwidth_bytes_s: float = 1e9) -> None:
        self.latency_s = latency_s
        self.bandwidth_bytes_s = bandwidth_bytes_s
        self.num_samples = 0

    def transfer_s(self, num_bytes: float) -> float:
        if num_bytes <= 0.0:
            return 0.0
        return min(self.latency_s + num_bytes / self.bandwidth_bytes_s, LONGEST_S)

    def observe(self, num_bytes: float, transfer_s: float) -> bool:
        if not (math.isfinite(num_bytes) and math.isfinite(transfer_s)) or num_bytes <= 0.0 or transfer_s <= 0.0:
            return False
        seen = min(max(num_bytes / transfer_s, 1e3), 1e13)
        faded = self.bandwidth_bytes_s * self.FADE + seen * (1.0 - self.FADE)
        self.bandwidth_bytes_s = max(seen, faded) if self.num_samples else seen
        self.num_samples += 1
        return True


def _clip(value: float, bound: float) -> float:
    return min(max(value, -bound), bound)
