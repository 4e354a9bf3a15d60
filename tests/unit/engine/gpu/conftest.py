"""Kernels run on a CUDA device where there is one, and else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.interpreter import prepare

torch.set_num_threads(1)
DEVICE = prepare()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return DEVICE
