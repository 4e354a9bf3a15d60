"""N-gram speculation: predictions from the text itself, and how many of them a step tries. Pure.

A text is predicted to continue as it did after an earlier occurrence of its last tokens. The match is the longest run
of at least two tokens at the end of the text that also occurs earlier. Among equally long runs, the latest occurrence
is used. While the text continues like the match, the match grows with each token. Otherwise an index is searched for
earlier occurrences of the last two tokens. It has one entry per token, and a search visits at most MAX_PLACES entries,
so the cost of a step does not depend on the length of the text.

Each sampled token shows whether the prediction was right, even if it was not used as a draft. So acceptance rates are
measured before any draft is computed, and text without repetition costs no drafts. Each sequence has its own rates,
because other sequences say nothing about it. Initial rates are low.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from pdserve.core.cost.latency import CostPrior
from pdserve.core.effects import StepAccount

MIN_MATCH: Final = 2
MAX_PLACES: Final = 32  # earlier occurrences considered, latest first
MAX_COMPARED: Final = 16  # tokens compared at an occurrence; a match may grow longer later
LAST_CLASS_LENGTH: Final = 19  # longer matches have the class of this length

# Longer matches are more likely to continue. Match lengths are grouped into classes; a class has one acceptance rate.
_CLASS_OF: Final = tuple(sum(length > last for last in (2, 3, 4, 6, 10, 18)) for length in range(LAST_CLASS_LENGTH + 1))
# Initial acceptance rate of each class, with the weight of INITIAL_WEIGHT predictions.
_INITIAL_RATES: Final = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85)
INITIAL_WEIGHT: Final = 3.0
GUESS_DECAY: Final = 0.9  # forgetting factor per prediction, so about ten of them count


@final
class AcceptanceRates:
    """How often recent predictions were right, by the length of the match."""

    __slots__ = ("_right", "_tried")

    def __init__(self) -> None:
        self._right = [0.0] * len(_INITIAL_RATES)
        self._tried = [0.0] * len(_INITIAL_RATES)

    def record(self, length: int, *, is_right: bool) -> None:
        one = _CLASS_OF[min(length, LAST_CLASS_LENGTH)]
        self._right[one] = GUESS_DECAY * self._right[one] + is_right
        self._tried[one] = GUESS_DECAY * self._tried[one] + 1.0

    def rate(self, length: int) -> float:
        """The probability that the next token after a match of `length` tokens is the predicted one."""
        one = _CLASS_OF[min(length, LAST_CLASS_LENGTH)]
        return (self._right[one] + INITIAL_WEIGHT * _INITIAL_RATES[one]) / (self._tried[one] + INITIAL_WEIGHT)


@final
class NgramProposer:
    """The current match of one sequence, and its acceptance rates.

    Every call gets the same list `tokens`: the whole text, to which the caller appends.
    """

    __slots__ = ("_before", "_latest", "_rates", "length", "source")

    def __init__(self) -> None:
        self._rates = AcceptanceRates()
        self._latest: dict[int, int] = {}  # two tokens -> the latest place after them
        self._before: list[int] = [0, 0]  # place -> the previous place after the same two tokens; 0: none
        self.source = 0  # position of the predicted next token; 0 without a match
        self.length = 0  # length of the match in tokens

    def read(self, tokens: Sequence[int]) -> None:
        """Adds the tokens since the last call to the index."""
        latest, before = self._latest, self._before
        is_first = len(before) == 2
        for place in range(len(before), len(tokens) + 1):
            newest = tokens[place - 1]
            pair = tokens[place - 2] << 32 | newest
            earlier = latest.get(pair, 0)
            before.append(earlier)
            latest[pair] = place
            if is_first and place < len(tokens):
                continue  # the model did not write the prompt, so it does not change the acceptance rates
            if self.source:
                is_right = tokens[self.source] == newest
                self._rates.record(self.length, is_right=is_right)
                if is_right:
                    self.source += 1
                    self.length += 1
                    continue
            self._look_up(tokens, place, earlier)

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Predicts the next `count` tokens; [] without a match.

        If fewer tokens follow the earlier occurrence, the prediction repeats them.
        """
        if not self.source:
            return []
        period = len(tokens) - self.source
        if count <= period:
            return list(tokens[self.source : self.source + count])
        return [tokens[self.source + index % period] for index in range(count)]

    def accept_probabilities(self, count: int, least: float) -> list[float]:
        """The probabilities that the first 1, 2, ... predicted tokens are all right.

        The list has at most `count` entries and ends before the first one below `least`.
        """
        probabilities: list[float] = []
        probability = 1.0
        if self.source:
            for length in range(self.length, self.length + count):
                probability *= self._rates.rate(length)
                if probability < least:
                    break
                probabilities.append(probability)
        return probabilities

    def _look_up(self, tokens: Sequence[int], end: int, place: int) -> None:
        """Finds the longest match for the text up to `end`, among the latest occurrences of its last two tokens."""
        self.source = self.length = 0
        for _ in range(MAX_PLACES):
            if not place:
                return
            length = MIN_MATCH
            while length < MAX_COMPARED and length < place and tokens[place - 1 - length] == tokens[end - 1 - length]:
                length += 1
            if length > self.length:
                self.source, self.length = place, length
                if length == MAX_COMPARED:
                    return
            place = self._before[place]


# --- number of drafts -----------------------------------------------------------------------------------------
# Each row gets as many as maximise the step's tokens per second, often none.
#
# A step of B rows with D drafts yields B tokens and the accepted drafts. Its time is measured. Steps of similar size
# share a price: a constant without drafts, and a linear function of D / B with drafts, both relative to the predicted
# time of a plain step. Only their ratio matters, so both forget quickly. While drafts pay, an occasional plain step
# keeps both prices up to date.
#
# Drafts are added in the order of their probability while the rate grows, and only if the best rate is better than a
# plain step's by a margin. All rows wait for the step, so it must also meet their strictest TPOT target.

SLACK_SHARE: Final = 0.8  # longest step, as a share of the TPOT target: all drafts may be rejected
MARGIN: Final = 1.05  # required gain over plain steps, because prices and probabilities have errors
LEAST_PROBABILITY: Final = 0.02
REFERENCE_STEPS: Final = 24  # after this many consecutive steps with drafts, one step is plain
FIRST_PROBE_STEPS: Final = 32  # plain steps with promising drafts, after which the price of drafts is measured again
LAST_PROBE_STEPS: Final = 1024
PROBE_GAIN: Final = 0.5  # expected accepted drafts per row that count as promising
PRICE_DECAY: Final = 0.95  # each new measurement multiplies the weight of older ones by this
FIRST_DRAFTS: Final = 4.0  # the prior counts as one measurement without drafts, and one with this many per row
# Weight of the current base and slope, in measurements. It keeps both stable if all measurements are similar.
PRESENT_WEIGHT: Final = (0.1, 1.0)
OUTLIER: Final = 3.0  # measurements are clipped to this multiple of the expected time
SURPRISE: Final = 0.6  # a step faster than this share of the expected time means that older measurements are wrong


@final
class Price:
    """The time of steps of similar size, with and without drafts; `base` and `per_draft` are initial values."""

    __slots__ = (
        "_moments",
        "_num_plain",
        "_weights",
        "base",
        "first_per_draft",
        "num_refused",
        "per_draft",
        "plain",
        "probe_steps",
    )

    def __init__(self, base: float, per_draft: float) -> None:
        self.plain = 1.0
        self._num_plain = 0
        self.base, self.per_draft = base, per_draft
        self.first_per_draft = per_draft
        self._weights = (0.0, 0.0, 0.0)  # sums over measurements: 1, d, d * d
        self._moments = (0.0, 0.0)  # t, t * d
        self._believe(base, per_draft)
        self.num_refused = 0  # promising steps since the last one with drafts
        self.probe_steps = FIRST_PROBE_STEPS

    def speculated(self, drafts_per_row: float) -> float:
        return self.base + self.per_draft * drafts_per_row

    def learn_plain(self, units: float) -> None:
        self._num_plain += 1
        if units < SURPRISE * self.plain:
            self.plain = units
        else:
            gain = max(1.0 - PRICE_DECAY, 1.0 / (self._num_plain + 1))
            self.plain += gain * (min(units, OUTLIER * self.plain) - self.plain)

    def learn(self, drafts_per_row: float, units: float) -> None:
        """Least squares over recent measurements."""
        expected = self.speculated(drafts_per_row)
        if units < SURPRISE * expected:
            self._believe(self.base * units / expected, self.per_draft * units / expected)
            return
        d, t = drafts_per_row, min(units, OUTLIER * expected)
        w, wd, wdd = self._weights
        m, md = self._moments
        self._weights = w, wd, wdd = PRICE_DECAY * w + 1.0, PRICE_DECAY * wd + d, PRICE_DECAY * wdd + d * d
        self._moments = m, md = PRICE_DECAY * m + t, PRICE_DECAY * md + t * d
        w, wdd = w + PRESENT_WEIGHT[0], wdd + PRESENT_WEIGHT[1]
        m, md = m + PRESENT_WEIGHT[0] * self.base, md + PRESENT_WEIGHT[1] * self.per_draft
        self.per_draft = max(0.0, (w * md - wd * m) / (w * wdd - wd * wd))
        self.base = max(0.0, (m - self.per_draft * wd) / w)

    def _believe(self, base: float, per_draft: float) -> None:
        """Restarts from a linear function, as if two points of it had been measured."""
        self.base, self.per_draft = base, per_draft
        guess = base + per_draft * FIRST_DRAFTS
        self._weights = (2.0, FIRST_DRAFTS, FIRST_DRAFTS**2)
        self._moments = (base + guess, guess * FIRST_DRAFTS)


@final
class DraftRule:
    """Allows at most `most` drafts per row and `most_together` per step. `prior` is the worker's initial cost model."""

    def __init__(self, prior: CostPrior, *, most: int, most_together: int) -> None:
        self.most = most
        self._most_together = most_together
        self._prior = prior
        self._prices: dict[int, Price] = {}  # by the power of two of the rows
        self._num_speculated = 0  # consecutive steps with drafts

    def least_probability(self, rows: int) -> float:
        """The probability below which a draft costs more than it gains, even if it is the first one of the step."""
        price = self._price(rows)
        per_draft = min(price.per_draft, price.first_per_draft)  # a price that is too high must be measured again
        return max(LEAST_PROBABILITY, per_draft / max(price.plain, 1e-9))

    def counts(
        self, probabilities: Sequence[Sequence[float]], *, context_tokens: int, tpot_s: float | None
    ) -> list[int] | None:
        """Number of drafts per row; None for a plain step. `probabilities` are those that the first 1, 2, ... drafts
        are all right.

        `tpot_s` is the strictest TPOT target of the rows.
        """
        ranked = [(probability, row) for row, each in enumerate(probabilities) for probability in each]
        if not ranked or self._num_speculated >= REFERENCE_STEPS:
            return None
        ranked.sort(key=lambda one: -one[0])
        del ranked[self._most_together :]
        rows = len(probabilities)
        price = self._price(rows)
        most_units = float("inf") if tpot_s is None else SLACK_SHARE * tpot_s / self._unit_s(rows, context_tokens)
        best, best_rate, gain = 0, MARGIN * rows / max(price.plain, 1e-9), 0.0
        for number, (probability, _) in enumerate(ranked, 1):
            gain += probability
            units = price.speculated(number / rows)
            if units > most_units:
                break
            rate = (rows + gain) / max(units, 1e-9)
            if rate > best_rate:
                best, best_rate = number, rate
        if best == 0:
            price.num_refused += gain >= PROBE_GAIN * rows
            if price.num_refused <= price.probe_steps:
                return None
            price.probe_steps = min(2 * price.probe_steps, LAST_PROBE_STEPS)
            best = len(ranked)
        elif price.num_refused == 0:
            price.probe_steps = FIRST_PROBE_STEPS
        counts = [0] * rows
        for _, row in ranked[:best]:
            counts[row] += 1
        return counts

    def observe(self, account: StepAccount, step_s: float) -> None:
        """Learns that a step without prompts took `step_s`."""
        rows = account.decode_rows
        price, units = self._price(rows), step_s / self._unit_s(rows, account.context_tokens)
        if account.draft_tokens == 0:
            self._num_speculated = 0
            price.learn_plain(units)
            return
        self._num_speculated += 1
        price.num_refused = 0
        price.learn(account.draft_tokens / rows, units)

    def _price(self, rows: int) -> Price:
        price = self._prices.get(rows.bit_length())
        if price is None:
            prior = self._prior
            per_row_s = prior.decode_per_row_s * rows
            plain_s = max(prior.decode_base_s + per_row_s, 1e-9)
            base_s = max(prior.decode_base_s, prior.prefill_base_s) + per_row_s
            price = self._prices[rows.bit_length()] = Price(
                base_s / plain_s if plain_s > 1e-9 else 1.0, prior.prefill_per_token_s * rows / plain_s
            )
        return price

    def _unit_s(self, rows: int, context_tokens: int) -> float:
        prior = self._prior
        return max(
            prior.decode_base_s + prior.decode_per_row_s * rows + prior.decode_per_context_token_s * context_tokens,
            1e-9,
        )
