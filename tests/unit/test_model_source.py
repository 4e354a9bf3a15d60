"""Models by name are downloaded with the Hub's own client, from a local server, and found again without it."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from pdserve.core.errors import ModelError
from pdserve.engine.load.checkpoint_files import open_checkpoint
from pdserve.launch.settings import bundled_model
from pdserve.model_source import find_model, is_on_hub, model_name
from tests.support.hub import COMMIT, serve_hub

FIND = (
    "import os, sys; from pdserve.model_source import *; "
    "print(find_model(sys.argv[1], has_weights=bool(os.environ.get('HAS_WEIGHTS', 'yes')))); "
    "print(model_name(sys.argv[1]))"
)


def find(model: str, url: str, home: Path, **env: str) -> tuple[str, str]:
    """stdout and stderr of a process of its own, because the Hub's client reads its settings when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", FIND, model],
        env={"PATH": "", "HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **env},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip(), done.stderr


def files() -> Mapping[str, bytes]:
    small = {path.name: path.read_bytes() for path in bundled_model().iterdir() if path.suffix in (".json", ".jinja")}
    return {**small, "model.safetensors": b"weights", "pytorch_model.bin": b"no", "original/consolidated.00.pth": b"no"}


def test_the_bundled_model_has_a_name() -> None:
    assert Path(find_model("stdlib-5m")) == bundled_model()
    with pytest.raises(ModelError, match=r"expected a folder .*, stdlib-5m \(the bundled model\), or toy"):
        find_model("stdlib-6m")


def test_a_repository_is_downloaded_once_and_found_offline(tmp_path: Path) -> None:
    seen: list[str] = []
    with serve_hub({"acme/tiny": files()}, seen) as url:
        out, error = find("acme/tiny", url, tmp_path)
        assert out.splitlines()[1:] == ["acme/tiny"], error
        folder = Path(out.splitlines()[0])
        assert (folder / "model.safetensors").read_bytes() == b"weights"
        assert (folder / "config.json").read_bytes() == files()["config.json"]
        assert not list(folder.rglob("*.bin"))
        assert not list(folder.rglob("*.pth"))
        assert model_name(str(folder)) == "acme/tiny"
    assert folder.name == COMMIT
    for env in ({}, {"HF_HUB_OFFLINE": "1"}):
        out, error = find("acme/tiny", url, tmp_path, **env)
        assert out.splitlines()[:1] == [str(folder)], error


def test_weights_are_downloaded_only_when_they_are_needed(tmp_path: Path) -> None:
    with serve_hub({"acme/tiny": files()}, []) as url:
        out, error = find("acme/tiny", url, tmp_path, HAS_WEIGHTS="")
        folder = Path(out.splitlines()[0])
        assert (folder / "tokenizer.json").exists(), error
        assert not (folder / "model.safetensors").exists()
        assert find("acme/tiny", url, tmp_path)[0].splitlines()[0] == str(folder)
        assert (folder / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("acme/none", "the Hub has no such repository: check its spelling. If it is private, set HF_TOKEN"),
        ("acme/tiny@other", "a revision of that repository"),
        ("acme/gated", "accept its terms on huggingface.co, and set HF_TOKEN"),
        ("acme/gguf", "a repository with config.json and safetensors"),
    ],
)
def test_errors_of_the_hub_say_what_to_do(model: str, expected: str, tmp_path: Path) -> None:
    with serve_hub({"acme/tiny": files(), "acme/gguf": {"q4.gguf": b"x"}}, []) as url:
        out, error = find(model, url, tmp_path)
    assert not out
    assert f"ModelError: model: got {model}, expected" in error
    assert expected in error


def test_a_repository_that_is_not_cached_cannot_be_found_without_a_network(tmp_path: Path) -> None:
    for env, why in (({}, "the Hub cannot be reached"), ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set")):
        _, error = find("acme/tiny", "http://127.0.0.1:9", tmp_path, **env)
        assert f"a cached repository, because {why} and {tmp_path / 'hub'} has none" in error
        assert "run `hf download acme/tiny` with `--local-dir DIR`, copy DIR to this machine, and give its" in error


def test_a_full_disk_names_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(ModelError, match=r"expected free space in the cache folder .*hub; HF_HOME names another one"):
        find_model("acme/tiny")


def test_a_folder_comes_before_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    assert is_on_hub("acme/tiny")
    monkeypatch.chdir(tmp_path)
    assert not is_on_hub("acme/tiny")
    assert find_model("acme/tiny") == str(tmp_path / "acme" / "tiny")
    assert model_name("acme/tiny") == "tiny"


@pytest.mark.parametrize("model", ["nothing", "/a/b/c", "a/b/c", "../x", "", "a/..", "a/b@", "org/name\n", "-/x/"])
def test_other_texts_are_not_repository_names(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # nothing is beside it
    with pytest.raises(ModelError, match="expected a folder of a Hugging Face checkpoint, a name on its Hub"):
        find_model(model)


def test_a_gguf_file_is_rejected_with_the_way_to_convert_it(tmp_path: Path) -> None:
    (tmp_path / "q4.gguf").write_bytes(b"GGUF")
    for model in (str(tmp_path / "q4.gguf"), "acme/q4.GGUF"):
        with pytest.raises(ModelError, match="transformers converts a GGUF file"):
            find_model(model)


def test_toys_and_snapshots_have_their_names() -> None:
    assert find_model("toy") == model_name("toy") == "toy"
    assert model_name("acme/tiny@main") == "acme/tiny"
    assert model_name(f"/cache/hub/models--acme--tiny-2.5/snapshots/{COMMIT}") == "acme/tiny-2.5"
    assert model_name(f"/cache/other/snapshots/{COMMIT}") == COMMIT


def test_a_folder_with_only_gguf_says_so(tmp_path: Path) -> None:
    (tmp_path / "q4.GGUF").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"with only GGUF \(q4.GGUF\), expected safetensors; transformers converts"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert find_model(str(tmp_path)) == str(tmp_path)  # random weights are possible
    with pytest.raises(ModelError, match="with only GGUF"):
        open_checkpoint(tmp_path)


def test_a_file_in_place_of_a_folder_names_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x")
    with pytest.raises(ModelError, match=f"a file, expected the folder that holds it: {tmp_path}"):
        find_model(str(file))


@pytest.mark.parametrize("model", ["llama3.2:3b", "qwen3:latest", "hf.co/acme/tiny:Q4_K_M", "user/model:7b"])
def test_names_of_ollama_get_a_hint(model: str) -> None:
    with pytest.raises(ModelError, match=r"find the model on huggingface\.co and give its org/name"):
        find_model(model)


@pytest.mark.parametrize("model", ["x" * 5000, "a\0b"])
def test_impossible_paths_are_errors_of_one_line(model: str) -> None:
    with pytest.raises(ModelError) as caught:
        find_model(model)
    assert len(str(caught.value)) < 600
