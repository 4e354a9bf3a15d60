"""The blocking client. A Client may be used by many threads; a Stream by one reader."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, final

import grpc

from pdserve.client import base, beam
from pdserve.client import base as calls
from pdserve.client.base import AnswerBuilder, BaseClient, BaseStream, UnaryCall
from pdserve.client.beam import Beam, EarlyStopping, Tops
from pdserve.client.options import Options
from pdserve.client.request import Prompt, role_request, roll_request, scale_request, token_ids_of
from pdserve.client.results import (
    CHANGE_STEP,
    ChangeStep,
    Completion,
    Explanation,
    Model,
    Piece,
    Scaling,
    Token,
    Topology,
)
from pdserve.client.retries import Attempts, CannotResume
from pdserve.core.errors import NotFound, PdserveError, Unavailable
from pdserve.core.live import LiveFrame, LogLine
from pdserve.core.results import SessionPage
from pdserve.core.types import Role
from pdserve.v1 import cluster_pb2
from pdserve.wire import status
from pdserve.wire.protocol import FRAME

Result = TypeVar("Result")


@final
class Client(BaseClient):
    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer at once. A prompt is text, token ids, or messages with role and content."""
        with self._start(prompt, options, "generate") as stream:
            for _ in stream:
                pass
            return stream.completion

    def stream(self, prompt: Prompt, *, keeps_pieces: bool = True, **options: Unpack[Options]) -> Stream:
        """The answer piece by piece. Closing or dropping the stream, or leaving its block, cancels the request.

        Without `keeps_pieces`, a long stream takes little memory: its completion has no text, token ids and logprobs.
        """
        return self._start(prompt, options, "stream", keeps_pieces=keeps_pieces)

    def beam_search(
        self,
        prompt: Prompt,
        *,
        width: int = beam.WIDTH,
        max_tokens: int = beam.MAX_TOKENS,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        ignore_eos: bool = False,
        timeout_s: float | None = None,
    ) -> tuple[Beam, ...]:
        """The `width` best continuations by beam search, best first, as in transformers.

        `length_penalty` above 0 favours long ones. `early_stopping` True ends when `width` are finished; False when the
        best living beam is not better than they are; "never" when it cannot become better. `width` is 1 to 32, less if
        the model has several end tokens; each step is one request per living beam.
        """
        deadline_s = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        model = self.model()
        ids = token_ids_of(prompt)
        if ids is None:
            ids = self.tokenize(base.as_text(prompt))
        search = base.beam_search(
            model,
            ids,
            width=width,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            ignore_eos=ignore_eos,
        )
        while not search.is_over:
            options = search.options(deadline_s - time.monotonic())
            search.take(self._tops([[*ids, *tokens] for tokens in search.living], options))
        return tuple([replace(one, text=self.detokenize(one.text_ids, ids)) for one in search.found])

    def _tops(self, prompts: Sequence[Sequence[int]], options: Options) -> list[Tops]:
        """The most likely next tokens of each prompt; all requests are sent at once."""
        streams = [self._start(prompt, options, "beam_search") for prompt in prompts]
        try:
            for stream in streams:
                for _ in stream:
                    pass
            return [stream.completion.logprobs[0].top for stream in streams]
        finally:
            for stream in streams:
                stream.close()

    def model(self) -> Model:
        return self._ask(calls.model())

    def is_serving(self) -> bool:
        """Whether the router has a decode worker. Needs no token. Raises Unavailable if no router answers."""
        return self._ask(calls.is_serving())

    def tokenize(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_special_tokens: bool | None = None,
        add_generation_prompt: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
    ) -> list[int]:
        """`add_special_tokens`: those of the tokenizer around the text, by default for a text alone. The other
        options are of messages, for the chat template."""
        return self._ask(
            calls.tokenize(
                prompt,
                tools,
                add_special_tokens=add_special_tokens,
                add_generation_prompt=add_generation_prompt,
                chat_template_kwargs=chat_template_kwargs,
                reasoning_effort=reasoning_effort,
            )
        )

    def sessions(self, limit: int = 0, after: int = 0) -> SessionPage:
        """The sessions of the caller's tenant that the routers of this address know, the last used one first; with the
        operator's token those of all tenants. `limit`: at most 100 (0: 20). `after`: the `cursor` of the last
        session of the page before."""
        return self._ask(calls.sessions(limit, after))

    def end_session(self, session_id: str) -> bool:
        """Says that no request of the session follows: its cached prefixes leave first. False: no router of
        this address knows it as one of the caller's tenant."""
        return self._ask(calls.end_session(session_id))

    def detokenize(self, token_ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
        """The text that `token_ids` add to the text of the token ids `prompt`; special tokens have no text."""
        return self._ask(calls.detokenize(token_ids, prompt))

    def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """What each token writes after other text, which may end within a character; at most 8192 tokens.

        A special token has its name; an id without a token is empty.
        """
        return self._ask(calls.token_bytes(token_ids))

    def tokens(self, token_ids: Sequence[int]) -> list[Token]:
        """The same, with whether each token is special; at most 8192 tokens."""
        return self._ask(calls.tokens(token_ids))

    def topology(self) -> Topology:
        return self._ask(calls.topology())

    def drain(self, worker_id: str) -> None:
        """Stops new work on a worker until undrain(); its running requests finish. Raises NotFound."""
        self._ask(calls.drain(worker_id))

    def undrain(self, worker_id: str) -> None:
        """Allows new work on a drained worker again. Raises NotFound."""
        self._ask(calls.undrain(worker_id))

    def scale(
        self,
        *,
        prefill: int | None = None,
        decode: int | None = None,
        on_step: Callable[[ChangeStep], None] = lambda step: None,
    ) -> None:
        """Changes the number of workers; None: as many as there are. Returns when the cluster is ready. Raises
        ChangeFailed, InvalidRequest, and Unavailable if the router has no launcher. A change goes on in the launcher
        if the connection ends."""
        self._change(scale_request(prefill, decode), on_step)

    def roll(
        self,
        workers: Sequence[str] = (),
        *,
        surge: int = 1,
        settings: str = "",
        model: str = "",
        undo: bool = False,
        on_step: Callable[[ChangeStep], None] = lambda step: None,
    ) -> None:
        """Replaces `workers`, or all, one after another. `surge` 1 starts another worker before, 0 does not.
        `settings`: TOML of worker tables, for all workers. `model`: a folder on the launcher's host with other weights.
        `undo` returns to the settings and weights before the last roll-out.
        Raises ChangeFailed if it has stopped, NotFound, and as `scale`."""
        self._change(roll_request(workers, surge, settings, model, is_undo=undo), on_step)

    def set_role(
        self, worker_id: str, role: Role, *, on_step: Callable[[ChangeStep], None] = lambda step: None
    ) -> None:
        """Drains a worker, which then takes the other role. Raises NotFound, and as `scale`."""
        self._change(role_request(worker_id, role), on_step)

    def scaling(self, limit: int = 0) -> Scaling:
        """The last decisions of `up --autoscale` about the number of workers; at most `limit`, 0: 20. Raises
        Unavailable where nothing decides."""
        return self._ask(calls.scaling(limit))

    def load_adapter(self, name: str, folder: str) -> str:
        """Loads a LoRA adapter on all workers, under a new name or in place of its present weights. `folder` lies on
        the workers, below one of their lora_folders. Returns its fingerprint once all of them serve it. Raises
        InvalidRequest, with the workers' reasons; nothing has changed then."""
        return self._ask(calls.load_adapter(name, folder))

    def unload_adapter(self, name: str) -> None:
        """New requests can no longer choose the adapter; running ones end with it. Raises UnknownModel."""
        self._ask(calls.unload_adapter(name))

    def worker_log(self, worker_id: str) -> tuple[LogLine, ...]:
        """The last lines of a worker's log, oldest first. Raises NotFound, or Unavailable if it does not answer."""
        return self._ask(calls.worker_log(worker_id))

    def explain(self, request_id: str) -> Explanation:
        """Why a recent request was placed where it was. Each router is asked, because only the one that served the
        request knows it. Raises NotFound after the router has forgotten it."""
        return self._ask_each(calls.explain(request_id))

    def watch(self, period_s: float = 0.0, *, only_this_router: bool = False) -> Generator[LiveFrame, None, None]:
        """What happens on the cluster: a frame every `period_s` seconds (0.1 to 60; 0: the router's default).

        The first frame contains the requests that ended last. Routers that share a port answer for all of them, unless
        `only_this_router` asks the one of this connection for its own. Needs the operator's token.
        """
        call = self._begin_watch(self._channel, period_s, only_this_router=only_this_router)
        with status.reading(call):
            for message in call:
                yield FRAME.decode(message.frame)

    def _change(self, request: cluster_pb2.ChangeWorkersRequest, on_step: Callable[[ChangeStep], None]) -> None:
        call = self._begin_change(self._channel, request)
        with status.reading(call):
            for message in call:
                on_step(CHANGE_STEP.decode(message))

    def close(self) -> None:
        """Closes the connection and cancels open streams."""
        self._is_shut.set()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self) -> None:
        self._channel = self._transport.open(self._target)

    def _start(self, prompt: Prompt, options: Options, call: str, *, keeps_pieces: bool = True) -> Stream:
        return Stream(*self._begin(self._channel, prompt, options, call, keeps_pieces=keeps_pieces))

    def _ask_each(self, call: UnaryCall[Result]) -> Result:
        """The first answer of a router that has one. Otherwise raises the first error of one that does not answer,
        because it may have it, and NotFound if all have answered."""
        targets, failure = self._target.each, None
        if len(targets) == 1:
            return self._ask(call)
        for target in targets:
            channel = self._transport.open(target)
            try:
                return self._ask(call, channel)
            except (NotFound, Unavailable) as error:
                failure = error if failure is None or isinstance(failure, NotFound) else failure
            finally:
                channel.close()
        assert failure is not None
        raise failure

    def _ask(self, call: UnaryCall[Result], channel: Any = None) -> Result:
        attempts = self.attempts()  # first, because gRPC crashes on a stub of a closed channel
        method = getattr(call.stub(channel or self._channel), call.method)
        while True:
            try:
                return call.read(method(call.request, timeout=attempts.remaining_s, metadata=self._metadata()))
            except grpc.RpcError as error:
                failure = status.from_rpc_error(error)
                delay_s = attempts.delay_s(failure)
                if delay_s is None:
                    raise failure from None
            time.sleep(delay_s)


@final
class Stream(BaseStream, Iterator[Piece]):
    """Pieces of one answer, for iteration; `completion` is available after the last piece."""

    def __init__(self, begin: Callable[[float], Any], answer: AnswerBuilder, attempts: Attempts) -> None:
        self._closed = threading.Event()
        super().__init__(begin, answer, attempts)

    def __next__(self) -> Piece:
        while not self._closed.is_set():
            try:
                message = next(self._call)
            except StopIteration:
                self._closed.set()
                self._answer.end()
                raise
            except grpc.RpcError as error:
                if self._closed.is_set():
                    break  # close() from another thread
                self._try_again(status.from_rpc_error(error))
                continue
            try:
                piece = self._answer.take(message)
            except CannotResume as error:
                self._call.cancel()
                self._try_again(error)
                continue
            if piece is not None:
                return piece
        raise StopIteration

    def _try_again(self, failure: PdserveError) -> None:
        if self._answer.is_complete:  # only the end of the call was lost
            self._closed.set()
            self._answer.end()
            return
        try:
            delay_s = self._delay_s(failure)
        except PdserveError:
            self._closed.set()
            raise
        if not self._closed.wait(delay_s):
            self._call = self._begin(self._attempts.remaining_s)

    def close(self) -> None:
        """Cancels the request if it is still running. May be called twice and from another thread."""
        self._closed.set()
        self._call.cancel()
        self._answer.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # A reader that breaks out of its loop drops the stream, and the cluster should then stop. At interpreter exit
        # grpc and the connection may already be gone.
        with contextlib.suppress(Exception):
            self.close()
