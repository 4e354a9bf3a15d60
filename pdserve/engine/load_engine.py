"""Opens the engine of a worker's config: ours, or one of another distribution. torch is imported only when a model is
loaded.

An engine is a factory, which takes the worker's settings and role and returns an Engine with its KvPool. Another
distribution registers its factory as an entry point of the group `pdserve.engines` (docs/engine.md).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final

from pdserve.bounded_file import MAX_TOKENIZER_BYTES, read_json_object
from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError, ModelError
from pdserve.core.kv.kv_shape import SCALED
from pdserve.core.setting import AUTO
from pdserve.core.types import Role
from pdserve.engine.interface import AdapterEngine, Engine, EngineSpec
from pdserve.engine.model.config import CONFIG, MAX_VOCAB, ModelConfig, read_config, read_eos_token_ids
from pdserve.engine.model.config_schema import Fields
from pdserve.engine.toy import CELL_BYTES, MARKS, NUM_ANSWERS, Mock, ToyEngine
from pdserve.model_source import TOY, TOY_MODELS, TOY_OTHER, model_name
from pdserve.tokenizer_json import text_vocabulary

OWN: Final = "own"  # torch, or toy for a toy model
MOCK: Final = "MOCK ENGINE: no model is computed, and texts mean nothing"
VLLM: Final = "vllm"
GROUP: Final = "pdserve.engines"
TOY_CONTEXT_TOKENS: Final = 8192
TOY_MAX_BLOCKS: Final = 8192  # size of its pool, independent of the available memory
_CONTEXT_FIELDS: Final = ("max_position_embeddings", "max_seq_len", "n_positions", "seq_length")  # of config.json
_ANSWERS: Final = (re.compile("[Ġ▁][a-z]{2,}"), re.compile("[!-~]+"))  # words after a space, if the vocabulary has any
_MEMBERS: Final = ("spec", "pool", "step", "close")  # of an engine
_OF_POOL: Final = ("num_blocks", "block_bytes", "runs_per_block", "is_on_host", "descriptor")

log = logging.getLogger(__name__)

EngineFactory = Callable[[WorkerConfig, Role], Engine]


def load_engine(config: WorkerConfig, role: Role) -> Engine:
    """The engine of `config`, ready for steps.

    Raises ModelError if the folder cannot be served, and ConfigError if there is no such engine, or workers cannot use
    it.
    """
    name = engine_name(config.engine, config.model)
    engine = find_engine(name)(config, role)
    try:
        _check(name, engine, model_name(config.model))
        if not isinstance(engine, AdapterEngine):
            _check_no_adapters(config)
    except BaseException:
        if hasattr(engine, "close"):
            engine.close()
        raise
    return engine


def engine_name(asked: str, model: str) -> str:
    """The engine that `auto` and `own` choose for `model`; any other name stays. `up` replaces `auto` by vllm for a
    model that only vLLM serves (pdserve/launch/settings.py)."""
    if asked not in (AUTO, OWN):
        return asked
    return TOY if model in TOY_MODELS else "torch"


def find_engine(name: str) -> EngineFactory:
    """Raises ConfigError as `registered`, and if the engine cannot be imported."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    found = registered(name)
    try:
        factory = found.load()
    except Exception as error:  # the code of another distribution
        raise ConfigError("engine", name, f"an engine that can be imported; {_owner(found)}: {error!r}") from error
    if not callable(factory):
        expected = f"a function of settings and role; {_owner(found)} registers {found.value}"
        raise ConfigError("engine", name, expected)
    checked: EngineFactory = factory
    return checked


def registered(name: str) -> EntryPoint:
    """An engine that is not ours, without importing it. Raises ConfigError, which lists the installed engines, unless
    one package registers the name."""
    found = [one for one in entry_points(group=GROUP) if one.name == name]
    if not found:
        expected = f"{AUTO}, or an installed engine: {', '.join(engine_names())}. Install the package that registers it"
        raise ConfigError("engine", name, expected)
    if len(found) > 1:
        owners = " and ".join(sorted(map(_owner, found)))
        raise ConfigError("engine", name, f"one package of this engine; {owners} register it, so uninstall one")
    return found[0]


def engine_names() -> list[str]:
    """Of all installed engines."""
    return sorted({*BUILT_IN, *(one.name for one in entry_points(group=GROUP))})


def _owner(one: EntryPoint) -> str:
    return one.value if one.dist is None else f"{one.dist.name} {one.dist.version}"


def _check(name: str, engine: Engine, model: str) -> None:
    """Raises ConfigError unless workers and routers can use the engine. `model` is the name that routers expect."""
    absent = [member for member in _MEMBERS if not hasattr(engine, member)]
    absent = absent or [f"pool.{member}" for member in _OF_POOL if not hasattr(engine.pool, member)]
    if absent:
        raise ConfigError("engine", name, f"an Engine; {type(engine).__name__} lacks {', '.join(absent)}")
    spec, pool = engine.spec, engine.pool
    if not isinstance(spec, EngineSpec):
        raise ConfigError("engine.spec", type(spec).__name__, "an EngineSpec")
    if spec.model != model:
        raise ConfigError("engine.model", spec.model, f"{model}, as routers call it (model_name)")
    for field in ("num_blocks", "block_bytes"):
        if getattr(pool, field) != getattr(spec, field):
            raise ConfigError(f"engine.{field}", getattr(spec, field), f"{getattr(pool, field)}, as in its pool")
    allowed = {1} if spec.kv_dtype in SCALED else {1, spec.kv_layers}  # scales of all layers follow the values
    if pool.runs_per_block not in allowed:
        expected = f"{' or '.join(map(str, sorted(allowed)))}: one, or one for each layer if blocks have no scales"
        raise ConfigError("engine.runs_per_block", pool.runs_per_block, expected)


# --- our engines ----------------------------------------------------------------------------------------------


def _torch(config: WorkerConfig, role: Role) -> Engine:
    if config.model in TOY_MODELS:
        raise ConfigError("engine", "torch", f"auto or toy: the model {config.model} has no weights")
    _check_no_adapters(config)
    if config.tensor_parallel > 1:
        from pdserve.engine.ranks.leader import open_parallel_engine

        return open_parallel_engine(config, role)
    from pdserve.engine.load.build_engine import open_engine

    return open_engine(config, role)


def _check_no_adapters(config: WorkerConfig) -> None:
    """Raises ConfigError. Our own engine calls it before it reads weights."""
    if config.serves_adapters:
        name = "lora" if config.lora else "lora_folders"
        raise ConfigError(name, " ".join(getattr(config, name)), "engine vllm: this engine computes no LoRA adapters")


def _toy(config: WorkerConfig, role: Role) -> ToyEngine:
    """`toy` gives the same tokens on every worker. With `toy-marked`, prefill workers mark the cells that they
    write. For any other model, the toy stands in: it needs the folder's tokenizer and config.json, and no weights."""
    if config.tensor_parallel > 1:
        raise ConfigError("tensor_parallel", config.tensor_parallel, "1: a toy has nothing to divide")
    is_marked = config.model == "toy-marked"
    mock, context_tokens = (None, TOY_CONTEXT_TOKENS) if config.model in TOY_MODELS else read_mock(config.model)
    if mock is not None:
        log.warning(MOCK, extra={"model": mock.name})
    return ToyEngine(
        num_blocks=toy_blocks(config),
        block_size=config.block_size,
        max_context_tokens=config.max_context_tokens or context_tokens,
        role_mark=MARKS[role] if is_marked else 0,
        is_marked=is_marked,
        is_other=config.model == TOY_OTHER,
        step_s=config.toy_step_s,
        token_s=config.toy_token_s,
        mock=mock,
        max_adapter_bytes=config.max_lora_bytes,
        max_adapters=config.max_lora_adapters,
    )


def read_mock(model: str) -> tuple[Mock, int]:
    """What the toy needs to know of the model in a folder, and the model's context length.

    The architecture may be one that no engine knows. Raises ModelError.
    """
    folder = Path(model)
    values = read_json_object(folder / CONFIG)
    if values is None:
        raise ModelError(CONFIG, f"nothing in {folder}", "the model's configuration")
    vocabulary = text_vocabulary(read_json_object(folder / "tokenizer.json", MAX_TOKENIZER_BYTES) or {})
    try:
        known: ModelConfig | None = read_config(folder)
    except ModelError:
        known = None
    if known is not None:
        vocab_size, context_tokens, eos_token_ids = known.vocab_size, known.max_context_tokens, known.eos_token_ids
    else:
        inner = values.get("text_config")  # of models that also read images
        fields = Fields(inner if isinstance(inner, dict) else values)
        names = [name for name in _CONTEXT_FIELDS if fields.get(name) is not None]
        context_tokens = fields.integer(names[0]) if names else TOY_CONTEXT_TOKENS
        vocab_size = fields.integer("vocab_size", max(vocabulary.values(), default=-1) + 1 or None, high=MAX_VOCAB)
        generation = read_json_object(folder / "generation_config.json") or {}
        eos_token_ids = read_eos_token_ids(fields, Fields(generation, path="generation_config.json: "), vocab_size)
    for pattern in _ANSWERS:
        found = sorted(at for token, at in vocabulary.items() if at < vocab_size and pattern.fullmatch(token))
        if found:
            answers = tuple(found[:NUM_ANSWERS])
            mock = Mock(name=model_name(model), vocab_size=vocab_size, eos_token_ids=eos_token_ids, answers=answers)
            return mock, context_tokens
    raise ModelError("tokenizer.json", "no token of printable ASCII characters", "one, which the toy could answer with")


def toy_blocks(config: WorkerConfig) -> int:
    if config.kv_blocks or not config.kv_memory_bytes:
        return config.kv_blocks or TOY_MAX_BLOCKS
    return max(1, min(TOY_MAX_BLOCKS, config.kv_memory_bytes // (CELL_BYTES * config.block_size)))


def _vllm(config: WorkerConfig, role: Role) -> Engine:
    if config.model in TOY_MODELS:
        raise ConfigError("engine", VLLM, f"auto or toy: the model {config.model} has no weights")
    # torch reads it when it is imported. vLLM's C++ code would warn at each start that it binds memory to a NUMA node.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if config.tensor_parallel > 1:
        from pdserve.engine.ranks.leader import open_parallel_vllm

        return open_parallel_vllm(config, role)
    from pdserve.engine.vllm.start import open_vllm

    return open_vllm(config, role)


BUILT_IN: Final[Mapping[str, EngineFactory]] = {"torch": _torch, TOY: _toy, VLLM: _vllm}
OURS: Final = frozenset({AUTO, OWN, *BUILT_IN} - {VLLM})  # values of the setting `engine`
