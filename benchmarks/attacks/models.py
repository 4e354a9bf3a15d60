"""Rows of models: chat templates and tokenizers without an end, and folders whose files are no model's."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.attacks.harness import MAX_WAIT_S, AttackResult, AttackRow, AttackTarget, Beside, callers
from pdserve import Client, Retries
from pdserve.launch.running import Running
from pdserve.launch.settings import bundled_model

NUM_CALLERS: Final = 6
MAX_STOP_S: Final = 15.0
PAUSE_S: Final = 0.1
MAX_START_S: Final = 60.0
MAX_BYTES: Final = 2**30  # of the largest child


def changed_model(folder: Path, name: str) -> Path:
    """The bundled model in `folder`, without its file `name`, whose path is returned."""
    for path in bundled_model().iterdir():
        if path.name != name:
            (folder / path.name).symlink_to(path)
    return folder / name


def attack_model(
    name: str, change: Callable[[dict[str, Any]], None], bad: Callable[[int], str], seconds: float
) -> AttackResult:
    """Attacks a cluster with the bundled model, whose file `name` is changed, by chats with the texts of `bad`. It is a
    cluster of its own, because the benchmark's has another model. Meanwhile another caller sends usual chats."""

    def ask(client: Client, text: str) -> None:
        client.generate([{"role": "user", "content": text}], max_tokens=1)

    with tempfile.TemporaryDirectory(prefix="pdserve-attack-") as folder:
        held = json.loads((bundled_model() / name).read_text())
        change(held)
        changed_model(Path(folder), name).write_text(json.dumps(held))
        cluster = Running.start("--model", folder)
        try:
            with (
                callers(NUM_CALLERS, cluster.target, None, lambda client, number: ask(client, bad(number))) as errors,
                Client(cluster.target, retries=Retries(limit=0)) as other,
                Beside(lambda: ask(other, f"def f{time.monotonic_ns()}"), PAUSE_S) as beside,
            ):
                time.sleep(seconds)
            began_s = time.monotonic()
        finally:
            cluster.stop()
        stop_s = time.monotonic() - began_s
    attempts, served = errors.total(), errors["served"]
    complaints = beside.complaints("chats of another caller", MAX_WAIT_S)
    if served or not attempts:
        complaints.append(f"{served} of {attempts} chats without an end were served")
    if stop_s > MAX_STOP_S:
        complaints.append(f"the cluster stopped after {stop_s:.1f} s")
    return AttackResult(
        attempts=attempts,
        rejected=attempts - served,
        errors=errors,
        note=f"{len(beside.took_s)} chats of another caller took {beside.longest_s * 1e3:.0f} ms at most",
        complaints=complaints,
    )


# ---- Row 23. Before the fix, three such chats stopped every chat of every caller.
_BODIES: Final = (
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{{ 'x' | center(2000000000) }}",
    "{{ '%2000000000s' % 'x' }}",
    "{{ lipsum(100000) | length }}",
    "{{ 9 ** 999999999 }}",
)
_CASES: Final = "".join(f"{{% if 'BAD{at}' in m.content %}}{body}{{% endif %}}" for at, body in enumerate(_BODIES))
_TEMPLATE: Final = f"{{% for m in messages %}}{_CASES}{{{{ m.content }}}}{{% endfor %}}"


def endless_templates(target: AttackTarget) -> AttackResult:
    """Chats for which the model's chat template has no end, or takes all memory."""

    def change(config: dict[str, Any]) -> None:
        config["chat_template"] = _TEMPLATE

    return attack_model(
        "tokenizer_config.json", change, lambda number: f"BAD{number % len(_BODIES)} {number}", target.seconds
    )


# ---- Row 24. Before the fix, one such chat took a thread of the router until its end, and the pattern never ended.
_BACKTRACKING: Final = {
    "type": "Split", "pattern": {"Regex": "(?:a|a)*$"}, "behavior": "Isolated", "invert": False,
}  # fmt: skip


def endless_patterns(target: AttackTarget) -> AttackResult:
    """Chats for which a pattern of the model's tokenizer.json backtracks without an end."""

    def change(tokenizer: dict[str, Any]) -> None:
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [_BACKTRACKING, tokenizer["pre_tokenizer"]]}

    return attack_model("tokenizer.json", change, lambda number: "a" * 60 + f"!{number}", target.seconds)


# ---- Row 25. The attacker has no access to the cluster: an operator starts `pdserve up` with the folder of a stranger.
def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _deep(path: Path) -> None:
    path.write_bytes(b"[" * 1_000_000)


def _sparse(path: Path) -> None:
    path.write_bytes(b"{")
    os.truncate(path, 2**40)


def _layers(path: Path) -> None:
    known = json.loads((bundled_model() / "config.json").read_text())
    path.write_text(json.dumps(known | {"num_hidden_layers": 10**9}))


WRONG: Final[tuple[tuple[str, Callable[[Path], None]], ...]] = (
    *((name, wrong) for name in ("config.json", "tokenizer.json") for wrong in (_device, _pipe, _deep, _sparse)),
    ("config.json", _layers),
    *(("generation_config.json", wrong) for wrong in (_device, _pipe)),
)


def model_folders(target: AttackTarget) -> AttackResult:
    """Files that are devices, pipes, endless or impossible. Each is refused with one line, at once."""
    errors: Counter[str] = Counter()
    complaints: list[str] = []
    for name, wrong in WRONG:
        with tempfile.TemporaryDirectory() as folder:
            wrong(changed_model(Path(folder), name))
            words = [sys.executable, "-m", "pdserve", "up", "--port", "0", "--model", folder]
            what = f"{name} {wrong.__name__[1:]}"
            try:
                ended = subprocess.run(words, capture_output=True, text=True, timeout=MAX_START_S, check=False)
            except subprocess.TimeoutExpired:
                complaints.append(f"{what}: no end within {MAX_START_S:.0f} s")
                continue
        if ended.returncode and ": error: " in ended.stderr and "Traceback" not in ended.stderr:
            errors["MODEL"] += 1
        else:
            complaints.append(f"{what}: status {ended.returncode}, {ended.stderr[-200:]!r}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    if used > MAX_BYTES:
        complaints.append(f"a child took {used} bytes")
    return AttackResult(
        attempts=len(WRONG), rejected=errors["MODEL"], errors=errors, complaints=complaints, note="no cluster"
    )


ROWS: Final = (
    AttackRow(number=23, name="chat templates without an end", attack=endless_templates),
    AttackRow(number=24, name="patterns of a tokenizer without an end", attack=endless_patterns),
    AttackRow(number=25, name="model folders that are no models", attack=model_folders),
)
