"""Which engine the workers of this host run, and in which environment: vLLM's pins exclude ours, so whole workers run
with another Python, which `make vllm-env` makes."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import pdserve
from pdserve.core.errors import ConfigError, ModelError
from pdserve.core.setting import AUTO
from pdserve.engine.load_engine import OURS, VLLM
from pdserve.engine.model.config import read_config
from pdserve.launch.keys import Kind
from pdserve.model_source import TOY_MODELS

_TABLES: Final[tuple[Kind, ...]] = ("worker", "prefill_worker", "decode_worker")
_ENVIRONMENT: Final = ".venv-vllm"  # of the checkout
_MAKE: Final = f"run `make vllm-env` in the checkout, which makes {_ENVIRONMENT}"


def vllm_python() -> str | None:
    """The Python that has vLLM: this one, or that of the checkout's environment; None if neither has."""
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    python = Path(pdserve.__file__).parents[1] / _ENVIRONMENT / "bin" / "python"
    return str(python) if os.access(python, os.X_OK) else None


def choose_engines(tables: dict[Kind, dict[str, Any]], model: str, engines: Collection[str]) -> None:
    """Replaces `auto` in the tables by vLLM's engine for a model that only vLLM serves, and adds the Python of vLLM's
    workers. `engines`: of the workers that are started.

    Raises ModelError if no engine of this host serves the model, and ConfigError for an absent Python.
    """
    if set(engines) <= OURS and model not in TOY_MODELS:
        try:
            read_config(Path(model))
        except ModelError as error:
            if not error.field.endswith("architectures") or set(engines) != {AUTO}:
                raise
            if vllm_python() is None:
                expected = f"{error.expected}; vLLM may serve other models: {_MAKE}"
                raise ModelError(error.field, error.seen, expected) from error
            engines = {VLLM}
            for table in _TABLES:
                if table == "worker" or "engine" in tables.get(table, {}):
                    tables.setdefault(table, {})["engine"] = VLLM
    for table in _TABLES:
        values = tables.get(table, {})
        if given := values.get("engine_python"):
            if not os.access(given, os.X_OK):
                raise ConfigError(
                    f"{table}.engine_python", given, f"the python of an environment with pdserve; {_MAKE}"
                )
        elif values.get("engine") == VLLM and VLLM in engines:
            found = vllm_python()
            if found is None:
                raise ConfigError(f"{table}.engine", VLLM, f"vLLM: {_MAKE}, or set {table}.engine_python")
            if found != sys.executable:
                values["engine_python"] = found
