"""A linear model of a duration, fitted online by recursive least squares with forgetting. Pure.

- Errors are log ratios, so long and short batches have equal weight, and so do twice and half of the predicted time.
  Batches are late by much and early by little, so the model predicts their median, not their mean.
- Samples are clipped to CLIP_SIGMAS around the prediction, so a single stall has little effect. With a stall in every
  tenth batch, coefficients and error stay near those of the other nine.
- CHANGE_STREAK consecutive samples beyond CHANGE_SIGMAS on one side mean that the machine has changed. Their common
  factor scales all coefficients at once, and learning restarts. For this test the error counts as at most WIDEST_BAND:
  a larger error means that the coefficients are wrong, for instance after other processes have stopped.
- Predictions are finite and never negative, for any samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import Final

from pdserve.core.durations import DAY_S

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
