"""Which models vLLM computes as they are: checks of the config, of the layers that vLLM has built before it reads the
weights, and of what those ask of attention. Each refuses by a rule, because vLLM itself may serve such a model, with
other tokens and no error.
"""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from pdserve.core.errors import ConfigError, ModelError, PdserveError, shortened

_HEAD: Final = "lm_head.weight"
_OTHER_DTYPE: Final = re.compile(r"torch\.(\w+) is not supported for quantization method (\w+)\. .*?\[(.*?)\]")
_KV_ONLY: Final = {"full_attention", "sliding_attention", "chunked_attention"}  # of layer_types
_WITH_IMAGES: Final = "models that read images or audio"
_WITH_STATE: Final = "models with state besides KV, such as Mamba and short convolutions"


@contextlib.contextmanager
def model_errors(folder: Path, installed: str) -> Iterator[None]:
    """Raises ModelError where vLLM rejects a model, with its reason, and ConfigError for a dtype."""
    try:
        yield
    except (PdserveError, MemoryError):
        raise
    except Exception as error:  # of any code that a model or a form of its weights brings
        if other := _OTHER_DTYPE.search(" ".join(str(error).split())):
            dtype, method, supported = other.groups()
            expected = f"auto, or one of {supported.replace('torch.', '')}: vLLM computes {method} in these"
            raise ConfigError("dtype", dtype, expected) from error
        expected = f"a model that vLLM {installed} serves: {shortened(_reason(error), 400)}"
        raise ModelError("model", folder.name, expected) from error


def _reason(error: Exception) -> str:
    causes = error.errors() if hasattr(error, "errors") else []  # of pydantic
    text = " ".join(str(causes[0]["msg"] if causes else error).split("\n\n")[0].split())
    if unread := re.search(r"\['(\w+)'\] failed to be inspected", text):
        return _import_error(unread[1])
    if isinstance(error, KeyError):
        return f"it looks for {text}, which the config or the checkpoint lacks"
    if not text:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at `{where.line}` in {Path(where.filename).name}"
    return text


def _import_error(architecture: str) -> str:
    """Why vLLM cannot import its code of the architecture, which it only logs."""
    from vllm.model_executor.models.registry import ModelRegistry

    try:
        ModelRegistry.models[architecture].load_model_cls()
    except Exception as error:  # of any code that a model brings
        return f"its code of {architecture} cannot be imported: {error}"
    return f"its code of {architecture} cannot be inspected"


# --- by the config --------------------------------------------------------------------------------------------


#: Values that transformers' code of an architecture computes with, and vLLM's reads from the config. Neither is a field
#: of transformers' own config, so a checkpoint that transformers wrote may lack both.
_IMPLIED: Final[Mapping[str, Mapping[str, str]]] = {
    "DeepseekV3ForCausalLM": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
}
#: Architectures for which vLLM 0.32 itself gives other tokens than transformers, for a cause that was not found.
_DEVIATING: Final = frozenset({"Gemma3nForCausalLM"})


def implied_fields(fields: Mapping[str, Any]) -> dict[str, str]:
    """Those that config.json lacks."""
    implied = [_IMPLIED.get(one, {}) for one in _architectures(fields)]
    return {name: value for one in implied for name, value in one.items() if name not in fields}


def _architectures(fields: Mapping[str, Any]) -> list[str]:
    found = fields.get("architectures") or ()
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def check_modality(fields: Mapping[str, Any]) -> None:
    """Raises ModelError for an architecture that reads more than text. Before vLLM imports its code, which may need
    packages that `make vllm-env` leaves out."""
    from vllm.model_executor.models.registry import _MULTIMODAL_MODELS

    names = _architectures(fields)
    _refuse(names, {_WITH_IMAGES: any(one in _MULTIMODAL_MODELS for one in names)})


def check_model(model: Any) -> None:
    """Raises ModelError for a kind of model whose requests are more than text, or whose state is more than KV."""
    layers = set(getattr(model.hf_text_config, "layer_types", None) or ())
    wrong = {
        "encoder-decoder models": model.is_encoder_decoder,
        "pooling models": model.runner_type != "generate",
        _WITH_IMAGES: model.is_multimodal_model,
        _WITH_STATE: (
            model.is_hybrid
            or model.has_inner_state
            or model.is_attention_free
            # vLLM does not know what layers of transformers' own code do.
            or (model.using_transformers_backend() and bool(layers - _KV_ONLY))
        ),
    }
    wrong["models whose tokens vLLM 0.32 itself gets wrong"] = not _DEVIATING.isdisjoint(model.architectures)
    _refuse(model.architectures, wrong)


def check_head(tensors: Collection[str], model: Any) -> None:
    """Raises ModelError if the checkpoint has a matrix for its logits, and vLLM would take the embedding instead."""
    if _HEAD not in tensors or getattr(model.hf_text_config, "tie_word_embeddings", False):
        return
    mapper = getattr(model.registry.resolve_model_cls(model.architectures, model)[0], "hf_to_vllm_mapper", None)
    if mapper is not None and not mapper.apply_list([_HEAD]):
        name = " ".join(model.architectures)
        raise ModelError("tie_word_embeddings", "false", f"true for {name}, whose {_HEAD} vLLM does not read")


# --- by the layers --------------------------------------------------------------------------------------------


def check_built(vllm_config: Any, model: Any) -> None:
    """Raises ModelError if results depend on more than the tokens of a step and the KV before them, as only the layers
    show. Has attention check what it is asked."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import PrefillPrefixLMAttention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values()
    theirs = model.model if type(model).__module__.startswith("vllm.model_executor.models.transformers") else None
    wrong = {
        "models that need tokens before those of a step": bool(getattr(model, "token_lookback_depth", 0)),
        "models whose prompts attend to later tokens": any(
            isinstance(layer, PrefillPrefixLMAttention) or getattr(layer, "attn_type", "decoder") != "decoder"
            for layer in layers
        ),
        _WITH_STATE: theirs is not None
        and (bool(theirs._is_stateful) or any(isinstance(each, torch.nn.Conv1d) for each in theirs.modules())),
    }
    _refuse(vllm_config.model_config.architectures, wrong)
    _check_attention()


def _refuse(architectures: Collection[str], wrong: Mapping[str, bool]) -> None:
    for kind, is_wrong in wrong.items():
        if is_wrong:
            expected = f"a decoder-only text model: {kind} are not served"
            raise ModelError("architectures", " ".join(architectures), expected)


def _check_attention() -> None:
    """In a model of transformers that vLLM runs (its Transformers backend), attention raises ModelError in the first
    step if it is given what vLLM would ignore."""
    backend: Any = sys.modules.get("vllm.model_executor.models.transformers")
    if backend is None or backend.ALL_ATTENTION_FUNCTIONS["vllm"] is not backend.vllm_attention_forward:
        return

    def checked(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **asked: Any) -> Any:
        layer, name = module.attn, type(module).__name__
        if attention_mask is not None:
            raise ModelError("attention", name, "attention without a mask of the model's own")
        if key.shape[1] * key.shape[-1] != layer.num_kv_heads * layer.head_size:
            found = f"{key.shape[1]} of {key.shape[-1]} in {name}"
            raise ModelError("num_key_value_heads", found, f"{layer.num_kv_heads} of {layer.head_size}, by its config")
        computed = {"sliding_window": layer.sliding_window, "softcap": getattr(layer.impl, "logits_soft_cap", None)}
        for field, has in computed.items():
            if asked.get(field) and asked[field] != has:
                raise ModelError(field, f"{asked[field]} in {name}", f"{has}, which vLLM computes")
        return backend.vllm_attention_forward(module, query, key, value, attention_mask, **asked)

    backend.ALL_ATTENTION_FUNCTIONS.register("vllm", checked)


def widen(model: Any, dtype: torch.dtype) -> None:
    """Some of vLLM's layers keep parameters in bfloat16 in a float32 model, and compute them so."""
    if dtype is torch.float32:
        for each in (*model.parameters(), *model.buffers()):
            if each.dtype is torch.bfloat16:
                each.data = each.data.float()
