"""Capturing a decode graph does nothing that is forbidden during a capture."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.floor import LLAMA_8B, decode_floor
from pdserve.config import WorkerConfig
from pdserve.core.types import Role, Sampling, TokenOut
from pdserve.engine.gpu.kernels.fixed_shapes import buckets_for, verified_tokens
from pdserve.engine.gpu.resample import forbid_tokens
from pdserve.engine.load.build_engine import open_rank, open_torch_engine
from pdserve.engine.load.gpu_engine import measure_graphs, with_graphs
from pdserve.engine.memory.plan import with_device_defaults
from pdserve.engine.model.collectives import Ranks
from pdserve.engine.model.parameters import Shard
from tests.gpu.extra_sampling import AHEAD, BOUND, MOST_QUERIES, EveryThird, Text, launch, take
from tests.gpu.strict_capture import Captures, ForbiddenInCapture, strict_capture

pytestmark = pytest.mark.gpu_checks

MAX_ROWS = 2
SWITCHES = pytest.mark.parametrize("switches", ["", "merge=fused,pdl=on,products=split-k"])


def config(folder: Path, **settings: Any) -> WorkerConfig:
    return WorkerConfig(
        model=str(folder), worker_id="w", device="cuda", load="dummy", kv_blocks=64, threads=1, **settings
    )


class Growing:
    """A Meter whose every reading is one byte larger."""

    def __init__(self) -> None:
        self.num_looks = 0

    def settle(self) -> None: ...

    def reserved(self) -> int:
        self.num_looks += 1
        return self.num_looks


@SWITCHES
@pytest.mark.parametrize(("name", "kv_dtype", "most_drafts"), [("llama", "auto", 3), ("gemma2", "int8", 0)])
def test_decode_graphs_are_captured(
    name: str,
    kv_dtype: str,
    most_drafts: int,
    switches: str,
    tiny: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PDSERVE_GPU", switches)
    folder = tiny(name)
    with strict_capture() as captures:
        eager = open_torch_engine(config(folder, kv_dtype=kv_dtype))
        meter = Growing()
        sets = [MAX_ROWS] + ([verified_tokens(MAX_ROWS, 4)] if most_drafts else [])
        num_graphs = sum(len(buckets_for(most)) for most in sets)
        taken = measure_graphs(eager, meter, most_rows=MAX_ROWS, most_drafts=most_drafts)  # type: ignore[arg-type]
        assert captures.num_graphs == 2 * len(sets)
        assert taken == num_graphs + 2 * sets[-1] * 384 * 4  # A byte for each capture, and the counts for penalties.
        captures.num_graphs = 0
        with_graphs(eager, MAX_ROWS, "w", most_drafts)
        assert captures.num_graphs == num_graphs


def test_a_step_launches_only_counted_kernels(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel between the products is counted in benchmarks/gpu/floor.py."""
    folder = tiny("llama")
    with strict_capture() as captures:
        eager = open_torch_engine(config(folder, dtype="bfloat16"))
        with_graphs(eager, 1, "w")
        assert captures.num_graphs == 1
    shape = dataclasses.replace(LLAMA_8B, num_layers=2)
    assert len(captures.launched) == decode_floor(shape, 1, 64).num_kernels, Counter(captures.launched)


def test_no_launch_waits_for_the_device(tiny: Callable[[str], Path]) -> None:
    """Neither a graph's, nor the additional work of rows with sampling options or drafts."""
    folder = tiny("llama")
    kinds = [{"temperature": 0.0, "max_tokens": 64, **kind} for kind in (*AHEAD, *BOUND)]

    @contextmanager
    def quiet() -> Iterator[None]:
        captures.cuda.set_sync_debug_mode("error")
        yield
        captures.cuda.set_sync_debug_mode("default")

    def texts_of() -> list[Text]:
        texts = [Text(number, Sampling(**kind)) for number, kind in enumerate(kinds)]
        for text in texts:
            text.take([TokenOut(token_id=5, logprob=None)])
        return texts

    with strict_capture() as captures:
        eager = open_torch_engine(config(folder))
        eager.grammars = EveryThird(eager.spec.vocab_size)  # type: ignore[assignment]
        graph = with_graphs(eager, len(kinds), "w", most_drafts=MOST_QUERIES - 1)
        captures.cuda.launches.clear()
        texts, flight = texts_of(), None
        for _ in range(3):
            before = flight
            rows = [text.row(follows=None if before is None else index) for index, text in enumerate(texts)]
            flight = launch(graph, rows, before, quiet())
            if before is not None:
                take(texts, before.wait())
            if flight.unsampled:
                with quiet():
                    flight.sample({index: texts[index].row() for index in flight.unsampled})
        texts = texts_of()
        rows = [text.row(drafts=[7] * (text.number % MOST_QUERIES)) for text in texts]
        take(texts, launch(graph, rows, None, quiet()).wait())
        assert {"_forbid", "_penalise", "_look", "_settle"} <= set(captures.cuda.launches)


class Group:
    """Records a rank's collective calls, and whether each was during a capture."""

    def __init__(self, captures: Captures) -> None:
        self.asked: list[tuple[str, tuple[int, ...], bool]] = []
        self._captures = captures

    def __getattr__(self, name: str) -> Any:
        def ask(tensors: Any, *others: Any) -> Any:
            x = others[0][0] if name == "allgather" else tensors[0]
            self.asked.append((name, tuple(x.shape), self._captures.is_on))
            return SimpleNamespace(wait=lambda: None)

        return ask


@SWITCHES
def test_ranks_capture_the_same_all_reduces(
    switches: str, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each graph contains the all-reduces of all ranks. A rank with another order would wait for ever."""
    monkeypatch.setenv("PDSERVE_GPU", switches)
    folder, asked = tiny("llama"), []
    for rank in range(2):
        with strict_capture(num_devices=2) as captures:
            ranks = object.__new__(Ranks)
            ranks.shard, group = Shard(rank, 2), Group(captures)
            ranks._tensors = group
            settings = config(folder, tensor_parallel=2)
            eager = open_rank(with_device_defaults(settings, Role.DECODE, is_gpu=True), ranks.shard, ranks)
            with_graphs(eager, MAX_ROWS, "w")
            assert captures.num_graphs == len(buckets_for(MAX_ROWS))
            asked.append(group.asked)
    assert asked[0] == asked[1]
    captured = [name for name, _, is_captured in asked[0] if is_captured]
    layers = ["allreduce"] * 4  # Two layers of attention and mlp.
    assert captured == ["broadcast", "allreduce", *layers, "allgather"] * len(buckets_for(MAX_ROWS))


def forbidden(act: Callable[[Tensor], object], kind: str) -> None:
    with strict_capture() as captures:
        x = torch.zeros(4, device="cuda:0")
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(ForbiddenInCapture, match=kind), torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            act(x)
        assert captures.num_graphs == 0
        act_outside(x)


def act_outside(x: Tensor) -> None:
    """The same actions are allowed before and after a capture."""
    torch.zeros(4, pin_memory=True).to(x.device)
    torch.cuda.synchronize()


def compiles(x: Tensor) -> None:
    logits_SV, row_S = x.view(1, 4), torch.zeros(1, dtype=torch.int64, device=x.device)
    forbid_tokens(logits_SV, torch.zeros((1, 1), dtype=torch.int32, device=x.device), row_S)


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (lambda x: x[0].item(), "reads from the device|host wait"),
        (lambda x: x.tolist(), "reads from the device"),
        (lambda x: bool(x.sum() > 0), "host wait"),
        (lambda x: x.nonzero(), "host wait"),
        (lambda x: torch.zeros(4, pin_memory=True), "pinned memory"),
        (lambda x: x.cpu(), "reads from the device"),
        (lambda x: x.copy_(torch.zeros(4)), "between host and device"),
        (lambda x: torch.ones(4).to(x.device), "between host and device"),
        (lambda x: torch.cuda.synchronize(), "waits"),
        (lambda x: torch.cuda.current_stream().synchronize(), "waits"),
        (lambda x: torch.cuda.Event().query(), "asks for an event"),
        (lambda x: torch.cuda.mem_get_info(), "asks for free memory"),
        (lambda x: torch.cuda.empty_cache(), "freed in a capture"),
        (lambda x: torch.cuda.Stream(), "a stream is made"),
        (lambda x: torch.cuda.CUDAGraph().replay(), "replayed in a capture"),
        (lambda x: torch.cuda.graph(torch.cuda.CUDAGraph()).__enter__(), "waits"),
        (compiles, "_forbid is compiled"),
    ],
)
def test_the_stand_in_is_strict(act: Callable[[Tensor], object], kind: str) -> None:
    forbidden(act, kind)


def test_a_capture_follows_cudas_rules() -> None:
    with strict_capture():
        graph, stream, pool = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        with pytest.raises(AssertionError, match="without a preceding successful capture"):
            graph.replay()
        with pytest.raises(AssertionError, match="non-default stream"):
            torch.cuda.graph(graph, stream=torch.cuda.current_stream()).__enter__()
        with pytest.raises(RuntimeError, match="Unknown capture error mode"):
            torch.cuda.graph(graph, stream=stream, capture_error_mode="local").__enter__()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            assert torch.cuda.current_stream() is stream
        graph.replay()
        with pytest.raises(AssertionError, match="already owns a captured graph"):
            torch.cuda.graph(graph, pool=pool, stream=stream).__enter__()
        with pytest.raises(AssertionError, match="different streams"):
            torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool, stream=torch.cuda.Stream()).__enter__()
