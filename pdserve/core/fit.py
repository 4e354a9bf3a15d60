"""A linear model of a duration that follows its samples: recursive least squares with forgetting. Pure.

Errors are relative, so that long and short batches weigh the same. A sample far outside the error band weighs less
(Huber) and widens the band, so one stall moves little; several in a row on the same side are a machine that has
changed, and are learnt from anew.
Predictions are finite and never negative, whatever the samples were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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

    def observe(self, features: Sequence[float], seconds: float, known_s: float = 0.0) -> bool:
        """Corrects the coefficients. False: the sample is no sample (not finite, not positive) and was dropped.

        `known_s` of the `seconds` is predicted by others; errors stay relative to the whole.
        """
        usable = math.isfinite(seconds) and 0.0 < seconds <= LONGEST_S
        if not usable or not all(math.isfinite(f) and 0.0 <= f <= 1e15 for f in features) or not any(features):
            self.num_rejected += 1
            return False
        predicted = max(self.predict(features) + known_s, 1e-3 * seconds, 1e-9)
        x = [feature / scale / predicted for feature, scale in zip(features, self._scales, strict=True)]
        residual = (seconds - known_s) / predicted - sum(theta * one for theta, one in zip(self._theta, x, strict=True))
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


def _clip(value: float, bound: float) -> float:
    return min(max(value, -bound), bound)
