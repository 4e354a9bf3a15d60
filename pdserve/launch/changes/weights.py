"""Roll-outs to other weights: the name of their revision, and the checks before a worker is drained.

Routers and gateways read the tokenizer, the chat template and the sampling defaults of the model once, at their start.
So other weights need equal ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pdserve.bounded_file import MAX_TOKENIZER_BYTES, read_json_object
from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError, InvalidRequest, ModelError
from pdserve.engine.load.checkpoint_files import check_sizes, open_checkpoint
from pdserve.engine.load_engine import OURS, read_mock
from pdserve.engine.model.config import read_config
from pdserve.launch.changes.plans import overlaid
from pdserve.launch.keys import Kind, Settings, Value
from pdserve.launch.spec import ClusterSpec, Process, router_config
from pdserve.model_source import TOY, TOY_MODELS, find_model
from pdserve.text.sampling_defaults import read_sampling_defaults
from pdserve.text.tokenizer import NAMED_TOKENS, named_token, read_tokenizer_config

MAX_MODEL_CHARS: Final = 4096
MAX_REVISION_CHARS: Final = 64
_SECOND: Final = "as of the weights that are served, because routers read it at their start; start a second cluster"
_OTHER_CHARS: Final = re.compile(r"[^A-Za-z0-9._-]+")


def folder_of(model: str) -> str:
    """A toy's name, or the folder. Raises InvalidRequest unless it is an absolute path, and ModelError if it is no
    folder with a model."""
    if model in TOY_MODELS:
        return model
    if len(model) > MAX_MODEL_CHARS or "\0" in model or not Path(model).is_absolute():
        raise InvalidRequest("model", repr(model[:256]), "an absolute path on the launcher's host")
    return find_model(model)


def with_revision(
    spec: ClusterSpec, overlay: Settings, folder: str
) -> tuple[ClusterSpec, dict[Kind, dict[str, Value]]]:
    """The spec that knows the revision of a folder, and `overlay` with it. Pure. Raises ConfigError if another folder
    has that name."""
    target = overlaid(overlay, {})
    table = target.setdefault("worker", {})
    if folder == spec.model:
        table.pop("revision", None)
        return spec, {kind: values for kind, values in target.items() if values}
    name = next((one for one, held in spec.revisions.items() if held == folder), "")
    if not name:
        parts = [one for one in Path(folder).parts if one != "/"]
        names = [_OTHER_CHARS.sub("-", "-".join(parts[-count:]))[-MAX_REVISION_CHARS:] for count in (1, 2)]
        taken = {Path(spec.model).name, *spec.revisions}
        name = next((one for one in names if one and one not in taken), "")
        if not name:
            raise ConfigError("model", folder, f"a folder with another name than {', '.join(sorted(taken))}")
    table["revision"] = name
    return replace(spec, revisions={**spec.revisions, name: folder}), target


def check_weights(spec: ClusterSpec, folder: str, workers: Sequence[Process]) -> None:
    """Reads files. `workers`: those that would load the folder. Raises ConfigError and ModelError."""
    configs = [one.config for one in workers if isinstance(one.config, WorkerConfig)]
    for config in configs:
        if config.lora or config.lora_folders:
            raise ConfigError("model", folder, "no LoRA adapters beside it: they belong to the weights that are served")
    ours = spec.model if spec.model in TOY_MODELS else find_model(spec.model, has_weights=False)
    if ours in TOY_MODELS or folder in TOY_MODELS:
        if not {ours, folder} <= set(TOY_MODELS):
            raise ConfigError("model", folder, f"a tokenizer {_SECOND}")
        return
    has_defaults = router_config(spec, ()).generation_config != "none"
    served, wanted = (_text(Path(one), has_defaults=has_defaults) for one in (ours, folder))
    for name, value in wanted.items():
        if value != served[name]:
            raise ModelError(name, f"another one in {folder}", f"the same {_SECOND}")
    engines = {config.engine for config in configs}
    if engines <= OURS - {TOY}:
        model = read_config(Path(folder))
        if any(config.load == "auto" for config in configs):
            check_sizes(model, open_checkpoint(Path(folder)).tensors)


def _text(folder: Path, *, has_defaults: bool) -> Mapping[str, Any]:
    """What routers and gateways read in a model's folder, by the name for operators."""
    from pdserve.text.chat import read_templates  # imports jinja2, which the launcher needs for nothing else

    mock, _ = read_mock(str(folder))
    config = read_tokenizer_config(folder)
    return {
        "tokenizer.json": read_json_object(folder / "tokenizer.json", MAX_TOKENIZER_BYTES),
        **{f"tokenizer_config.json: {name}": named_token(config, name) for name in NAMED_TOKENS},
        "chat_template": read_templates(folder),
        "generation_config.json": read_sampling_defaults(folder) if has_defaults else None,
        "vocab_size": mock.vocab_size,
        "eos_token_id": mock.eos_token_ids,
    }
