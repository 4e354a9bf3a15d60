"""Finds a model's folder: a path, or a repository of the Hugging Face Hub by name, `org/name` or `org/name@revision`.

The Hub's files are kept in its own cache (HF_HOME), where other programs find them too. Without a network, or with
HF_HUB_OFFLINE=1, the cached files are used. A private or gated repository needs HF_TOKEN.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pdserve.core.errors import ModelError, shortened

TOY_OTHER: Final = "toy-other"  # other weights than those of `toy`
TOY_MODELS: Final = ("toy", "toy-marked", TOY_OTHER)
TOY: Final = "toy"  # the engine of toy models, which stands in for any other model without its weights
BUNDLED: Final = "stdlib-5m"  # in the folder `models` of this package
EXPECTED: Final = (
    f"a folder of a Hugging Face checkpoint, a name on its Hub as org/name, {BUNDLED} (the bundled model), or toy"
)
#: Weights in other formats, and copies in the format of the authors' own code, are not downloaded.
FILES: Final = ("*.json", "*.safetensors", "*.jinja", "tokenizer*")
_WITHOUT_WEIGHTS: Final = tuple(name for name in FILES if "safetensors" not in name)
COPIES: Final = ("original/*", "consolidated*", "*.onnx*", "onnx/*", "openvino/*")
TO_CONVERT: Final = (
    "safetensors; transformers converts a GGUF file: AutoModelForCausalLM.from_pretrained(FOLDER, "
    "gguf_file=FILE).save_pretrained(OUT), and the same with AutoTokenizer"
)
_OLLAMA: Final = re.compile(r"[\w.-]+(/[\w.-]+)*:[\w.-]+", re.ASCII)  # llama3.2:3b
_REPOSITORY: Final = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?", re.ASCII)
_SNAPSHOT: Final = re.compile(r"models--(?P<org>[\w.-]+?)--(?P<name>[\w.-]+)", re.ASCII)


def find_model(model: str, *, has_weights: bool = True) -> str:
    """The absolute folder of `model`, downloaded first if it is a name on the Hub, with its weights if `has_weights`; a
    toy's name is returned unchanged.

    A folder comes before a repository of the same name. Raises ModelError.
    """
    if model in TOY_MODELS:
        return model
    path = Path(model).expanduser()
    if model == BUNDLED and not os.path.isdir(path):
        return str(Path(__file__).parent / "models" / BUNDLED)
    if model and os.path.isdir(path):  # pathlib's raises if the name is too long
        if not (path / "config.json").exists():  # random weights need no more than that file
            check_no_gguf(path)
        return str(path.absolute())
    if path.suffix.lower() == ".gguf":
        raise ModelError("model", model, TO_CONVERT)
    if os.path.isfile(path):
        raise ModelError("model", f"{model}, a file", f"the folder that holds it: {path.absolute().parent}")
    if _OLLAMA.fullmatch(model):
        expected = (
            f"{EXPECTED}. Names as Ollama's are not known: find the model on huggingface.co and give its org/name"
        )
        raise ModelError("model", model, f"{expected}, such as meta-llama/Llama-3.2-3B-Instruct")
    if not is_on_hub(model):
        raise ModelError("model", shortened(model), EXPECTED)
    name, _, revision = model.partition("@")
    return _download(name, revision or None, FILES if has_weights else _WITHOUT_WEIGHTS)


def check_no_gguf(folder: Path) -> None:
    """Raises ModelError for a folder without safetensors that has a GGUF file."""
    file = next(folder.glob("*.[gG][gG][uU][fF]"), None)
    if file is not None and not any(folder.glob("*.safetensors")):
        raise ModelError("model", f"{folder} with only GGUF ({file.name})", TO_CONVERT)


def is_on_hub(model: str) -> bool:
    """Whether `model` is a name on the Hub. A folder comes before it."""
    return not os.path.exists(Path(model).expanduser()) and _REPOSITORY.fullmatch(model) is not None


def model_name(model: str) -> str:
    """The name that clients see: that on the Hub, also for a folder of its cache, otherwise the folder's own."""
    if model in TOY_MODELS:
        return model
    if is_on_hub(model):
        return model.partition("@")[0]
    folder = Path(model).resolve()
    snapshot = _SNAPSHOT.fullmatch(folder.parent.parent.name) if folder.parent.name == "snapshots" else None
    return folder.name if snapshot is None else f"{snapshot['org']}/{snapshot['name']}"


def _download(repository: str, revision: str | None, files: Sequence[str]) -> str:
    import huggingface_hub
    from huggingface_hub import errors

    name = f"{repository}@{revision}" if revision else repository
    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=list(files), ignore_patterns=list(COPIES)
        )
    except errors.GatedRepoError:
        expected = "a repository that you may read: accept its terms on huggingface.co, and set HF_TOKEN"
        raise ModelError("model", name, expected) from None
    except errors.RevisionNotFoundError:
        raise ModelError("model", name, "a revision of that repository") from None
    except errors.RepositoryNotFoundError:
        expected = f"{EXPECTED}; the Hub has no such repository: check its spelling. If it is private, set HF_TOKEN"
        raise ModelError("model", name, expected) from None
    except errors.LocalEntryNotFoundError:
        raise ModelError("model", name, _offline_words(repository)) from None
    except (errors.CachedRepoTreeNotFoundError, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            expected = f"free space in the cache folder {_cache()}; HF_HOME names another one"
            raise ModelError("model", name, expected) from None
        raise ModelError("model", name, f"a repository that can be downloaded ({_first_line(error)})") from None
    if not (Path(folder) / "config.json").is_file():
        raise ModelError("model", name, "a repository with config.json and safetensors; GGUF is not read")
    return str(folder)


def _offline_words(repository: str) -> str:
    is_off = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    why = "HF_HUB_OFFLINE is set" if is_off else "the Hub cannot be reached"
    return (
        f"a cached repository, because {why} and {_cache()} has none. On a machine with a network, run `hf download "
        f"{repository}` with `--local-dir DIR`, copy DIR to this machine, and give its path; HF_HOME names another "
        "cache"
    )


def _cache() -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    return str(HF_HUB_CACHE)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
