"""Defaults for batch, chunk and speculation that depend on the device."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.config import WorkerConfig
from pdserve.core.types import Role
from pdserve.engine.memory.plan import with_device_defaults


def of(role: Role, *, is_gpu: bool, **settings: Any) -> tuple[int, int, str]:
    config = WorkerConfig(model="toy", worker_id="w", **settings)
    found = with_device_defaults(config, role, is_gpu=is_gpu)
    assert with_device_defaults(found, role, is_gpu=not is_gpu) == found, "what is chosen once stays"
    return found.max_batch, found.max_batch_tokens, found.speculation


@pytest.mark.parametrize(
    ("role", "is_gpu", "chosen"),
    [
        (Role.PREFILL, True, (256, 2048, "off")),
        (Role.DECODE, True, (256, 512, "off")),
        (Role.PREFILL, False, (64, 512, "ngram")),
        (Role.DECODE, False, (64, 512, "ngram")),
    ],
)
def test_the_device_decides(role: Role, is_gpu: bool, chosen: tuple[int, int, str]) -> None:
    assert of(role, is_gpu=is_gpu) == chosen


@pytest.mark.parametrize("is_gpu", [True, False])
@pytest.mark.parametrize("role", list(Role))
def test_explicit_settings_win(role: Role, is_gpu: bool) -> None:
    given = {"max_batch": 7, "max_batch_tokens": 99, "speculation": "ngram"}
    assert of(role, is_gpu=is_gpu, **given) == (7, 99, "ngram")
    assert of(role, is_gpu=is_gpu, **{**given, "speculation": "off"}) == (7, 99, "off")
