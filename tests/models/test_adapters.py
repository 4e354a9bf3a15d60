"""LoRA adapters in vLLM, in float32, against transformers in float64 with each adapter merged into the weights,
position by position.

`python -m pytest tests/models/test_adapters.py -s -k 125m` prints the time of a load on the 125M shape.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.make_random_model import write_model
from pdserve import AsyncClient, Completion
from pdserve.core.adapters import AdapterLimits
from pdserve.core.errors import InternalError, ModelError
from pdserve.core.types import Sampling
from pdserve.engine.adapters import WEIGHTS, Adapter, read_adapter
from pdserve.engine.interface import AdapterEngine, Row
from tests.cluster.families import BUNDLED, prompts
from tests.cluster.suite import LENGTHS
from tests.models.adapters import LIMITS, AdaptedModel, linear_layers, make_adapted, make_adapter, merge
from tests.models.conftest import open_vllm, with_and_without_drafts
from tests.models.far_oracle import FarOracle
from tests.models.test_cluster import open_cluster
from tests.models.test_refused import spoilt
from tests.support.adapters import write_adapter
from tests.unit.engine.test_drafts import ASKED

SEEDED = Sampling(temperature=1.5, seed=3, max_tokens=24)  # the greedy texts of some tiny models repeat one token
SLOTS = 16
COUNT = 18  # more than slots

Tiny = Callable[[str], Path]
Serve = Callable[..., list[list[int]]]
MakePrompt = Callable[..., list[int]]


@pytest.fixture(
    scope="module", params=["llama", "qwen3", "gemma2", "smollm3"]
)  # the last by vLLM's transformers backend
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def adapted(name: str, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
    return make_adapted(tiny(name), tmp_path_factory.mktemp(name), COUNT)


@pytest.fixture(scope="module")
def opened(name: str, tiny: Tiny) -> Iterator[AdapterEngine]:
    engine = open_adapters(tiny(name))
    yield engine
    engine.close()


def open_adapters(folder: Path, **settings: Any) -> AdapterEngine:
    engine = open_vllm(folder, lora_folders=("/",), max_loras=SLOTS, max_lora_rank=8, **settings)
    assert isinstance(engine, AdapterEngine)
    return engine


@pytest.fixture
def engine(opened: AdapterEngine, adapted: AdaptedModel) -> Iterator[AdapterEngine]:
    """With all adapters. Every float in the pool is NaN."""
    opened.pool.buffer[:] = b"\xff" * len(opened.pool.buffer)
    for adapter in adapted.adapters:
        opened.load_adapter(adapter)
    yield opened
    for adapter in adapted.adapters:
        opened.unload_adapter(adapter.fingerprint)


def assert_exact(adapted: AdaptedModel, requests: Sequence[Any]) -> None:
    for name, oracle in zip(adapted.names, adapted.oracles, strict=True):
        mine = [one for one in requests if one.adapter == name]
        if mine:
            answers = [[out.token_id for out in one.outs] for one in mine]
            oracle.assert_exact([one.prompt for one in mine], answers, sampling=[one.sampling for one in mine])


@pytest.mark.parametrize("count", [SLOTS, COUNT])
def test_many_adapters_in_one_batch_match_merged_models(
    engine: AdapterEngine, adapted: AdaptedModel, serve: Serve, request_of: Any, make_prompt: MakePrompt, count: int
) -> None:
    """All of them beside two texts of the model alone, in chunks. Each reads the same prompt, so that another adapter
    would show."""
    names = [*adapted.names[: count + 1], ""]
    requests = [
        request_of(prompt=make_prompt(70), sampling=SEEDED, arrival=at // 4, adapter=name)
        for at, name in enumerate(names)
    ]
    got = serve(engine, requests, chunk=48)
    assert len({tuple(tokens) for tokens in got}) == count + 1, "every adapter answers in another way"
    assert_exact(adapted, requests)


def test_sampling_drafts_and_logprobs_match_merged_models(
    engine: AdapterEngine, adapted: AdaptedModel, serve: Serve, request_of: Any, make_prompt: MakePrompt
) -> None:
    def requests() -> list[Any]:
        asked = list(ASKED.values())
        return [
            request_of(prompt=make_prompt(length, seed=at), sampling=asked[at % 4], adapter=adapted.names[at])
            for at, length in enumerate((3, 33, 65, 130))
        ]

    for served in with_and_without_drafts(serve, engine, requests):
        assert_exact(adapted, served)
        for one, oracle in zip(served, adapted.oracles, strict=False):
            oracle.assert_logprobs(one.history[:-1], len(one.prompt) - 1, one.outs)


def test_scores_of_prompts_match_merged_models(
    engine: AdapterEngine, adapted: AdaptedModel, make_prompt: MakePrompt
) -> None:
    prompt = make_prompt(90)
    texts = list(zip(adapted.names, adapted.oracles, strict=True))[:3]
    scored: list[list[Any]] = [[] for _ in texts]
    for start, end in ((0, 40), (40, 90)):
        rows = [
            Row(
                tokens=prompt[start:end],
                start=start,
                blocks=[10 * at + place for place in range(6)],
                targets=prompt[start + 1 : end + 1],
                num_top=5,
                adapter=name,
            )
            for at, (name, _) in enumerate(texts)
        ]
        for found, out in zip(scored, engine.step(rows), strict=True):
            found += out.scored
    for found, (_, oracle) in zip(scored, texts, strict=True):
        assert [one.token_id for one in found] == prompt[1:]
        oracle.assert_logprobs(prompt[:-1], 0, found)


@dataclasses.dataclass
class Text:
    """A text that decodes, one row in each step."""

    prompt: list[int]
    adapter: str
    blocks: list[int]
    start: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)

    def row(self) -> Row:
        history = [*self.prompt, *self.tokens]
        return Row(
            tokens=history[self.start :],
            start=self.start,
            blocks=self.blocks,
            sample=SEEDED,
            history=history,
            prompt_len=len(self.prompt),
            adapter=self.adapter,
        )


def decode(engine: AdapterEngine, texts: Sequence[Text], count: int) -> None:
    for _ in range(count):
        for text, out in zip(texts, engine.step([text.row() for text in texts]), strict=True):
            text.start = len(text.prompt) + len(text.tokens)
            text.tokens.append(out.sampled[0].token_id)


def test_texts_of_one_adapter_share_blocks(
    engine: AdapterEngine, adapted: AdaptedModel, make_prompt: MakePrompt
) -> None:
    """The second text of each adapter finds the first two blocks of the first, while that one decodes."""
    size = engine.spec.block_size
    first = make_prompt(2 * size + 5)
    second = [*first[: 2 * size], *make_prompt(9, seed=1)]
    texts = [Text(first, name, [10 * at + place for place in range(4)]) for at, name in enumerate(adapted.names[:4])]
    decode(engine, texts, 2)
    texts += [
        Text(second, one.adapter, [*one.blocks[:2], one.blocks[0] + 5, one.blocks[0] + 6], 2 * size) for one in texts
    ]
    decode(engine, texts, 14)
    for one in texts:
        adapted.oracles[adapted.names.index(one.adapter)].assert_exact([one.prompt], [one.tokens], sampling=SEEDED)


def test_adapters_are_loaded_and_unloaded_while_others_decode(
    opened: AdapterEngine, adapted: AdaptedModel, make_prompt: MakePrompt
) -> None:
    """Also one that takes the name and the folder of another, and one that comes back."""
    first, second, third = adapted.adapters[:3]
    stays = [
        Text(make_prompt(40, seed=at), name, [4 * at, 4 * at + 1, 4 * at + 2])
        for at, name in enumerate(("", first.fingerprint))
    ]
    opened.load_adapter(first)
    decode(opened, stays, 3)
    blocks = [30, 31, 32]
    served = []
    for adapter in (second, dataclasses.replace(third, name=second.name), second):
        with pytest.raises(InternalError, match="is not loaded"):
            opened.step([Text(make_prompt(33), adapter.fingerprint, blocks).row()])
        opened.load_adapter(adapter)
        opened.load_adapter(adapter)
        comes = Text(make_prompt(33), adapter.fingerprint, blocks)
        decode(opened, [*stays, comes], 3)
        opened.unload_adapter(adapter.fingerprint)
        opened.unload_adapter(adapter.fingerprint)
        decode(opened, stays, 1)
        # Its KV is still valid, and its text goes on when it is back.
        opened.load_adapter(adapter)
        decode(opened, [comes, *stays], 3)
        opened.unload_adapter(adapter.fingerprint)
        served.append(comes)
    opened.unload_adapter(first.fingerprint)
    assert len({tuple(one.tokens) for one in served}) == 2
    for text in (*stays, *served):
        adapted.oracles[adapted.names.index(text.adapter)].assert_exact([text.prompt], [text.tokens], sampling=SEEDED)


# --- what does not depend on the model ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[AdapterEngine, AdaptedModel]]:
    """As a user opens it, except that it has few slots."""
    engine = open_vllm(
        tiny("llama"), cuda_graphs=True, lora_folders=("/",), max_loras=3, max_lora_rank=8, max_lora_adapters=6
    )
    assert isinstance(engine, AdapterEngine)
    yield engine, make_adapted(tiny("llama"), tmp_path_factory.mktemp("llama"), 8)
    engine.close()


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_random_sequences_of_load_use_and_unload_are_exact(
    llama: tuple[AdapterEngine, AdaptedModel], make_prompt: MakePrompt, count: int
) -> None:
    """At most six adapters are loaded, of which three have slots. Texts begin, decode and rest in between."""
    engine, adapted = llama
    rng = random.Random(count)
    loaded: dict[str, Adapter] = {}
    texts: list[Text] = []
    done: list[Text] = []
    free = [[3 * at, 3 * at + 1, 3 * at + 2] for at in range(60)]
    num_steps = {"load": 0, "unload": 0, "use": 0}
    while sum(num_steps.values()) < count:
        unused = [one for one in loaded.values() if all(text.adapter != one.fingerprint for text in texts)]
        kind = rng.choice(["load", "unload", "use", "use"])
        if kind == "load" and len(loaded) < 6:
            adapter = rng.choice([one for one in adapted.adapters if one.fingerprint not in loaded])
            engine.load_adapter(adapter)
            loaded[adapter.fingerprint] = adapter
        elif kind == "unload" and unused:
            adapter = rng.choice(unused)
            engine.unload_adapter(adapter.fingerprint)
            del loaded[adapter.fingerprint]
        else:
            kind = "use"
            while len(texts) < 10 and rng.random() < 0.5:
                prompt = make_prompt(rng.randrange(1, 60), seed=rng.randrange(10))
                texts.append(Text(prompt, rng.choice(["", *loaded]), free.pop()))
            chosen = [text for text in texts if rng.random() < 0.8]
            decode(engine, chosen, 1)
            for text in [one for one in texts if len(one.tokens) == 8]:
                texts.remove(text)
                done.append(text)
                free.append(text.blocks)
        num_steps[kind] += 1
    for fingerprint in loaded:
        engine.unload_adapter(fingerprint)
    done += [one for one in texts if one.tokens]
    assert min(num_steps.values()) > count // 20
    for name, oracle in zip(adapted.names, adapted.oracles, strict=True):
        mine = [one for one in done if one.adapter == name]
        if mine:
            oracle.assert_exact([one.prompt for one in mine], [one.tokens for one in mine], sampling=SEEDED)
    assert len({one.adapter for one in done}) > 3


def test_an_adapter_that_does_not_fit_is_rejected_and_changes_nothing(
    llama: tuple[AdapterEngine, AdaptedModel], tiny: Tiny, tmp_path: Path, make_prompt: MakePrompt
) -> None:
    engine, adapted = llama
    engine.load_adapter(adapted.adapters[0])
    layers = linear_layers(tiny("llama"))
    query = "model.layers.0.self_attn.q_proj"
    wrong = {
        "model.layers.3.self_attn.q_proj": {"model.layers.3.self_attn.q_proj": layers[query]},
        "model.layers.0.self_attn.qkv_proj": {"model.layers.0.self_attn.qkv_proj": (128, 256)},
        "model.norm": {"model.norm": (128, 128)},
        "model.layers.0.mlp": {"model.layers.0.mlp": (128, 128)},
        "127 inputs": {query: (127, 128)},
        "129 outputs": {query: (128, 129)},
    }
    for at, (problem, modules) in enumerate(wrong.items()):
        adapter = read_adapter("wrong", write_adapter(tmp_path / str(at), layers | modules), LIMITS)
        with pytest.raises(ModelError, match=problem):
            engine.load_adapter(adapter)
    for value in (float("nan"), float("inf")):
        folder = write_adapter(tmp_path / str(value), layers)
        tensors = load_file(folder / WEIGHTS)
        tensors[f"base_model.model.{query}.lora_B.weight"][0, 0] = value
        save_file(tensors, folder / WEIGHTS)
        with pytest.raises(ModelError, match="finite weights"):
            engine.load_adapter(read_adapter("wrong", folder, LIMITS))
    large = read_adapter("wrong", write_adapter(tmp_path / "large", layers, rank=9), LIMITS)
    with pytest.raises(ModelError, match="max_lora_rank"):
        engine.load_adapter(large)
    others = [make_adapter(tiny("llama"), tmp_path / f"other-{seed}", seed) for seed in range(20, 26)]
    for other in others[:5]:
        engine.load_adapter(other)
    with pytest.raises(ModelError, match="at most max_lora_adapters, 6"):
        engine.load_adapter(others[5])
    for other in others[:5]:
        engine.unload_adapter(other.fingerprint)
    text = Text(make_prompt(20), adapted.names[1], [0])
    decode(engine, [text], 8)
    adapted.oracles[1].assert_exact([text.prompt], [text.tokens], sampling=SEEDED)
    engine.unload_adapter(adapted.names[1])


def test_an_adapter_in_bfloat16_is_read_exactly(
    llama: tuple[AdapterEngine, AdaptedModel], tiny: Tiny, tmp_path: Path, make_prompt: MakePrompt
) -> None:
    engine, _ = llama
    folder = write_adapter(tmp_path / "stored", linear_layers(tiny("llama")), rank=4, scale=0.2)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file({name: tensor.float() for name, tensor in tensors.items()}, folder / WEIGHTS)
    merged = merge(tiny("llama"), read_adapter("wide", folder, LIMITS), tmp_path / "merged")
    save_file(tensors, folder / WEIGHTS)
    adapter = read_adapter("narrow", folder, LIMITS)
    engine.load_adapter(adapter)
    text = Text(make_prompt(30), adapter.fingerprint, [0, 1])
    decode(engine, [text], 16)
    FarOracle(merged).assert_exact([text.prompt], [text.tokens], sampling=SEEDED)
    engine.unload_adapter(adapter.fingerprint)


@pytest.mark.parametrize(
    ("name", "problem"), [("gpt2", "vLLM computes LoRA adapters"), ("qwen3-moe", "mixture of experts")]
)
def test_a_model_without_adapters_in_vllm_is_refused_before_its_weights(
    name: str, problem: str, tiny: Tiny, tmp_path: Path
) -> None:
    for file in tiny(name).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(spoilt(tmp_path))
    with pytest.raises(ModelError, match=problem) as caught:
        open_vllm(tmp_path, lora_folders=("/",))
    assert caught.value.field == "architectures"


def test_without_the_settings_no_layer_takes_adapters(tiny: Tiny, tmp_path: Path) -> None:
    engine = open_vllm(tiny("llama"))
    kinds = {type(module).__name__ for module in engine._runner.model.modules()}  # type: ignore[attr-defined]
    assert not [kind for kind in kinds if "LoRA" in kind]
    with pytest.raises(ModelError, match="a worker that was started with lora or lora_folders"):
        engine.load_adapter(make_adapter(tiny("llama"), tmp_path, 0))  # type: ignore[attr-defined]
    engine.close()


def test_adapters_of_the_125m_shape_are_loaded_while_serving(tmp_path: Path) -> None:
    """Prints the time from the check of the folder to the end of the first step. Rank 64 on all linear layers."""
    write_model(tmp_path / "model", "125m", torch.float32, 0)
    limits = AdapterLimits(rank=64, num_bytes=2**30)
    folders = [
        write_adapter(tmp_path / f"adapter-{seed}", linear_layers(tmp_path / "model"), rank=64, seed=seed)
        for seed in range(3)
    ]
    engine = open_vllm(tmp_path / "model", lora_folders=("/",), max_loras=4, threads=2)
    assert isinstance(engine, AdapterEngine)
    took_s = []
    for at, folder in enumerate(folders):
        began_s = time.perf_counter()
        adapter = read_adapter("hot", folder, limits)
        engine.load_adapter(adapter)
        [out] = engine.step([Text([5], adapter.fingerprint, [at]).row()])
        assert len(out.sampled) == 1
        took_s.append(time.perf_counter() - began_s)
    engine.close()
    megabytes = adapter.num_bytes / 1e6
    print(f"\nload of an adapter of {megabytes:.0f} MB: {', '.join(f'{one:.3f}' for one in took_s)} s")


# --- a cluster ------------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
def test_a_cluster_serves_adapters_exactly(tmp_path: Path) -> None:
    """Prefill, transfer, decode and prefix hits of three models at a time: one adapter is loaded at the start, the
    other while serving and then replaced. Last, the prefill worker is killed."""
    adapters = [make_adapter(BUNDLED, tmp_path / f"adapter-{seed}", seed) for seed in range(3)]
    oracles = [FarOracle(merge(BUNDLED, one, tmp_path / f"merged-{at}")) for at, one in enumerate(adapters)]
    base, (first, second, third) = FarOracle(BUNDLED), oracles
    flags = ("--decode", "1", "--lora", f"first={adapters[0].folder}", "--lora-folders", str(tmp_path))
    with open_cluster(tmp_path, BUNDLED, *flags) as cluster:

        def check(expected: dict[str | None, FarOracle]) -> list[Completion]:
            texts = prompts(LENGTHS)
            asked = [(text, name) for text in texts for name in expected]

            async def run() -> list[Completion]:
                async with AsyncClient(cluster.target) as client:
                    return await asyncio.gather(
                        *(
                            client.generate(text, model=name, max_tokens=16, temperature=0, ignore_eos=True)
                            for text, name in asked
                        )
                    )

            done = asyncio.run(run())
            for name, oracle in expected.items():
                answers = [list(one.token_ids) for one, (_, of) in zip(done, asked, strict=True) if of == name]
                assert all(len(answer) == 16 for answer in answers)
                oracle.assert_exact(texts, answers)
            return done

        assert {one.timings.path for one in check({None: base, "first": first})} == {"remote", "local"}
        cluster.client.load_adapter("other", str(adapters[1].folder))
        check({None: base, "first": first, "other": second})
        cluster.client.load_adapter("other", str(adapters[2].folder))
        again = check({None: base, "first": first, "other": third})
        assert sum(one.usage.cached_prompt_tokens for one in again) > 0
        cluster.kill("p0")
        check({"first": first, "other": third, None: base})
        cluster.wait_until_idle(within_s=300)
