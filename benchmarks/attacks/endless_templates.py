"""Row 23: callers send chats for which the model's chat template has no end, or takes all memory.

Attacks a cluster of its own, because the benchmark's model has another template. Meanwhile another caller sends usual
chats. Before the fix, three such chats stopped every chat of every caller.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.attacks.row import MAX_WAIT_S, AttackResult, AttackRow, AttackTarget
from pdserve import Client, PdserveError, Retries
from pdserve.launch.running import Running
from pdserve.launch.settings import bundled_model

NUM_CALLERS: Final = 6
MAX_STOP_S: Final = 15.0
PAUSE_S: Final = 0.1
JOIN_S: Final = 60.0

_BODIES: Final = (
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{{ 'x' | center(2000000000) }}",
    "{{ '%2000000000s' % 'x' }}",
    "{{ lipsum(100000) | length }}",
    "{{ 9 ** 999999999 }}",
)
_CASES: Final = "".join(f"{{% if 'BAD{at}' in m.content %}}{body}{{% endif %}}" for at, body in enumerate(_BODIES))
_TEMPLATE: Final = f"{{% for m in messages %}}{_CASES}{{{{ m.content }}}}{{% endfor %}}"


def attack(target: AttackTarget) -> AttackResult:
    def change(config: dict[str, Any]) -> None:
        config["chat_template"] = _TEMPLATE

    return attack_model(
        "tokenizer_config.json", change, lambda number: f"BAD{number % len(_BODIES)} {number}", target.seconds
    )


def attack_model(
    name: str, change: Callable[[dict[str, Any]], None], bad: Callable[[int], str], seconds: float
) -> AttackResult:
    """Attacks a cluster with the bundled model, whose file `name` is changed, by chats with the texts of `bad`."""
    with tempfile.TemporaryDirectory(prefix="pdserve-attack-") as made:
        folder = Path(made, "model")
        folder.mkdir()
        for path in bundled_model().iterdir():
            if path.name != name:
                (folder / path.name).symlink_to(path)
        held = json.loads((bundled_model() / name).read_text())
        change(held)
        (folder / name).write_text(json.dumps(held))
        cluster = Running.start("--model", str(folder))
        try:
            errors, took_s, failures = _chats(cluster.target, bad, seconds)
            began_s = time.monotonic()
        finally:
            cluster.stop()
        stop_s = time.monotonic() - began_s
    attempts = errors.total()
    complaints = []
    if served := errors["served"]:
        complaints.append(f"{served} chats without an end were served")
    if failures:
        complaints.append(f"{len(failures)} chats of another caller failed, the first with {failures[0]}")
    if max(took_s) > MAX_WAIT_S:
        complaints.append(f"a chat of another caller took {max(took_s):.2f} s, over {MAX_WAIT_S:g} s")
    if stop_s > MAX_STOP_S:
        complaints.append(f"the cluster stopped after {stop_s:.1f} s")
    return AttackResult(
        attempts=attempts,
        rejected=attempts - served,
        errors=errors,
        note=f"{len(took_s)} chats of another caller took {max(took_s) * 1e3:.0f} ms at most",
        complaints=tuple(complaints),
    )


def _chats(router: str, bad: Callable[[int], str], seconds: float) -> tuple[Counter[str], list[float], list[str]]:
    errors: Counter[str] = Counter()
    lock = threading.Lock()
    is_over = threading.Event()
    numbers = itertools.count()

    def ask(client: Client, text: str) -> str:
        try:
            client.generate([{"role": "user", "content": text}], max_tokens=1)
        except PdserveError as error:
            return error.reason
        return "served"

    def attacks() -> None:
        with Client(router, retries=Retries(limit=0)) as client:
            while not is_over.is_set():
                said = ask(client, bad(next(numbers)))
                with lock:
                    errors[said] += 1

    callers = [threading.Thread(target=attacks, daemon=True) for _ in range(NUM_CALLERS)]
    for caller in callers:
        caller.start()
    took_s: list[float] = []
    failures: list[str] = []
    ends_s = time.monotonic() + seconds
    with Client(router, retries=Retries(limit=0)) as client:
        while time.monotonic() < ends_s:
            time.sleep(PAUSE_S)
            began_s = time.monotonic()
            if (said := ask(client, f"def f{len(took_s)}")) != "served":
                failures.append(said)
            took_s.append(time.monotonic() - began_s)
    is_over.set()
    for caller in callers:
        caller.join(JOIN_S)
    return errors, took_s, failures


ROW = AttackRow(number=23, name="chat templates without an end", attack=attack)
