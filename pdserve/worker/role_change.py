"""Decides whether a running worker can take the other role, and asks it to, for the launcher.

The program of the role is exchanged in the worker's process (host.py). Weights, kernels, KV pool and prefix cache stay,
so this works if the engine would be the same one in both roles.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import typing
from collections.abc import Mapping
from typing import Final, TypeAlias

import grpc.aio

from pdserve.config import GatewayConfig, RouterConfig, WorkerConfig
from pdserve.core.access.proof import ClusterSecret, Identity
from pdserve.core.errors import ConfigError, InvalidRequest, PdserveError, shortened
from pdserve.core.types import Role
from pdserve.engine.interface import Engine
from pdserve.engine.load_engine import BUILT_IN, VLLM, engine_name
from pdserve.tls.certificates import certificates_of
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from pdserve.wire import peers
from pdserve.wire.convert import role_to_proto
from pdserve.wire.peer_server import channel_options, peer_channel_aio

# --- settings -------------------------------------------------------------------------------------------------

#: Settings that only the program of a role reads. Every other one belongs to the process or to its engine.
OF_PROGRAM: Final = frozenset(
    {
        "async_scheduling",
        "drain_s",
        "inbox_depth",
        "kv_check",
        "kv_pull",
        "kv_wire",
        "max_batch",
        "max_batch_tokens",
        "max_drafts",
        "push",
        "speculation",
        "stall_s",
        "transport",
    }
)
#: vLLM sizes its buffers for them.
_OF_VLLM: Final = frozenset({"max_batch", "max_batch_tokens", "max_drafts", "speculation"})
_MARKED: Final = "toy-marked"  # a prefill worker's engine computes other KV than a decode worker's
MAX_SETTINGS: Final = 256
MAX_VALUE_CHARS: Final = 4096


def differing(before: WorkerConfig, after: WorkerConfig) -> dict[str, str]:
    """The settings that have other values in `after`; without values that only a new process could take."""
    names = [one.name for one in dataclasses.fields(before) if getattr(before, one.name) != getattr(after, one.name)]
    return {name: str(getattr(after, name)) if name in OF_PROGRAM else "" for name in names}


def with_settings(config: WorkerConfig, changed: Mapping[str, str]) -> WorkerConfig:
    """Ignores settings that are not of the program. Raises ConfigError and InvalidRequest."""
    if len(changed) > MAX_SETTINGS:
        raise InvalidRequest("settings", f"{len(changed)} settings", f"at most {MAX_SETTINGS}")
    hints = typing.get_type_hints(WorkerConfig)
    values = {}
    for name in sorted(changed.keys() & OF_PROGRAM):
        text = changed[name]
        try:
            values[name] = hints[name](text[:MAX_VALUE_CHARS])
        except ValueError:
            raise ConfigError(name, repr(shortened(text)), f"a value of type {hints[name].__name__}") from None
    return dataclasses.replace(config, **values)


def needs_restart(config: WorkerConfig, engine: Engine, changed: Mapping[str, str]) -> list[str]:
    """The settings for which the worker's process cannot take the other role; none: it can. `config`: of the running
    process. `changed`: those with other values in that role."""
    names = set(changed.keys() - OF_PROGRAM)
    name = engine_name(config.engine, config.model)
    if name == VLLM:
        names |= changed.keys() & _OF_VLLM
    if name not in BUILT_IN:  # an engine of another distribution may depend on the role
        names.add("engine")
    if config.model == _MARKED:
        names.add("model")
    if not engine.pool.is_on_host:  # a GPU's graphs, largest steps and so its pool depend on the role
        names.add("device")
    if getattr(engine, "rank_addresses", ()):  # each rank sends or receives the KV of its own pool, from its start on
        names.add("rank_pools")
    return sorted(names)


# --- the launcher's call --------------------------------------------------------------------------------------

DIAL_S: Final = 5.0
CHANGE_S: Final = 60.0  # twice what a worker allows itself
_MAX_MESSAGE_BYTES: Final = 2**20
Config: TypeAlias = WorkerConfig | RouterConfig | GatewayConfig  # of a process


async def change_role(endpoint: str, role: Role, before: Config, after: Config) -> str:
    """Why the worker at `endpoint` has not taken the role; empty if it has. It may be ending if it gives no reason.

    `before` and `after`: its settings in its role, and in the new one.
    """
    assert isinstance(before, WorkerConfig)
    assert isinstance(after, WorkerConfig)
    request = worker_pb2.ChangeRoleRequest(role=role_to_proto(role), settings=differing(before, after))
    try:
        identity = Identity.of(ClusterSecret(after.cluster_secret), "launcher", "launcher", secrets.token_hex(8))
        introduction = peers.introduce(identity, peers.CHANGE_ROLE, endpoint)
        tls = certificates_of(after, is_mutual=True)
        async with peer_channel_aio(introduction.target, tls, channel_options(_MAX_MESSAGE_BYTES)) as channel:
            async with asyncio.timeout(DIAL_S):
                metadata = await peers.prove(channel, introduction)
            call = worker_pb2_grpc.WorkerServiceStub(channel).ChangeRole(request, metadata=metadata, timeout=CHANGE_S)
            await peers.check_call(introduction, call)
            response = await call
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    except TimeoutError:
        return f"no answer within {DIAL_S:g} s"
    except PdserveError as error:
        return error.message
    return " and ".join(response.needs_restart)
