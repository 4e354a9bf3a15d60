"""A step on vLLM's model runner: our rows in, its logits and hidden states out, and our own sampler draws.

So what is drawn depends on the logits, the seed and the position alone, as with our own engine. vLLM's logits may
depend on the other rows of a step in their last bits.
"""

# Shapes: U positions whose logits or hidden states are needed, B sampled positions, E hidden size, V vocabulary.

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from pdserve.core.adapters import Adapter
from pdserve.core.errors import InternalError, ModelError
from pdserve.engine.interface import EngineSpec, OnLayer, Row, RowOut
from pdserve.engine.memory.plan import MemoryPlan
from pdserve.engine.rows import check_rows, warm_rows
from pdserve.engine.sampling.grammars import Grammars
from pdserve.engine.torch_engine import sample_rows, score
from pdserve.engine.vllm.adapters import AdapterSlots
from pdserve.engine.vllm.pool import VllmPool
from pdserve.engine.vllm.requests import Place, Requests, divided


@dataclass(frozen=True, slots=True)
class Limits:
    """Of what the runner computes at once."""

    rows: int
    tokens: int


def close_worker(worker: Any) -> None:
    """Frees what vLLM's worker holds, so that another one can be opened in this process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    worker.shutdown()
    cleanup_dist_env_and_memory()


@final
class VllmEngine:
    """`worker` is vLLM's, with weights, and with `pool` divided among its layers."""

    def __init__(
        self,
        spec: EngineSpec,
        pool: VllmPool,
        grammars: Grammars,
        vllm_config: Any,
        worker: Any,
        limits: Limits,
        adapters: AdapterSlots | None = None,
    ) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.sampling_params import SamplingParams

        self.spec, self.pool, self.grammars = spec, pool, grammars
        self.memory: MemoryPlan | None = None
        self._worker, self._limits, self._adapters = worker, limits, adapters
        self._runner = worker.model_runner
        self._requests = Requests(spec.block_size)
        self._stale: set[str] = set()  # requests that a failed step left behind
        self._within: Callable[[], AbstractContextManager[None]] = partial(set_current_vllm_config, vllm_config)
        self._greedy = SamplingParams(temperature=0.0, max_tokens=1)  # of every request: its own sampler never runs

    @torch.inference_mode()
    def step(self, rows: Sequence[Row], on_layer: OnLayer | None = None) -> list[RowOut]:
        adapters = self._adapters
        rows = list(rows)  # one may be made whenever it is read
        check_rows(self.spec, rows, adapters=() if adapters is None else adapters)
        if not rows:
            return []
        outs = [RowOut()] * len(rows)
        slots = () if adapters is None else (adapters.num_slots, adapters.active)
        for part in divided(rows, self._limits.rows, self._limits.tokens, *slots):
            try:
                with self._within():  # some of vLLM's modules read it when they are first used
                    found = self._part([rows[index] for index in part])
            finally:
                self._wait()
            for index, out in zip(part, found, strict=True):
                outs[index] = out
        # Once, when nothing can fail any more: a repeated step clears whole blocks, so none may be on its way.
        if on_layer is not None:
            on_layer(self.spec.num_layers)
        return outs

    def load_adapter(self, adapter: Adapter) -> None:
        if self._adapters is None:
            raise ModelError("lora", adapter.name, "a worker that was started with lora or lora_folders")
        with self._within():
            self._adapters.load(adapter)

    def unload_adapter(self, fingerprint: str) -> None:
        if self._adapters is not None:
            self._adapters.unload(fingerprint)
            self._stale |= self._requests.forget()  # they name an adapter that the runner no longer has

    def warm_up(self) -> None:
        """Runs every kind of step, so that no request waits for a kernel to compile."""
        for rows in warm_rows(self.spec):
            self.step(rows)
        if self._adapters is not None:
            with self._adapters.warm() as fingerprint:
                for rows in warm_rows(self.spec):
                    self.step([replace(row, adapter=fingerprint) for row in rows])
                self._stale |= self._requests.forget()

    @torch.inference_mode()
    def follow(self, rows: Sequence[Row]) -> None:
        """Takes part in a step whose tokens another rank samples: computes the same states and logits, in the same
        order. vLLM gathers the logits on the first rank only."""
        for part in divided(rows, self._limits.rows, self._limits.tokens):
            try:
                with self._within():
                    self._follow_part([rows[index] for index in part])
            finally:
                self._wait()

    def _follow_part(self, rows: Sequence[Row]) -> None:
        hidden_TE, _, begins, _ = self._states(rows)
        if any(row.drafts for row in rows):
            self._runner.model.compute_logits(hidden_TE[_sampled_positions(rows, begins)])
        for row, begin in zip(rows, begins, strict=True):
            if row.targets:
                x_UE = hidden_TE[begin : begin + len(row.targets)]
                score(self._take_part, x_UE, row.targets, row.num_top, self.spec.vocab_size)

    def close(self) -> None:
        close_worker(self._worker)

    def _wait(self) -> None:
        """Until a GPU has computed what the runner launched.

        The runner fills pinned buffers again in the next step, and waits for their copies only where its own sampler
        does. It computes on a stream of its own, and a transfer waits for the default stream.
        """
        if not self.pool.is_on_host:
            torch.cuda.current_stream(self.pool.raw.device).synchronize()

    def _states(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor, list[int], list[int]]:
        if sum(row.num_queries for row in rows) > self._limits.tokens:
            raise InternalError(f"a row of {rows[0].num_queries} tokens, where vLLM computes {self._limits.tokens}")
        self.pool.clear(self._fresh_blocks(rows))
        return self._compute(rows)

    def _part(self, rows: Sequence[Row]) -> list[RowOut]:
        hidden_TE, logits_RV, begins, orders = self._states(rows)
        outs = [RowOut()] * len(rows)
        sampling = [index for index, row in enumerate(rows) if row.num_samples]
        if sampling:
            if any(row.drafts for row in rows):
                logits_BV = self._project(hidden_TE[_sampled_positions(rows, begins)])
            else:
                logits_BV = self._wide(logits_RV[[orders[index] for index in sampling]])
            outs = sample_rows(rows, logits_BV, self.grammars, self.spec.eos_token_ids)
        for index, row in enumerate(rows):
            if row.targets:
                x_UE = hidden_TE[begins[index] : begins[index] + len(row.targets)]
                scored = score(self._project, x_UE, row.targets, row.num_top, self.spec.vocab_size)
                outs[index] = replace(outs[index], scored=scored)
        return outs

    def _fresh_blocks(self, rows: Sequence[Row]) -> list[int]:
        """Blocks that a row begins to write, and does not fill."""
        size = self.spec.block_size
        ends = ((row, row.start + row.num_queries) for row in rows)
        return [row.blocks[end // size] for row, end in ends if end % size and end - end % size >= row.start]

    def _compute(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor, list[int], list[int]]:
        """Hidden states of all positions, and logits of each row's last one; where each row's positions begin, and the
        row of its logits. Valid until the next step."""
        places, ended = self._requests.place(rows)
        try:
            scheduled = self._scheduled(rows, places, ended | self._stale)
            self._write_tokens(rows, places)
            if self._worker.execute_model(scheduled) is not None:
                raise InternalError("vLLM's runner returned results instead of logits")
            state = self._runner.execute_model_state
        except BaseException:
            # The runner may have any of the requests, so it keeps none.
            self._stale = self._requests.forget() | set(self._runner.requests)
            raise
        finally:
            self._runner.execute_model_state = None
        self._stale = set()
        begin, begins_of, order_of = 0, {}, {}
        for order, name in enumerate(self._runner.input_batch.req_ids):
            begins_of[name], order_of[name] = begin, order
            begin += scheduled.num_scheduled_tokens[name]
        names = [place.name for place in places]
        return (
            state.hidden_states,
            state.logits,
            [begins_of[name] for name in names],
            [order_of[name] for name in names],
        )

    def _scheduled(self, rows: Sequence[Row], places: Sequence[Place], ended: set[str]) -> Any:
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

        new, cached = [], CachedRequestData.make_empty()
        for row, place in zip(rows, places, strict=True):
            if place.is_new:
                # Only tokens from `start` on are read.
                tokens = [*([0] * row.start), *row.tokens, *row.drafts]
                new.append(
                    NewRequestData(
                        req_id=place.name,
                        prompt_token_ids=tokens,
                        mm_features=[],
                        sampling_params=self._greedy,
                        pooling_params=None,
                        block_ids=(place.blocks,),
                        num_computed_tokens=row.start,
                        lora_request=self._adapters.request_of(row.adapter) if self._adapters else None,
                    )
                )
            else:
                cached.req_ids.append(place.name)
                cached.new_block_ids.append((place.blocks,) if place.blocks else None)
                cached.num_computed_tokens.append(row.start)
                cached.num_output_tokens.append(0)
        counts = {place.name: row.num_queries for row, place in zip(rows, places, strict=True)}
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=ended,
            free_encoder_mm_hashes=[],
        )

    def _write_tokens(self, rows: Sequence[Row], places: Sequence[Place]) -> None:
        """Of continued requests, into the runner's batch, where its own sampler would have put them."""
        batch = self._runner.input_batch
        for row, place in zip(rows, places, strict=True):
            if not place.is_new:
                index = batch.req_id_to_index[place.name]
                batch.token_ids_cpu[index, row.start : place.end] = [*row.tokens, *row.drafts]
                batch.num_tokens_no_spec[index] = place.end

    def _project(self, x_UE: Tensor) -> Tensor:
        return self._wide(self._runner.model.compute_logits(x_UE))

    def _take_part(self, x_UE: Tensor) -> Tensor:
        """Instead of `_project` on a rank that receives no logits."""
        self._runner.model.compute_logits(x_UE)
        return torch.zeros(len(x_UE), self.spec.vocab_size, device=x_UE.device)

    def _wide(self, logits_UV: Tensor) -> Tensor:
        """In float32, without padding of the vocabulary."""
        return logits_UV[:, : self.spec.vocab_size].float()


def _sampled_positions(rows: Sequence[Row], begins: Sequence[int]) -> list[int]:
    """Of a step with drafts: the positions whose logits are needed, in the order of the rows."""
    return [
        begin + len(row.tokens) - 1 + draft
        for row, begin in zip(rows, begins, strict=True)
        for draft in range(row.num_samples)
    ]
