"""The router's streams to all workers: one per endpoint, from a list and from the registry.

It decides which workers belong to the cluster: a worker must serve the same model, in the same form, as the attached
ones of its revision. It converts their messages to events for the runtime, and passes their logs and KV links to
worker_reports.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, final

from pdserve.build import FULL_VERSION
from pdserve.core.access.proof import Identity
from pdserve.core.errors import ConfigError, InvalidRequest, shortened
from pdserve.core.grammar import is_older_library
from pdserve.core.installation import MAX_CHARS, is_compatible, mismatch
from pdserve.core.kv.blocks import CacheChange
from pdserve.core.kv.hashing import HASH_BYTES
from pdserve.core.kv.tier_reads import known_tiers
from pdserve.core.setting import NAME
from pdserve.core.types import Role
from pdserve.outage_log import OutageLog, PeerLog
from pdserve.prefix.index import PrefixIndex
from pdserve.tls.certificates import ReloadingCertificates
from pdserve.v1 import worker_pb2
from pdserve.wire.codec import Codec
from pdserve.wire.protocol import COST, FINGERPRINT, decode_response
from router.service.adapters import ClusterAdapters, read_report
from router.service.model import ModelFacts, difference, facts_of
from router.service.worker_reports import KvLinks, WorkerLogs
from router.service.worker_stream import SILENCE_S, WorkerPacing, WorkerStream
from router.state.interface import AdaptersChanged, Event, WorkerConnected, WorkerForgotten, WorkerLost

log = logging.getLogger(__name__)

MAX_WORKERS: Final = 4096
REDIAL_S: Final = 10.0  # how long an unregistered worker is dialled after its stream has ended
_HELLO: Final = Codec(
    WorkerConnected,
    worker_pb2.WorkerHello,
    nested=(COST,),
    given=("endpoint", "block_bytes", "version", "adapters", "weights"),
    ignored=(
        "model",
        "fingerprint",
        "vocab_size",
        "eos_token_ids",
        "hash_seed",
        "reads_batches",
        "version",
        "adapters",
        "grammar_library",
    ),
)


@final
class Workers:
    """Used on one event loop. `on_event` is called in the order of each stream."""

    def __init__(
        self,
        hello: Callable[[], worker_pb2.RouterHello],
        on_event: Callable[[Event], None],
        *,
        identity: Identity,
        model_name: str,
        served_names: Sequence[str] = (),
        index: PrefixIndex | None = None,
        silence_s: float = SILENCE_S,
        redial_s: float = REDIAL_S,
        on_scored: Callable[[worker_pb2.PromptScored], None] = lambda message: None,
        on_change: Callable[[], None] = lambda: None,
        on_unproven: Callable[[], None] = lambda: None,
        on_crash: Callable[[BaseException], None] = lambda error: None,
        tls: ReloadingCertificates | None = None,
    ) -> None:
        """`model_name` is the name of the router's own model folder, which has the tokenizer. `served_names`
        replace it for callers. `index` receives KV
        events if routers share no index. A stream that is silent for `silence_s` is ended. An unregistered worker is
        dialled for `redial_s` after its stream has ended. `on_scored` receives prompt logprobs before the event of the
        first token. `on_change` is called when a worker connects or disconnects.
        `on_unproven` is called when a worker has not proven that it knows the secret of `identity`; such a worker
        receives no messages. Without `tls`, connections are in plain text."""
        self._identity = identity
        self._model_name = model_name
        self._names = tuple(served_names) or (model_name,)
        self._hello = hello
        self._on_event = on_event
        self._index = index
        self._silence_s = silence_s
        self._redial_s = redial_s
        self._on_scored = on_scored
        self._on_change = on_change
        self._on_unproven = on_unproven
        self._on_crash = on_crash
        self._tls = tls
        self._tasks: dict[str, tuple[WorkerStream, asyncio.Task[None]]] = {}  # by endpoint
        self._attached: dict[str, WorkerStream] = {}  # by worker id
        self._roles: dict[str, Role] = {}
        self._outages = OutageLog(log, "a worker is lost", "a worker is attached")
        self._lines = PeerLog(log)
        self._complaints: dict[str, str] = {}  # endpoint -> why its worker is rejected, to log it once
        self._static: tuple[str, ...] = ()
        self._registered: dict[str, str] = {}  # worker id -> endpoint
        # worker id -> endpoint, of workers that left the registry while attached
        self._unregistered: dict[str, str] = {}
        self._forgetting: dict[str, asyncio.TimerHandle] = {}  # of unregistered workers without a stream
        self._is_closing = False
        self.pacing = WorkerPacing(lambda message: [self.send(one, message) for one in list(self._attached)])
        self._contexts: dict[str, int] = {}  # maximum sequence length of each attached decode worker
        self._older_grammars: set[str] = set()  # attached workers with an older library of grammars
        self._facts: dict[str, ModelFacts] = {}  # of each attached worker
        self._most = 0  # tokens of a sequence, of the largest decode worker that was last attached
        self._models: dict[str, ModelFacts] = {}  # by weights; those of the most workers first
        self.links = KvLinks()
        self.logs = WorkerLogs(self.send)
        self.adapters = ClusterAdapters(self.send, lambda: () if self.model is None else self._names)
        self.num_invalid = 0  # messages with a value out of bounds

    @property
    def roles(self) -> Mapping[str, Role]:
        """Facts of the attached workers, by id."""
        return self._roles

    @property
    def models(self) -> Sequence[ModelFacts]:
        """For each of the weights that attached workers have; those of the most workers first. While no worker is
        attached, the last ones."""
        return list(self._models.values())

    @property
    def model(self) -> ModelFacts | None:
        return next(iter(self._models.values()), None)

    def model_with(self, weights: str) -> ModelFacts | None:
        """The first model if none has these weights."""
        return self._models.get(weights, self.model)

    @property
    def are_attached(self) -> bool:
        """Whether a decode worker and each known endpoint is attached."""
        return Role.DECODE in self._roles.values() and self._tasks.keys() <= {
            one.endpoint for one in self._attached.values()
        }

    @property
    def num_unregistered(self) -> int:
        """Number of attached workers that have left the registry."""
        return len(self._unregistered.keys() & self._attached.keys())

    def dial(self, endpoints: Iterable[str]) -> None:
        """Adds endpoints of workers that are known without a registry."""
        self.dial_only([*self._static, *endpoints])

    def dial_only(self, endpoints: Iterable[str]) -> None:
        """Replaces these endpoints. The worker of one that is gone has ended, and is forgotten, unless it is elsewhere
        by now. The registry lists it for some seconds more."""
        former, self._static = self._static, tuple(dict.fromkeys(endpoints))
        gone = []
        for endpoint in (one for one in former if one not in self._static and one in self._tasks):
            worker_id = self._tasks[endpoint][0].worker_id
            attached = self._attached.get(worker_id)
            is_elsewhere = attached is not None and attached.endpoint != endpoint
            if worker_id and not is_elsewhere and self._registered.get(worker_id, endpoint) == endpoint:
                self._registered.pop(worker_id, None)
                self._unregistered.pop(worker_id, None)
                gone.append(worker_id)
        self._reconcile()
        for worker_id in gone:
            self._on_event(WorkerForgotten(worker_id=worker_id))

    def register(self, endpoints: Mapping[str, str]) -> None:
        """Replaces the registry's content: worker id -> endpoint.

        A worker that leaves the registry stays while its stream is open, because a stream proves more than a
        registration: a Redis that is full, read-only or evicts keys loses the registrations of healthy workers.
        """
        former, self._registered = self._registered, dict(list(endpoints.items())[:MAX_WORKERS])
        for worker_id in self._registered:
            self._unregistered.pop(worker_id, None)
        gone = sorted(former.keys() - self._registered.keys())
        for worker_id in gone:
            if worker_id in self._attached:
                self._unregistered[worker_id] = former[worker_id]
                self._lines.warning("an attached worker left the registry; it stays", worker_id, worker_id=worker_id)
        self._reconcile()
        for worker_id in gone:
            if worker_id not in self._attached:
                self._on_event(WorkerForgotten(worker_id=worker_id))

    def send(self, worker_id: str, message: worker_pb2.AttachRequest) -> bool:
        stream = self._attached.get(worker_id)
        return stream is not None and stream.send(message)

    async def close(self) -> None:
        """Ends all streams without further reports."""
        self._is_closing = True
        tasks = [task for _, task in self._tasks.values()]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # -- reports of streams -------------------------------------------------------------------------------------

    def attached(self, stream: WorkerStream, hello: worker_pb2.WorkerHello) -> str | None:
        complaint = self._complaint(stream, hello)
        if complaint is not None:
            self._complain(stream.endpoint, complaint, hello.worker_id)
            return complaint
        self._complaints.pop(stream.endpoint, None)
        fingerprint = FINGERPRINT.decode(hello.fingerprint)
        block_bytes = fingerprint.block_bytes * fingerprint.shape.tp_degree
        version = hello.version[:MAX_CHARS]
        report = read_report(hello.adapters) if hello.HasField("adapters") else None
        event = _HELLO.decode(
            hello,
            endpoint=stream.endpoint,
            block_bytes=block_bytes,
            weights=fingerprint.engine,
            version=version,
            adapters=() if report is None else report.loaded,
        )
        former = self._attached.get(hello.worker_id)
        if former is not None:  # the new incarnation has connected before the stream of the old one ended
            self._lose(former, "another incarnation came")
            former.hang_up()
        self._attached[hello.worker_id] = stream
        if hello.worker_id in self._forgetting:
            self._forgetting.pop(hello.worker_id).cancel()
        self._roles[hello.worker_id] = event.role
        self._facts[hello.worker_id] = facts_of(hello, self._names)
        if event.role is Role.DECODE:
            self._contexts[hello.worker_id] = hello.max_context_tokens
        if is_older_library(hello.grammar_library):
            self._older_grammars.add(hello.worker_id)
        self._set_models()
        extra = {"worker_id": hello.worker_id, "role": event.role.value, "endpoint": stream.endpoint}
        extra["version"] = version
        self._outages.recovered(hello.worker_id, **extra)
        if version != FULL_VERSION:
            self._lines.warning(
                "a worker has another version or build", hello.worker_id, **extra, router_version=FULL_VERSION
            )
        self.send(hello.worker_id, self.pacing.message)
        self._on_event(event)
        self.adapters.reported(hello.worker_id, report)
        self._on_change()
        return None

    def received(self, stream: WorkerStream, message: worker_pb2.AttachResponse) -> None:
        if self._attached.get(stream.worker_id) is not stream:
            return
        try:
            match message.WhichOneof("message"):
                case "kv_events":
                    self._feed_index(stream, message.kv_events)
                    return
                case "prompt_scored":
                    self._on_scored(message.prompt_scored)
                    return
                case "kv_links":
                    self.links.reported(stream.worker_id, message.kv_links.links)
                    return
                case "log":
                    self.logs.reported(stream.worker_id, message.log.lines)
                    return
                case "adapters":
                    report = read_report(message.adapters)
                    self._on_event(AdaptersChanged(worker_id=stream.worker_id, adapters=report.loaded))
                    self.adapters.reported(stream.worker_id, report)
                    return
                case "adapter_loaded":
                    self.adapters.loaded(stream.worker_id, message.adapter_loaded)
                    return
            event = decode_response(stream.worker_id, message)
        except InvalidRequest as error:
            self.num_invalid += 1
            name = stream.worker_id
            self._lines.line(logging.ERROR, "a worker sent an invalid message", name, worker_id=name, why=error.message)
            stream.hang_up()
            return
        if event is not None:
            self._on_event(event)

    def detached(self, stream: WorkerStream, reason: str) -> None:
        if self._attached.get(stream.worker_id) is stream and not self._is_closing:
            self._outages.failed(stream.worker_id, worker_id=stream.worker_id, why=reason)
            self._lose(stream, reason)
            if stream.worker_id in self._unregistered:
                later = asyncio.get_running_loop().call_later
                self._forgetting[stream.worker_id] = later(self._redial_s, self._forget_unregistered, stream.worker_id)
            self._on_change()

    # ------------------------------------------------------------------------------------------------------------

    def _unproven(self, endpoint: str, why: str) -> None:
        self._on_unproven()
        self._complain(endpoint, why)

    def _complain(self, endpoint: str, why: str, worker_id: str = "") -> None:
        """Logs each cause once, for any number of connection attempts, unless causes change too often."""
        if self._complaints.get(endpoint) == why:
            return
        if self._lines.warning(
            "a worker is rejected", endpoint, worker_id=worker_id, endpoint=endpoint, why=shortened(why)
        ):
            self._complaints[endpoint] = why

    def _complaint(self, stream: WorkerStream, hello: worker_pb2.WorkerHello) -> str | None:
        if not hello.worker_id or not hello.incarnation:
            return "it does not name itself"
        former = self._attached.get(hello.worker_id)
        if former is not None and former.incarnation == hello.incarnation:
            return f"it is attached already, as {former.endpoint}"
        is_new_home = self._registered.get(hello.worker_id) == stream.endpoint
        if former is not None and former.endpoint != stream.endpoint and not is_new_home:
            return f"its id is that of the worker at {former.endpoint}; give each worker an id of its own"
        if not is_compatible(FULL_VERSION, hello.version):
            return mismatch(FULL_VERSION, hello.version)
        if hello.role not in (worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE):
            return f"its role {hello.role} is unknown to this router"
        if hello.max_context_tokens < 2:
            return f"its context window is {hello.max_context_tokens} tokens, expected at least 2"
        for name in ("block_size", "vocab_size", "num_blocks", "max_batch", "max_batch_tokens", "inbox_depth"):
            if getattr(hello, name) < 1:
                return f"its {name} is {getattr(hello, name)}, expected at least 1"
        if hello.revision and not NAME.fullmatch(hello.revision):
            return f"its revision has {len(hello.revision)} characters, expected 1 to 128 letters, digits, . - or _"
        if hello.model != self._model_name and not hello.revision:
            return f"it serves {hello.model!r}, this router tokenizes for {self._model_name!r}"
        try:
            facts = facts_of(hello, self._names)
            read_report(hello.adapters)
        except (ConfigError, InvalidRequest) as error:
            return f"its {error.message}"
        own = (one for one in self._facts.values() if one.revision == facts.revision)
        other = next(own, self.model if self._attached else None)
        return None if other is None else difference(other, facts)

    def _set_models(self) -> None:
        """While no decode worker is attached, the last context limit is kept; requests then fail for another reason. A
        request with a grammar may go to any worker, so all must follow it."""
        if not self._facts:
            return
        self._most = max(self._contexts.values(), default=self._most)
        counts = Counter(one.weights for one in self._facts.values())
        kept = list(self._models)  # of equal numbers, the former order
        order = sorted(counts, key=lambda one: (-counts[one], kept.index(one) if one in kept else len(kept)))
        first = {one.weights: one for one in reversed(self._facts.values())}
        self._models = {
            weights: replace(
                first[weights],
                max_context_tokens=self._most or first[weights].max_context_tokens,
                has_older_grammars=bool(self._older_grammars),
            )
            for weights in order
        }

    def _forget_unregistered(self, worker_id: str) -> None:
        """Forgets a worker whose stream did not come back, unless it has registered again."""
        del self._forgetting[worker_id]
        if self._unregistered.pop(worker_id, None) is not None and not self._is_closing:
            self._reconcile()
            self._on_event(WorkerForgotten(worker_id=worker_id))

    def _lose(self, stream: WorkerStream, reason: str) -> None:
        del self._attached[stream.worker_id]
        self._roles.pop(stream.worker_id, None)
        self.links.forget(stream.worker_id)
        self.adapters.lost(stream.worker_id)
        self._older_grammars.discard(stream.worker_id)
        self._facts.pop(stream.worker_id, None)
        self._contexts.pop(stream.worker_id, None)
        self._set_models()
        if self._index is not None:
            self._index.remove(stream.worker_id, stream.incarnation)
        self._on_event(WorkerLost(worker_id=stream.worker_id, reason=reason))

    def _feed_index(self, stream: WorkerStream, change: worker_pb2.KvEvents) -> None:
        if self._index is None:
            return
        for one in (*change.stored, *change.removed):
            if len(one) != HASH_BYTES:
                raise InvalidRequest("kv_events", f"a hash of {len(one)} bytes", f"{HASH_BYTES} bytes")
        if change.tiers and len(change.tiers) != len(change.stored):
            raise InvalidRequest("kv_events", f"{len(change.tiers)} tiers", f"none, or {len(change.stored)}")
        self._index.apply(
            stream.worker_id,
            stream.incarnation,
            CacheChange(
                sequence=change.sequence,
                stored=tuple(change.stored),
                removed=tuple(change.removed),
                is_snapshot=change.is_snapshot,
                tiers=known_tiers(change.tiers),
            ),
        )

    def _reconcile(self) -> None:
        """Starts and ends streams, so that there is exactly one for each wanted endpoint."""
        wanted = dict.fromkeys([*self._static, *self._registered.values(), *self._unregistered.values()])
        for endpoint in [one for one in self._tasks if one not in wanted]:
            _, task = self._tasks.pop(endpoint)
            task.cancel()
            self._complaints.pop(endpoint, None)
        for endpoint in wanted:
            if endpoint not in self._tasks:
                stream = WorkerStream(
                    endpoint,
                    partial(self._greeting, endpoint),
                    self,
                    self._identity,
                    self._silence_s,
                    partial(self._unproven, endpoint),
                    self._tls,
                )
                task = asyncio.create_task(stream.run(), name=f"worker-{endpoint}")
                task.add_done_callback(self._stream_ended)
                self._tasks[endpoint] = (stream, task)

    def _greeting(self, endpoint: str) -> worker_pb2.RouterHello:
        """The router's hello to an endpoint, with an id of its own. A worker keeps one stream per router id. With one
        id for all endpoints, a worker that is listed under two names would end its working stream in favour of a second
        one, which the router rejects."""
        hello = worker_pb2.RouterHello()
        hello.CopyFrom(self._hello())
        hello.router_id = f"{hello.router_id}@{endpoint}"
        return hello

    def _stream_ended(self, task: asyncio.Task[None]) -> None:
        """Streams run until they are cancelled. Any other end is an internal error."""
        if not task.cancelled():
            error = task.exception() or RuntimeError("a stream returned")
            log.critical("the stream of a worker crashed", exc_info=error)
            self._on_crash(error)
