"""Row 24: callers send chats for which a pattern of the model's tokenizer.json backtracks without an end.

Before the fix, one such chat took a thread of the router until its end, and the pattern never ended.
"""

from __future__ import annotations

from typing import Any, Final

from benchmarks.attacks.endless_templates import attack_model
from benchmarks.attacks.row import AttackResult, AttackRow, AttackTarget

_BACKTRACKING: Final = {
    "type": "Split", "pattern": {"Regex": "(?:a|a)*$"}, "behavior": "Isolated", "invert": False,
}  # fmt: skip


def attack(target: AttackTarget) -> AttackResult:
    def change(tokenizer: dict[str, Any]) -> None:
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [_BACKTRACKING, tokenizer["pre_tokenizer"]]}

    return attack_model("tokenizer.json", change, lambda number: "a" * 60 + f"!{number}", target.seconds)


ROW = AttackRow(number=24, name="patterns of a tokenizer without an end", attack=attack)
