"""Files of others are measured before they are believed: no device, no pipe, no endless or deep content."""

import ast
import contextlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve import bounded_file, profiles
from pdserve.cli.generate import _text
from pdserve.client.connect import Tls
from pdserve.config import from_env
from pdserve.core.cost.profile import parse_profile
from pdserve.core.errors import ConfigError, ModelError
from pdserve.engine.load.checkpoint_files import open_checkpoint
from pdserve.engine.model.config import parse_config, read_config
from pdserve.key_file_access import read_bytes as read_key_file
from pdserve.launch import settings
from pdserve.launch.settings import bundled_model
from pdserve.structured.compile import Compiler
from pdserve.text.chat import read_templates
from pdserve.text.sampling_defaults import read_sampling_defaults
from pdserve.text.tokenizer import load_tokenizer
from pdserve.tls.certificates import ReloadingCertificates, TlsFiles
from router.recording.replay_command import RecordedLines
from simulator.traces.files import FileTrace

ROOT = Path(__file__).parents[2]


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b"{")
        file.truncate(2**40)  # sparse


def deep(path: Path) -> None:
    path.write_bytes(b'{"a":' * 200_000)


def nested(path: Path) -> None:
    """Deep, but valid, and not too deep for Python."""
    path.write_bytes(b'{"architectures":' + b"[" * 400 + b"]" * 400 + b"}")


def lost_link(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


WRONG = [device, pipe, folder, huge, deep, nested, lost_link]


def in_model(name: str, read: Callable[[Path], object]) -> Any:
    """The reader, given a copy of the bundled model whose file `name` is wrong."""

    def reads(tmp_path: Path, wrong: Callable[[Path], None]) -> None:
        model = tmp_path / "model"
        model.mkdir()
        for path in bundled_model().iterdir():
            if path.name != name:
                (model / path.name).symlink_to(path)
        (model / name).parent.mkdir(exist_ok=True)
        wrong(model / name)
        read(model)

    return reads


def alone(read: Callable[[Path], object]) -> Any:
    def reads(tmp_path: Path, wrong: Callable[[Path], None]) -> None:
        wrong(tmp_path / "file")
        read(tmp_path / "file")

    return reads


READERS = {
    "config.json": in_model("config.json", read_config),
    "generation_config.json": in_model("generation_config.json", read_config),
    "sampling defaults": in_model("generation_config.json", read_sampling_defaults),
    "tokenizer.json": in_model("tokenizer.json", lambda model: load_tokenizer(str(model))),
    "tokenizer_config.json": in_model("tokenizer_config.json", lambda model: load_tokenizer(str(model))),
    "tokenizer.json of grammars": in_model("tokenizer.json", lambda model: Compiler(model, 384, [0])),
    "model.safetensors": in_model("model.safetensors", open_checkpoint),
    "index": in_model("model.safetensors.index.json", open_checkpoint),
    "profile": alone(lambda path: profiles.load_profile(str(path))),
    "settings": alone(lambda path: settings.read({}, path, ())),
    "key file": alone(lambda path: settings.read({"key_file": str(path)}, None, ())),
    "certificate": alone(lambda path: ReloadingCertificates(TlsFiles(ca=str(path)))),
    "certificate of a client": alone(lambda path: Tls.from_files(ca=path)),
    "recording": alone(lambda path: [json.loads(line) for line in RecordedLines(path)]),
    "trace": alone(lambda path: list(FileTrace(path))),
}
TEXTS = {
    "secret": alone(lambda path: from_env("PDSERVE_TOKEN", {"PDSERVE_TOKEN_FILE": str(path)})),
    "key file": alone(read_key_file),
    "chat_template.jinja": in_model("chat_template.jinja", read_templates),
    "tool_use.jinja": in_model("additional_chat_templates/tool_use.jinja", read_templates),
}


@pytest.mark.parametrize(
    ("name", "wrong"),
    # router.recording.replay parses the lines of a recording.
    [(name, one) for name in READERS for one in WRONG if name != "recording" or one not in (deep, nested, huge)],
)
def test_a_wrong_file_is_a_typed_error(name: str, wrong: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        READERS[name](tmp_path, wrong)


@pytest.mark.parametrize("wrong", [device, pipe, folder, huge, lost_link])
@pytest.mark.parametrize("name", TEXTS)
def test_a_wrong_text_file_is_a_typed_error(name: str, wrong: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        TEXTS[name](tmp_path, wrong)


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    for path in bundled_model().iterdir():
        (tmp_path / path.name).symlink_to(path)
    assert read_config(tmp_path) == read_config(bundled_model())
    assert open_checkpoint(tmp_path).tensors.keys() == open_checkpoint(bundled_model()).tensors.keys()


LLAMA = json.loads((bundled_model() / "config.json").read_text())
ROPE = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "rope_theta"}
BAD = [
    -1,
    0,
    True,
    1.5,
    10**9,
    10**18,
    10**400,
    float("nan"),
    float("inf"),
    -0.0,
    "7",
    [],
    [[]],
    {},
    [{}],
    [None],
    {"a": []},
]


@pytest.mark.parametrize("field", sorted({*LLAMA, "quantization_config", "head_dim", "rope_scaling", "layer_types"}))
def test_any_value_of_a_config_is_served_or_refused(field: str) -> None:
    for value in BAD:
        for values, generation in ((LLAMA | {field: value}, {}), (LLAMA, {field: value})):
            with contextlib.suppress(ModelError):
                parse_config(values, generation)
    for kind in ("linear", "dynamic", "llama3", "yarn"):
        whole = {"rope_type": kind, **dict.fromkeys(ROPE, 8.0), "original_max_position_embeddings": 64}
        for name in ROPE:
            for value in BAD:
                with_it = {key: one for key, one in LLAMA.items() if not key.startswith("rope")}
                with contextlib.suppress(ModelError):
                    parse_config(with_it | {"rope_scaling": whole | {name: value}}, {})


@pytest.mark.parametrize(
    "own",
    [
        {"num_hidden_layers": 10**9},
        {"vocab_size": 10**12},
        {"hidden_size": 2**20, "intermediate_size": 2**20, "num_hidden_layers": 2048},
    ],
)
def test_a_model_that_no_host_holds_is_refused(own: dict[str, int]) -> None:
    with pytest.raises(ModelError, match=r"expected (an integer from|at most)"):
        parse_config(LLAMA | own, {})


def tensors(header: object, path: Path, size: int = 0) -> Path:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path.write_bytes(struct.pack("<Q", size or len(text)) + text)
    return path.parent


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [10**4000] * 50, "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1] * 100_000, "data_offsets": [0, 4]},
        {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]},
        {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": "1", "data_offsets": "01"},
        {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 2**64]},
        {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]},
        [],
        None,
    ],
)
def test_a_wrong_tensor_is_refused(entry: object, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        open_checkpoint(tensors({"x": entry}, tmp_path / "model.safetensors"))


@pytest.mark.parametrize("size", [2**63, 2**64 - 1, 2**40])
def test_a_header_larger_than_its_file_is_refused(size: int, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="truncated"):
        open_checkpoint(tensors({}, tmp_path / "model.safetensors", size))


@pytest.mark.parametrize("weight_map", [{"x": "a/b"}, {"x": "\0"}, {"x": "a" * 5000}, {"x": 1}, [], {}, {"x": ".."}])
def test_a_wrong_index_is_refused(weight_map: object, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError):
        open_checkpoint(tmp_path)


def test_any_value_of_a_profile_is_read_or_refused() -> None:
    [path] = profiles.FOLDER.glob("h100*.json")
    known = json.loads(path.read_text())

    def places(value: object, at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        inner = (
            [one for key, held in value.items() for one in places(held, (*at, key))] if isinstance(value, dict) else []
        )
        return [at, *inner] if at else inner

    for at in places(known):
        for bad in BAD:
            data = json.loads(path.read_text())
            target = data
            for key in at[:-1]:
                target = target[key]
            target[at[-1]] = bad
            with contextlib.suppress(ConfigError):
                parse_profile(data, 0)


@pytest.mark.parametrize("text", [f"a = {'[' * 5000}", f"prefill = 0x{'f' * 5000}", f"prefill = {'9' * 5000}", "\0"])
def test_a_wrong_settings_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ConfigError):
        settings.read({}, tmp_path / "file", ())
    with pytest.raises(ConfigError):
        settings.read({}, None, (text.replace(" ", ""),))


def test_a_text_that_a_flag_names_is_a_regular_file() -> None:
    with pytest.raises(Exception, match="regular file"):
        _text("@/dev/zero")


def test_a_command_ends_with_one_line(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    deep(model / "config.json")
    words = [sys.executable, "-m", "pdserve", "up", "--model", str(model)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    assert "config.json" in ended.stderr
    assert "Traceback" not in ended.stderr


#: Modules that open files by other means, and which: files of the system or of pdserve itself, or files to write.
OWN = {
    "pdserve/bounded_file.py",
    *("pdserve/plot_flag.py", "pdserve/engine/memory/host.py", "pdserve/launch/ports.py"),  # /proc, /sys
    "pdserve/isolated/tied_program.py",  # /proc
    *("pdserve/launch/ports.py", "kvtransfer/transports/common/slots.py", "kvtransfer/checks.py"),
    *("pdserve/structured/checker.py", "pdserve/cli/main.py", "pdserve/image_check.py"),
    "pdserve/gateway/ui/page.py",  # in the package
    *("pdserve/engine/cpu/kernels/jit.py", "pdserve/owned_folder.py"),
    *("pdserve/plot_flag.py", "pdserve/launch/report.py", "simulator/commands/simulation.py"),  # written
    *("pdserve/tls/authority.py", "pdserve/launch/confine.py", "router/recording/recording.py"),
    "pdserve/launch/with_ray.py",
    "pdserve/engine/memory/block_files.py",  # in a private folder, checked as its own
    "pdserve/engine/memory/object_stores/files.py",  # so many bytes of a regular file, which are authenticated
    *("pdserve/key_file_access.py", "pdserve/isolated/child.py"),  # a folder, for its lock; /dev/null
}


def test_files_of_others_are_opened_by_one_module_only() -> None:
    opening = set()
    for package in ("pdserve", "router", "prefill_worker", "decode_worker", "kvtransfer", "simulator"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call):
                    continue
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name not in ("open", "load", "read_text", "read_bytes", "from_file"):
                    continue  # to unparse all calls takes seconds
                called = ast.unparse(node.func)
                named = called in ("open", "os.open", "json.load", "tomllib.load", "pickle.load")
                held = isinstance(node.func, ast.Attribute) and name in ("read_text", "read_bytes", "from_file")
                path_opened = called.endswith(("path.open", "Path(path).open", ".file.open", "_path.open"))
                if (named or held or path_opened) and not called.startswith("bounded_file."):
                    opening.add(str(path.relative_to(ROOT)))
    assert opening <= OWN, sorted(opening - OWN)


def test_a_file_that_grows_is_read_only_to_its_limit() -> None:
    with pytest.raises(ConfigError, match="at most 10 bytes"):
        bounded_file.read_bytes("/proc/self/status", 10, "file")


@pytest.mark.parametrize("folder", ["/dev/fd", "/proc/self/fd"])
def test_a_pipe_of_the_shell_is_read(folder: str) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"a secret\n")
    os.close(writer)
    try:
        assert from_env("PDSERVE_TOKEN", {"PDSERVE_TOKEN_FILE": f"{folder}/{reader}"}) == "a secret"
    finally:
        os.close(reader)
