"""Finds a model's folder: a path, or a repository of the Hugging Face Hub by name, `org/name` or `org/name@revision`.

The Hub's files are kept in its own cache (HF_HOME), where other programs find them too. Without a network, or with
HF_HUB_OFFLINE=1, the cached files are used. A private or gated repository needs HF_TOKEN.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from pdserve.core.errors import ModelError

TOY_MODELS: Final = ("toy", "toy-marked")
EXPECTED: Final = "a folder of a Hugging Face checkpoint, a name on its Hub as org/name, or toy"
#: Weights in other formats, and copies in the format of the authors' own code, are not downloaded.
FILES: Final = ("*.json", "*.safetensors", "*.jinja", "tokenizer*")
COPIES: Final = ("original/*", "consolidated*", "*.onnx*", "onnx/*", "openvino/*")
_REPOSITORY: Final = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?", re.ASCII)
_SNAPSHOT: Final = re.compile(r"models--(?P<org>[\w.-]+?)--(?P<name>[\w.-]+)", re.ASCII)


def find_model(model: str) -> str:
    """The absolute folder of `model`, downloaded first if it is a name on the Hub; a toy's name is returned unchanged.

    A folder comes before a repository of the same name. Raises ModelError.
    """
    if model in TOY_MODELS:
        return model
    path = Path(model).expanduser()
    if model and path.is_dir():
        return str(path.absolute())
    if path.suffix.lower() == ".gguf":
        raise ModelError(
            "model",
            model,
            "safetensors; transformers converts a GGUF file: AutoModelForCausalLM.from_pretrained(FOLDER, "
            "gguf_file=FILE).save_pretrained(OUT), and the same with AutoTokenizer",
        )
    if not is_on_hub(model):
        raise ModelError("model", model, EXPECTED)
    name, _, revision = model.partition("@")
    return _download(name, revision or None)


def is_on_hub(model: str) -> bool:
    """Whether `model` is a name on the Hub. A folder comes before it."""
    return not Path(model).expanduser().exists() and _REPOSITORY.fullmatch(model) is not None


def model_name(model: str) -> str:
    """The name that clients see: that on the Hub, also for a folder of its cache, otherwise the folder's own."""
    if model in TOY_MODELS:
        return model
    if is_on_hub(model):
        return model.partition("@")[0]
    folder = Path(model).resolve()
    snapshot = _SNAPSHOT.fullmatch(folder.parent.parent.name) if folder.parent.name == "snapshots" else None
    return folder.name if snapshot is None else f"{snapshot['org']}/{snapshot['name']}"


def _download(repository: str, revision: str | None) -> str:
    import huggingface_hub
    from huggingface_hub import errors

    name = f"{repository}@{revision}" if revision else repository
    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=list(FILES), ignore_patterns=list(COPIES)
        )
    except errors.GatedRepoError:
        raise ModelError("model", name, "a repository that you may read: accept its terms, and set HF_TOKEN") from None
    except errors.RevisionNotFoundError:
        raise ModelError("model", name, "a revision of that repository") from None
    except errors.RepositoryNotFoundError:
        raise ModelError("model", name, f"{EXPECTED}; the Hub has no such repository, or HF_TOKEN is missing") from None
    except errors.LocalEntryNotFoundError:
        raise ModelError("model", name, "a cached repository, because the Hub cannot be reached") from None
    except (errors.CachedRepoTreeNotFoundError, OSError, ValueError) as error:
        raise ModelError("model", name, f"a repository that can be downloaded ({_first_line(error)})") from None
    if not (Path(folder) / "config.json").is_file():
        raise ModelError("model", name, "a repository with config.json and safetensors")
    return str(folder)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
