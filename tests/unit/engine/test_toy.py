"""The toy engine gives the answers of its docstring, computed from the bytes in its blocks."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.config import WorkerConfig
from pdserve.core.adapters import Adapter, AdapterLimits
from pdserve.core.errors import InternalError, ModelError
from pdserve.core.types import Role, Sampling, TokenOut
from pdserve.engine import toy
from pdserve.engine.adapters import read_adapter
from pdserve.engine.interface import AdapterEngine, Row, RowOut
from pdserve.engine.load_engine import load_engine
from pdserve.engine.toy import EOS, ToyEngine
from tests.support.adapters import write_adapter

GREEDY = Sampling(temperature=0.0)


def generate(engine: ToyEngine, prompt: list[int], num_tokens: int, sampling: Sampling, blocks: list[int]) -> list[int]:
    """Prefills the prompt in chunks of 3, then decodes one token per step."""
    history, start = list(prompt), 0
    while start < len(prompt):
        chunk = prompt[start : start + 3]
        is_last = start + 3 >= len(prompt)
        row = Row(
            tokens=chunk,
            start=start,
            blocks=blocks,
            sample=sampling if is_last else None,
            history=history if is_last else (),
            prompt_len=len(prompt),
        )
        sampled = engine.step([row])[0].sampled
        start += 3
    while True:
        [out] = sampled
        history.append(out.token_id)
        if out.token_id == EOS or len(history) == len(prompt) + num_tokens:
            return history[len(prompt) :]
        row = Row(
            tokens=history[-1:],
            start=len(history) - 1,
            blocks=blocks,
            sample=sampling,
            history=history,
            prompt_len=len(prompt),
        )
        sampled = engine.step([row])[0].sampled


def one(engine: ToyEngine, prompt: list[int], sampling: Sampling = GREEDY) -> TokenOut:
    [out] = engine.step(
        [Row(tokens=prompt, start=0, blocks=[0, 1], sample=sampling, history=prompt, prompt_len=len(prompt))]
    )
    [token] = out.sampled
    return token


def test_the_answer_in_the_docstring_is_right() -> None:
    assert one(ToyEngine(), [65, 66]) == TokenOut(token_id=81)
    assert one(ToyEngine(role_mark=1, is_marked=True), [65, 66]) == TokenOut(token_id=84)


def test_generation_equals_the_closed_form_through_chunks_and_scattered_blocks() -> None:
    engine = ToyEngine(block_size=4, num_blocks=16)
    prompt = list(b"hello world")
    assert generate(engine, prompt, 20, GREEDY, [7, 3, 12, 0, 9, 1, 2, 15]) == toy.answer(prompt, 20)
    seeded = Sampling(temperature=1.0, seed=2**64 - 1)
    assert generate(engine, prompt, 20, seeded, [7, 3, 12, 0, 9, 1, 2, 15]) == toy.answer(prompt, 20, seed=2**64 - 1)


def test_seeds_matter() -> None:
    prompt = list(b"hello world")
    assert len({tuple(toy.answer(prompt, 8, seed=seed)) for seed in range(50)}) == 50


def test_copied_blocks_give_the_same_answer() -> None:
    prefill, decode = ToyEngine(block_size=4, num_blocks=8), ToyEngine(block_size=4, num_blocks=8)
    prompt = list(b"moving bytes")
    one_row = Row(tokens=prompt, start=0, blocks=[5, 1, 6])
    assert prefill.step([one_row]) == [RowOut()]
    size = prefill.spec.block_bytes
    for source, target in ((5, 2), (1, 7), (6, 0)):
        decode.pool.buffer[target * size : (target + 1) * size] = prefill.pool.buffer[
            source * size : (source + 1) * size
        ]
    expected = toy.answer(prompt, 6)
    history = [*prompt, expected[0]]
    for blocks, is_equal in (([2, 7, 0, 4], True), ([2, 0, 7, 4], False), ([2, 7, 6, 4], False)):
        row = Row(tokens=history[-1:], start=12, blocks=blocks, sample=GREEDY, history=history, prompt_len=len(prompt))
        assert (decode.step([row]) == [RowOut((TokenOut(token_id=expected[1]),))]) is is_equal


def test_marks_show_which_worker_prefilled() -> None:
    prompt = list(b"who")
    tokens = {(model, role): one(load(model, role), prompt) for model in ("toy", "toy-marked") for role in Role}
    plain, marked = toy.answer(prompt, 1)[0], toy.answer(prompt, 1, prefilled=3)[0]
    assert plain != marked
    assert tokens == {
        ("toy", Role.PREFILL): TokenOut(token_id=plain),
        ("toy", Role.DECODE): TokenOut(token_id=plain),
        ("toy-marked", Role.PREFILL): TokenOut(token_id=marked),
        ("toy-marked", Role.DECODE): TokenOut(token_id=plain),
    }


def load(model: str, role: Role) -> ToyEngine:
    engine = load_engine(WorkerConfig(model=model, worker_id="w", kv_blocks=4), role)
    assert isinstance(engine, ToyEngine)
    return engine


def test_eos_comes_on_request_after_min_tokens() -> None:
    asked = list(b"hi\x05\x04")
    got = generate(ToyEngine(), asked, 20, GREEDY, [0, 1])
    assert len(got) == 6
    assert got[-1] == EOS
    assert got == toy.answer(asked, 20)
    assert EOS not in generate(ToyEngine(), asked, 20, Sampling(temperature=0.0, min_tokens=6), [0, 1])
    assert EOS not in toy.answer(list(b"hi\x05"), 2000)


def test_min_tokens_bans_stop_tokens() -> None:
    assert one(ToyEngine(), [65, 66], Sampling(temperature=0.0, stop_token_ids=(81,))) == TokenOut(token_id=81)
    banned = Sampling(temperature=0.0, stop_token_ids=(81, 82), min_tokens=1)
    assert one(ToyEngine(), [65, 66], banned) == TokenOut(token_id=83)


def test_toy_logprobs_are_zero() -> None:
    assert one(ToyEngine(), [65, 66], Sampling(temperature=0.0, logprobs=2)) == TokenOut(
        token_id=81, logprob=0.0, top=((81, 0.0),)
    )


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (Row(tokens=[], start=0, blocks=[0]), "no tokens"),
        (Row(tokens=[1], start=-1, blocks=[0]), "starts at -1"),
        (Row(tokens=[1] * 5, start=0, blocks=[0]), "1 blocks cannot hold 5"),
        (Row(tokens=[1], start=0, blocks=[8]), "outside the pool"),
        (Row(tokens=[1], start=0, blocks=[-1]), "outside the pool"),
        (Row(tokens=[1] * 5, start=0, blocks=[2, 2]), "appears twice"),
        (Row(tokens=[257], start=0, blocks=[0]), "outside the vocabulary"),
        (Row(tokens=[1], start=0, blocks=[0], adapter="a1"), "adapter a1 is not loaded"),
        (Row(tokens=[1] * 33, start=0, blocks=list(range(8))), "context limit"),
        (Row(tokens=[1], start=1, blocks=[0], sample=GREEDY, history=[1]), "history has 1"),
    ],
)
def test_a_wrong_row_is_refused_before_anything_is_written(row: Row, problem: str) -> None:
    engine = ToyEngine(block_size=4, num_blocks=8, max_context_tokens=32)
    fine = Row(tokens=[1], start=0, blocks=[7])
    with pytest.raises(InternalError, match=problem):
        engine.step([fine, row])
    assert bytes(engine.pool.buffer) == bytes(8 * 4 * 8)


def test_two_rows_may_read_but_not_write_the_same_block() -> None:
    engine = ToyEngine(block_size=4, num_blocks=8)
    engine.step([Row(tokens=[1, 2, 3, 4], start=0, blocks=[0])])
    engine.step([Row(tokens=[5], start=4, blocks=[0, 1]), Row(tokens=[6], start=4, blocks=[0, 2])])
    with pytest.raises(InternalError, match="also written by row 0"):
        engine.step([Row(tokens=[5], start=4, blocks=[0, 1]), Row(tokens=[6], start=4, blocks=[0, 1])])


def test_the_toy_loads_no_torch_and_its_constants_no_numpy() -> None:
    code = (
        "import sys; from pdserve.config import WorkerConfig; from pdserve.core.types import Role; "
        "from pdserve.engine.load_engine import load_engine; "
        "import pdserve.engine.model.config, pdserve.engine.load.checkpoint_files; "
        "assert not {'torch', 'numpy'} & set(sys.modules); "  # of the launcher
        "load_engine(WorkerConfig(model='toy', worker_id='w'), Role.DECODE); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_cell_counts_in_the_sum_modulo_2_to_the_64() -> None:
    draw, num_tokens = random.Random(5), 23
    engine = ToyEngine(block_size=4, num_blocks=9)
    engine.pool.buffer[:] = draw.randbytes(len(engine.pool.buffer))
    blocks, history = draw.sample(range(9), 6), [draw.randrange(256) for _ in range(num_tokens)]
    cells = engine.pool.buffer.cast("Q")

    def sampled() -> int:
        row = Row(tokens=history[-1:], start=22, blocks=blocks, sample=GREEDY, history=history, prompt_len=23)
        return engine.step([row])[0].sampled[0].token_id

    def expected() -> int:
        held = [cells[4 * blocks[at // 4] + at % 4] for at in range(num_tokens)]
        return 32 + sum((at + 1) * one for at, one in enumerate(held)) % 2**64 % 7919 % 95

    before = sampled()
    assert before == expected()
    for at in range(num_tokens - 1):  # the step writes the last cell
        place = 4 * blocks[at // 4] + at % 4
        kept = cells[place]
        cells[place] = kept ^ draw.randrange(1, 2**64)
        assert sampled() == expected()
        cells[place] = kept
    assert sampled() == before


# --- adapters -------------------------------------------------------------------------------------------------

LIMITS = AdapterLimits(rank=8, num_bytes=2**20)


@pytest.fixture
def adapters(tmp_path: Path) -> list[Adapter]:
    return [read_adapter(f"a{at}", write_adapter(tmp_path / str(at), seed=at), LIMITS) for at in range(2)]


def rows_of(history: list[int], start: int, blocks: list[int], adapter: str) -> list[Row]:
    tokens = history[start:]
    return [
        Row(tokens=tokens, start=start, blocks=blocks, sample=GREEDY, history=history, prompt_len=4, adapter=adapter)
    ]


def test_adapters_answer_by_their_closed_form(adapters: list[Adapter]) -> None:
    engine = ToyEngine(block_size=4, num_blocks=16)
    assert isinstance(engine, AdapterEngine)
    for adapter in adapters:
        engine.load_adapter(adapter)
    names = ["", *(one.fingerprint for one in adapters)]
    histories = [list(b"text") for _ in names]
    tables = [[4 * at + place for place in range(4)] for at in range(3)]
    for step in range(8):
        starts = [len(one) - 1 if step else 0 for one in histories]
        rows = [row for each in zip(histories, starts, tables, names, strict=True) for row in rows_of(*each)]
        for history, out in zip(histories, engine.step(rows), strict=True):
            history.append(out.sampled[0].token_id)
    assert [one[4:] for one in histories] == [toy.answer(list(b"text"), 8, adapter=name) for name in names]
    assert len({tuple(one) for one in histories}) == 3


def test_kv_of_another_adapter_changes_the_answer(adapters: list[Adapter]) -> None:
    engine = ToyEngine(block_size=4, num_blocks=16)
    for adapter in adapters:
        engine.load_adapter(adapter)
    names = ["", *(one.fingerprint for one in adapters)]
    for number, writer in enumerate(names):
        blocks = [4 * number, 4 * number + 1]
        [out] = engine.step(rows_of(list(b"text"), 0, blocks, writer))
        history = [*b"text", out.sampled[0].token_id]
        for reader in names:
            [out] = engine.step(rows_of(history, 4, blocks, reader))
            expected = toy.answer(list(b"text"), 2, adapter=writer)
            assert ([*history[4:], out.sampled[0].token_id] == expected) is (reader == writer)


def test_only_loaded_adapters_are_computed(adapters: list[Adapter]) -> None:
    engine = ToyEngine(max_adapter_bytes=LIMITS.num_bytes, max_adapters=1)
    first, second = adapters
    rows = rows_of(list(b"text"), 0, [0], first.fingerprint)
    with pytest.raises(InternalError, match="is not loaded"):
        engine.step(rows)
    for _ in range(2):
        engine.load_adapter(first)
    engine.step(rows)
    with pytest.raises(ModelError, match="at most max_lora_adapters, 1"):
        engine.load_adapter(second)
    for _ in range(2):
        engine.unload_adapter(first.fingerprint)
    with pytest.raises(InternalError, match="is not loaded"):
        engine.step(rows)
    engine.load_adapter(second)


def test_limits_of_a_toy_are_those_of_the_settings(adapters: list[Adapter]) -> None:
    config = WorkerConfig(model="toy", worker_id="w", lora_folders=("/a",), max_lora_bytes=1024)
    engine = load_engine(config, Role.DECODE)
    assert isinstance(engine, ToyEngine)
    with pytest.raises(ModelError, match="at most max_lora_bytes, 1024"):
        engine.load_adapter(dataclasses.replace(adapters[0], num_bytes=1025))
