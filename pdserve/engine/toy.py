"""An engine in integer arithmetic whose answers can be computed by hand. No torch.

It is for tests and benchmarks of everything around the model. Its KV is real bytes: a block that is missing,
stale, misplaced or overwritten changes the answer, as it would with a transformer.

A token at a position (both from 0) writes one cell, an unsigned 64-bit integer, into its block:

    cell = (token + 1) * (position + 1) + mark + shift      mark: MARKS[role] on `toy-marked`, else 0
                                                            shift: of the row's adapter, and 4099 on `toy-other`

The token sampled after n positions is a printable ASCII character, from the cells that lie in the blocks:

    total = (1 * cells[0] + 2 * cells[1] + ... + n * cells[n-1]) mod 2^64
    token = 32 + (total + noise + shift) mod 7919 mod 95

    noise = 0 when greedy, else splitmix64(seed + n) mod 7919
    shift = 1 + fingerprint mod 7918, of a LoRA adapter; and 4099 on `toy-other`, which stands for other weights

So the prompt [65, 66] gives greedily 32 + (1 * 66 + 2 * 134) mod 7919 mod 95 = 32 + 334 mod 95 = 81 ("Q"). On
`toy-marked` it gives 84 ("T") if a prefill worker computes the prompt, and still 81 if the decode worker does.
Positions enter twice, so that stale cells and swapped blocks change the result. So do the KV and the computation
of another adapter. The sum exceeds the prime 7919 often,
so a wrong cell soon changes the text.

The end of sequence (256) is sampled by one rule only. A prompt that ends with the byte 4 (EOT) requests it: the byte
before the EOT is the number of output tokens that come first, 0 if there is none. The text b"hi\\x05\\x04" yields five
characters and then the end of sequence.

A `Mock` stands in for another model: it has that model's vocabulary, and draws from its `answers` instead of the
printable characters. It never samples the end of sequence, so that an answer has as many tokens as its request allows.

With min_tokens a banned token (end of sequence, stop token ids) is replaced by the next one; " " follows "~". Of
the other sampling settings temperature only switches the noise on; the rest has no effect. Logprobs are those of a
distribution with one outcome: 0.0.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from pdserve.core.adapters import Adapter
from pdserve.core.kv.kv_shape import TOY_LAYOUT
from pdserve.core.types import Role, Sampling, TokenOut
from pdserve.engine.adapters import LoadedAdapters
from pdserve.engine.interface import EngineSpec, OnLayer, Row, RowOut, kept
from pdserve.engine.memory.host import HostMemory
from pdserve.engine.rows import check_rows
from pdserve.model_source import TOY, TOY_OTHER

EOS: Final = 256
EOT: Final = 4
VOCAB_SIZE: Final = 257
NUM_ANSWERS: Final = 95  # up to "~"; few characters, so that text repeats itself
CELL_BYTES: Final = 8
MARKS: Final = {Role.PREFILL: 1, Role.DECODE: 0}
SHIFTS: Final = {TOY_OTHER: 4099}  # by model


_SUM_MODULUS: Final = 7919
_FIRST: Final = 32  # space
_MASK: Final = 2**64 - 1


@final
class ToyPool:
    """All cells in one run of bytes."""

    is_on_host = True
    runs_per_block = 1

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._memory = HostMemory(num_blocks * block_bytes)
        self.buffer, self.descriptor = self._memory.buffer, self._memory.descriptor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Mock:
    """Facts of the model that the toy stands in for."""

    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    answers: tuple[int, ...]  # token ids


@final
class ToyEngine:
    """Answers as the module's docstring describes. Each step takes at least `step_s`, and `token_s` more for each token
    that it computes."""

    def __init__(
        self,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        max_context_tokens: int = 8192,
        role_mark: int = 0,
        is_marked: bool = False,
        is_other: bool = False,
        step_s: float = 0.0,
        token_s: float = 0.0,
        num_answers: int = NUM_ANSWERS,
        mock: Mock | None = None,
        max_adapter_bytes: int = 2**30,
        max_adapters: int = 64,
    ) -> None:
        name = "toy-marked" if is_marked else TOY_OTHER if is_other else TOY
        self._shift = SHIFTS.get(name, 0)
        self.spec = EngineSpec(
            model=name if mock is None else mock.name,
            weights_hash=f"{name}.v1" if mock is None else f"{name}.v1 {hash_of(mock)}",
            dtype="uint64",
            layout=TOY_LAYOUT,
            vocab_size=VOCAB_SIZE if mock is None else mock.vocab_size,
            max_context_tokens=max_context_tokens,
            eos_token_ids=(EOS,) if mock is None else mock.eos_token_ids,
            block_size=block_size,
            num_blocks=num_blocks,
            block_bytes=CELL_BYTES * block_size,
            kv_dtype="uint64",
            kv_layers=1,
            kv_heads=1,
            kv_head_dim=1,
        )
        self.pool = ToyPool(num_blocks, self.spec.block_bytes)
        # Imported here, because the launcher reads this file's constants and needs no numpy. Workers load it anyway.
        import numpy as np

        self._np = np
        self._cells = np.frombuffer(self.pool.buffer, np.uint64).reshape(num_blocks, block_size)
        self._role_mark = role_mark
        self._step_s, self._token_s = step_s, token_s
        self._answers: Sequence[int] = range(_FIRST, _FIRST + num_answers) if mock is None else mock.answers
        self._has_ends = mock is None
        self._adapters = LoadedAdapters(max_adapter_bytes, max_adapters)

    def step(self, rows: Sequence[Row], on_layer: OnLayer | None = None) -> list[RowOut]:
        check_rows(self.spec, rows, adapters=self._adapters)
        step_s = self._step_s + self._token_s * sum(row.num_queries for row in rows)
        if step_s > 0.0:
            time.sleep(step_s)
        for row in rows:
            self._write(row)
        if on_layer is not None:
            on_layer(self.spec.num_layers)
        return [self._out(row) for row in rows]

    def load_adapter(self, adapter: Adapter) -> None:
        """Any adapter fits."""
        if adapter.fingerprint not in self._adapters:
            self._adapters.check_room(adapter)
            self._adapters.add(adapter)

    def unload_adapter(self, fingerprint: str) -> None:
        self._adapters.remove(fingerprint)

    def close(self) -> None:
        """Nothing to free: the pool ends with its last reader."""

    def _write(self, row: Row) -> None:
        np, block_size = self._np, self.spec.block_size
        mark = self._role_mark + self._shift + shift_of(row.adapter)
        tokens = (*row.tokens, *row.drafts) if row.drafts else row.tokens
        if len(tokens) == 1:  # without the price of arrays
            block, offset = divmod(row.start, block_size)
            self._cells[row.blocks[block], offset] = cell(tokens[0], row.start, mark)
            return
        positions = np.arange(row.start, row.start + len(tokens), dtype=np.uint64)
        indices, offsets = np.divmod(positions, np.uint64(block_size))
        blocks = np.array(row.blocks, np.int64)[indices]
        cells = (np.array(tokens, np.uint64) + np.uint64(1)) * (positions + np.uint64(1)) + np.uint64(mark)
        self._cells[blocks, offsets] = cells

    def _out(self, row: Row) -> RowOut:
        if row.sample is not None and row.sample.grammar is not None:
            return RowOut(failed=f"{row.sample.grammar.field}: the engine toy cannot follow a grammar")
        return RowOut(kept(self._draws(row), row.drafts), self._scored(row))

    def _scored(self, row: Row) -> tuple[TokenOut, ...]:
        tops = [((token, 0.0),) if row.num_top else () for token in row.targets]
        return tuple(
            TokenOut(token_id=token, logprob=0.0, top=top, rank=1) for token, top in zip(row.targets, tops, strict=True)
        )

    def _draws(self, row: Row) -> list[TokenOut]:
        """The row's sampled token, and one after each of its drafts, as if that draft and the previous ones were
        accepted."""
        if row.sample is None:
            return []
        known = len(row.history)
        return [self._draw(row, row.sample, end) for end in range(known, known + len(row.drafts) + 1)]

    def _draw(self, row: Row, sampling: Sampling, end: int) -> TokenOut:
        """The token after `end` positions."""
        total = self._sum(row.blocks, end) + self._shift + shift_of(row.adapter)
        if not sampling.is_greedy:
            total += noise(sampling.seed, end)
        index, answers = total % _SUM_MODULUS, self._answers
        token = answers[index % len(answers)]
        num_output = end - row.prompt_len
        if num_output < sampling.min_tokens:
            banned = sampling.stop_token_ids
            allowed = (answers[(index + more) % len(answers)] for more in range(len(answers)))
            token = next((one for one in allowed if one not in banned), token)
        elif self._has_ends and _ends_here(row.history, row.prompt_len, num_output):
            token = EOS
        if sampling.logprobs is None:
            return TokenOut(token_id=token)
        return TokenOut(token_id=token, logprob=0.0, top=((token, 0.0),) if sampling.logprobs else ())

    def _sum(self, blocks: Sequence[int], num_tokens: int) -> int:
        """Reads every cell anew."""
        np = self._np
        used = np.array(blocks[: -(-num_tokens // self.spec.block_size)], np.int64)
        cells = self._cells[used].reshape(-1)[:num_tokens]
        return int(cells @ np.arange(1, num_tokens + 1, dtype=np.uint64))


def hash_of(mock: Mock) -> str:
    return hashlib.sha256(repr(mock).encode()).hexdigest()


def cell(token: int, position: int, mark: int = 0) -> int:
    return (token + 1) * (position + 1) + mark


def shift_of(adapter: str) -> int:
    """`adapter` is its fingerprint; empty: the model alone."""
    return 1 + int(adapter, 16) % (_SUM_MODULUS - 1) if adapter else 0


def noise(seed: int, position: int) -> int:
    """splitmix64 (Steele, Lea, Flood 2014) of seed + position, reduced."""
    mixed = (seed + position + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) % _SUM_MODULUS


def answer(
    prompt: Sequence[int],
    num_tokens: int,
    *,
    seed: int | None = None,
    prefilled: int = 0,
    num_answers: int = NUM_ANSWERS,
    adapter: str = "",
    model: str = TOY,
) -> list[int]:
    """The `num_tokens` tokens that follow `prompt` (fewer if the end of sequence comes), for tests.

    `seed` None is greedy. `prefilled` is how many leading cells a prefill worker wrote on `toy-marked`.
    `adapter`: the fingerprint of the request's LoRA adapter.
    """
    tokens, shift = list(prompt), SHIFTS.get(model, 0) + shift_of(adapter)
    total = sum(
        (position + 1) * cell(token, position, shift + int(position < prefilled))
        for position, token in enumerate(tokens)
    )
    while len(tokens) < len(prompt) + num_tokens:
        sampled = shift + (total & _MASK) + (0 if seed is None else noise(seed, len(tokens)))
        token = _FIRST + sampled % _SUM_MODULUS % num_answers
        if _ends_here(tokens, len(prompt), len(tokens) - len(prompt)):
            token = EOS
        total += (len(tokens) + 1) * cell(token, len(tokens), shift)
        tokens.append(token)
        if token == EOS:
            break
    return tokens[len(prompt) :]


def _ends_here(history: Sequence[int], prompt_len: int, num_output: int) -> bool:
    if prompt_len == 0 or history[prompt_len - 1] != EOT:
        return False
    return num_output == (history[prompt_len - 2] if prompt_len >= 2 else 0)
