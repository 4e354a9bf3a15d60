"""benchmarks.engine.batch_effect counts tokens and logprobs that the other rows of a step change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from benchmarks.engine.batch_effect import BatchEffect, WrittenText, measure, standard_library
from pdserve.config import WorkerConfig
from pdserve.core.types import Role, Sampling, TokenOut
from pdserve.engine.interface import Engine, OnLayer, Row, RowOut
from pdserve.engine.load_engine import load_engine
from pdserve.launch.settings import bundled_model

COUNT = 8


@final
class DisturbedEngine:
    """The toy engine, but beside other rows the token after position 10 of each text is another one."""

    def __init__(self) -> None:
        self._engine = load_engine(WorkerConfig(model="toy", worker_id="w", engine="toy", kv_blocks=64), Role.DECODE)
        self.spec, self.pool = self._engine.spec, self._engine.pool

    def step(self, rows: Sequence[Row], on_layer: OnLayer | None = None) -> Sequence[RowOut]:
        outs = list(self._engine.step(rows, on_layer))
        if len(rows) > 1:
            for at, row in enumerate(rows):
                if row.start + len(row.tokens) == 10:
                    [one] = outs[at].sampled
                    outs[at] = RowOut((TokenOut(token_id=one.token_id % 200 + 1),))
        return outs


def texts(engine: Engine) -> list[WrittenText]:
    each = -(-20 // engine.spec.block_size)
    return [
        WrittenText(
            tokens=[40 + at] * (4 + at),
            prompt_len=4 + at,
            sampling=Sampling(temperature=0.0, ignore_eos=True),
            blocks=range(at * each, (at + 1) * each),
        )
        for at in range(3)
    ]


def test_a_token_that_depends_on_other_rows_is_counted() -> None:
    engine = DisturbedEngine()
    found = measure(engine, texts(engine), COUNT)
    assert (found.tokens, found.differ) == (3 * COUNT, 3)
    found = measure(engine, texts(engine)[:1], COUNT)
    assert (found.tokens, found.differ) == (COUNT, 0)


def test_changes_of_logprobs_are_reported() -> None:
    effect, one = BatchEffect(), TokenOut(token_id=3, logprob=-1.0)
    effect.add(one, one)
    effect.add(one, replace(one, logprob=-1.25))
    effect.add(one, TokenOut(token_id=4, logprob=-1.0))
    assert effect.row() == ["1 of 3", "1", "0.2"]


def test_prompts_are_whole_and_different() -> None:
    prompts = standard_library(bundled_model(), 16)
    assert [len(one) for one in prompts] == [40] * 16
    assert len({tuple(one) for one in prompts}) == 16
