"""vLLM's loaders, with checks that they leave out. Imported only where vLLM is, because it imports vllm.

Before any weights are read: are the layers what an engine of rows can compute (`models.py`), and do this build's
kernels compute the form in which the weights are stored? While they are read: is every tensor used, by a parameter of
its kind, and is every parameter written as a whole? vLLM ignores tensors that it does not use, keeps the memory of a
quantised parameter that no tensor writes as it was allocated, and converts between integers and floats. Each would give
wrong tokens without an error.
"""

from __future__ import annotations

import functools
import logging
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, Final, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.platforms import current_platform

from pdserve.core.errors import ConfigError, ModelError, shortened
from pdserve.engine.vllm.models import check_built

log = logging.getLogger(__name__)

#: Names of these loaders among vLLM's.
_CHECKED: Final = "pdserve"
_RANDOM: Final = "pdserve-dummy"
_QUANTISATION: Final = "quantization_config"
#: Read in vLLM 0.32's kernels (docs/models.md).
SERVED_ON_CPU: Final = (
    "on a CPU GPTQ (4 bits, symmetric), AWQ and compressed-tensors of 4 bits with AVX-512, compressed-tensors of int8, "
    "and with a scale per output also of fp8; experts that are quantised, MXFP4 and blocks of fp8 need AMX; "
    "other forms need vLLM's build for CUDA"
)
_FP8_DTYPES: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOAT, _FP8, _EXPONENT, _INTEGER = "a float", "fp8", "a power of two", "an integer"
_KINDS: Final = {
    **dict.fromkeys((torch.float64, torch.float32, torch.float16, torch.bfloat16), _FLOAT),
    torch.float8_e8m0fnu: _EXPONENT,
}
_CONVERTED: Final = {(_EXPONENT, _FLOAT)}  # kinds of tensor and parameter that differ, and mean the same
_EXPERT: Final = re.compile(r"(?P<layer>.*\.experts)\.(?P<index>\d{1,6})\.(?P<part>.*)")
_MAY_BE_UNUSED: Final = (".rotary_emb.inv_freq", ".g_idx", ".bias", "lm_head.weight")  # verified, or without effect
_SYMMETRIC_ZEROS: Final = {"gptq": 0x77777777, "gptq_v2": 0x88888888}  # eight zero points of 8; v1 stores one less


def register(*, is_random: bool) -> str:
    """The `load_format` of a checkpoint, or of random weights."""
    _register()
    return _RANDOM if is_random else _CHECKED


@functools.cache
def _register() -> None:
    register_model_loader(_CHECKED)(CheckedLoader)
    register_model_loader(_RANDOM)(RandomLoader)


@final
class RandomLoader(DummyModelLoader):  # type: ignore[misc]  # vllm is untyped
    def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        model = super().create_model(vllm_config, model_config, prefix)
        check_built(vllm_config, model)
        return model


@final
class CheckedLoader(DefaultModelLoader):  # type: ignore[misc]
    #: Called with the bytes of the tensors that the model has read. vLLM makes the loader, so it cannot be an argument.
    on_read: ClassVar[Callable[[int], None]] = staticmethod(lambda num_bytes: None)

    def __init__(self, load_config: Any) -> None:
        extra = {"enable_weights_track": True}  # also for quantised models
        super().__init__(replace(load_config, load_format="safetensors", model_loader_extra_config=extra))
        self._check: _LoadCheck | None = None

    def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        try:
            model = super().create_model(vllm_config, model_config, prefix)
        except Exception as error:  # vLLM's choice of a kernel for each layer raises errors of many kinds
            if model_config.quantization is None:
                raise
            raise _not_computed(model_config, " ".join(str(error).split())) from error
        if model_config.quantization is not None:
            check_kernels(model, model_config)
        check_built(vllm_config, model)
        return model

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        assert self._check is not None
        num_bytes = 0
        for name, tensor in super().get_all_weights(model_config, model):
            self._check.begin(name, tensor)
            yield name, tensor
            num_bytes += tensor.nbytes
            CheckedLoader.on_read(num_bytes)
        self._check.reading = None

    def load_weights(self, model: Any, model_config: Any) -> None:
        self._check = check = _LoadCheck(model_config)
        try:
            with check:
                super().load_weights(model, model_config)
        except (ConfigError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of any model's own loader
            if check.reading is None:
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            expected = f"a tensor that the model of config.json takes: {shortened(reason, 400)}"
            raise ModelError(check.reading, check.shown, expected) from error
        check.finish(model)


def check_kernels(model: Any, model_config: Any) -> None:
    """Raises ConfigError for a dtype, and ModelError for a form, for which vLLM chooses a kernel that cannot compute
    it. vLLM itself would fail in the middle of loading, or in the first step."""
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        for owner in (getattr(module, "quant_method", None), getattr(module, "scheme", None)):
            kernel = getattr(owner, "kernel", None) or getattr(owner, "fp8_linear", None)
            if type(kernel).__name__ == "CPUWNA16LinearKernel":
                if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
                    raise _not_computed(model_config, "4-bit weights need AVX-512")
                if model_config.dtype == torch.float32:
                    raise ConfigError(
                        "dtype", "float32", "auto, bfloat16 or float16: vLLM multiplies 4-bit weights in these on a CPU"
                    )
            key = getattr(getattr(kernel, "config", None), "weight_quant_key", None)
            is_whole = key is not None and key.dtype in _FP8_DTYPES and key.scale.group_shape.is_per_tensor()
            # vLLM joins such matrices, and rounds them again to a common scale.
            if is_whole and len(getattr(module, "logical_widths", ())) > 1 and not _rounds_fp8():
                raise _not_computed(model_config, "fp8 weights with one scale for each matrix")


def _rounds_fp8() -> bool:
    """Builds for CPUs declare this kernel without arguments and without code."""
    return bool(torch.ops._C.static_scaled_fp8_quant.default._schema.arguments)


def _not_computed(model_config: Any, reason: str) -> ModelError:
    where = f"; vLLM computes {SERVED_ON_CPU}" if current_platform.is_cpu() else ""
    expected = f"a form that this build of vLLM computes: {shortened(reason, 300)}{where}"
    return ModelError(_QUANTISATION, model_config.quantization, expected)


@final
class _LoadCheck(TorchFunctionMode):
    """Sees every operation while vLLM writes tensors of the checkpoint to parameters."""

    def __init__(self, model_config: Any) -> None:
        super().__init__()
        fields = getattr(model_config.hf_config, _QUANTISATION, None)
        self._settings: dict[str, Any] = fields if isinstance(fields, dict) else {}
        self._num_experts = model_config.get_num_experts()
        self.reading: str | None = None  # the tensor that vLLM was given last
        self.shown = ""
        self._names: set[str] = set()
        self._places: dict[str, tuple[int, int]] = {}  # addresses of the tensors that are in use
        self._used: set[str] = set()
        self._written: dict[int, int] = defaultdict(int)  # values, by the address of a parameter's data
        self._biases: set[str] = set()  # that are not zero

    def begin(self, name: str, tensor: Tensor) -> None:
        """Before vLLM is given a tensor. Raises ModelError for values that it would ignore, or compute NaN with."""
        self.reading, self.shown = name, f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        self._names.add(name)
        begin = tensor.data_ptr()
        self._places[name] = begin, begin + tensor.nbytes
        # A view of it has counted as a use. Otherwise its memory may become that of another tensor.
        weakref.finalize(tensor, self._places.pop, name, None).atexit = False
        with torch._C.DisableTorchFunction():
            self._check_values(name, tensor)

    def _name_of(self, tensor: Tensor) -> str | None:
        """Of the tensor of the checkpoint that it is, or a view of. Tensors of a file share one storage."""
        at = tensor.data_ptr()
        return next((name for name, (begin, end) in list(self._places.items()) if begin <= at < end), None)

    def _check_values(self, name: str, tensor: Tensor) -> None:
        last = name.rpartition(".")[2]
        if "scale" in last:
            if _KINDS.get(tensor.dtype) == _FLOAT:
                is_finite = bool(tensor.isfinite().all())
            else:  # 255 is NaN among powers of two
                is_mx = tensor.dtype == torch.uint8 and self._settings.get("quant_method") == "mxfp4"
                is_power = tensor.dtype == torch.float8_e8m0fnu or is_mx
                is_finite = not is_power or not bool((tensor.view(torch.uint8) == 255).any())
            if not is_finite:
                raise ModelError(name, "a scale that is not finite", "finite scales: download the file again")
        elif last in ("g_idx", "weight_g_idx"):
            groups = tensor.unique().numel()
            expected = torch.arange(tensor.numel()) // max(1, tensor.numel() // max(1, groups))
            if tensor.numel() % max(1, groups) or not torch.equal(tensor.long(), expected):
                raise ModelError(name, "groups in another order", "groups of neighbouring inputs, as vLLM assumes")
        elif last == "qzeros" and self._settings.get("quant_method") == "gptq":
            form = str(self._settings.get("checkpoint_format") or "gptq")
            has_one_width = self._settings.get("bits") == 4 and not self._settings.get("dynamic")
            word = _SYMMETRIC_ZEROS.get(form) if has_one_width else None
            if word is not None and not bool((tensor.long() & 0xFFFFFFFF == word).all()):
                expected = f"{word:#x}, because {_QUANTISATION} says sym: true, and vLLM does not read them then"
                raise ModelError(name, "other zero points", expected)
        elif last == "bias" and tensor.dim() == 1 and bool(tensor.count_nonzero()):
            self._biases.add(name)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":  # of an attribute, such as the shape
            return func(*args, **(kwargs or {}))
        flat = [part for one in args for part in (one if isinstance(one, (list, tuple)) else (one,))]
        tensors = [one for one in flat if isinstance(one, Tensor) and one.layout == torch.strided]
        names = [self._name_of(one) for one in tensors]
        self._used.update(name for name in names if name is not None)
        if func in (Tensor.copy_, Tensor.fill_, Tensor.__setitem__) and tensors:
            self._written[tensors[0].untyped_storage().data_ptr()] += (
                tensors[-1] if func is Tensor.__setitem__ else tensors[0]
            ).numel()
            if func is Tensor.copy_ and names[-1] is not None and len(tensors) == 2:
                _check_kind(names[-1], tensors[1], tensors[0])
        return func(*args, **(kwargs or {}))

    def finish(self, model: Any) -> None:
        """Raises ModelError unless what was read is the whole model, and all that it reads."""
        self._check_experts()
        for module_name, module in model.named_modules():
            if isinstance(module, LinearBase):
                for name, parameter in module.named_parameters(recurse=False):
                    written = self._written.get(parameter.untyped_storage().data_ptr(), 0)
                    # Of a matrix that is joined in the checkpoint, vLLM writes one scale for all parts.
                    is_joined = f"{module_name}.{name}" in self._names
                    if 0 < written < parameter.numel() and not is_joined:
                        expected = f"{parameter.numel()}: one of the tensors that it consists of is missing"
                        raise ModelError(f"{module_name}.{name}", f"{written} values", expected)
        unused = self._names - self._used
        # Layers that predict further tokens have biases, too, and vLLM reads nothing of them.
        read_modules = {name.rpartition(".")[0] for name in self._used}
        for name in sorted(unused & self._biases):
            if name.rpartition(".")[0] in read_modules:
                raise ModelError(
                    name, "a bias that is not zero", "no such tensor: the model of config.json has no bias there"
                )
        others_unused = sorted(name for name in unused if not name.endswith(_MAY_BE_UNUSED))
        if others_unused:
            log.warning(
                "vLLM does not use some tensors of the checkpoint",
                extra={"count": len(others_unused), "first": shortened(others_unused[0])},
            )

    def _check_experts(self) -> None:
        """Experts share a parameter, which vLLM takes for loaded after the first one."""
        parts_of: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for name in self._names:
            if found := _EXPERT.fullmatch(name):
                parts_of[found["layer"]][int(found["index"])].add(found["part"])
        for layer, parts in parts_of.items():
            count = self._num_experts or max(parts) + 1
            if set(parts) != set(range(count)):
                raise ModelError(layer, f"{len(parts)} experts", f"{count}, as config.json says")
            for index, found_parts in parts.items():
                if absent := parts[0] ^ found_parts:
                    raise ModelError(f"{layer}.{index}", f"not the tensors of expert 0: {min(absent)}", "the same ones")


def _check_kind(name: str, tensor: Tensor, parameter: Tensor) -> None:
    ours, theirs = (
        _KINDS.get(one.dtype) or (_FP8 if one.is_floating_point() else _INTEGER) for one in (tensor, parameter)
    )
    is_other_fp8 = ours == theirs == _FP8 and tensor.dtype != parameter.dtype
    if (ours != theirs and (ours, theirs) not in _CONVERTED) or is_other_fp8:
        stored, wanted = (str(one.dtype).removeprefix("torch.") for one in (tensor, parameter))
        raise ModelError(
            name, f"dtype {stored}", f"{wanted}, or another {theirs}, as {_QUANTISATION} of config.json says"
        )
