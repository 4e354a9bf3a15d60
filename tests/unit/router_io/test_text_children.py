"""Templates and patterns that never end cost their own caller an error, and nobody else anything."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from pdserve.config import RouterConfig
from pdserve.core.errors import InternalError, InvalidRequest, ModelError, Overloaded
from pdserve.isolated.process import ChildProcess
from pdserve.text.chat import TemplateSources
from pdserve.text.template_facts import finding_facts, not_loaded
from pdserve.text.tokenizer import HuggingFaceTokenizer
from pdserve.v1 import inference_pb2
from router.service.admission import Admission
from router.service.server import RouterServer
from router.service.text import tokenizing
from router.service.text.fair_queue import ClientKey
from tests.support.cluster_secret import TEXT
from tests.unit.router_io.test_grammars import FOLDER, MODEL
from tests.unit.router_io.test_prompts import LIMITS

SPIN = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
ON_DEMAND = "{% for m in messages %}{% if 'BAD' in m.content %}BODY{% endif %}{{ m.content }}{% endfor %}"
BACKTRACKING = {"type": "Split", "pattern": {"Regex": "(?:a|a)*$"}, "behavior": "Isolated", "invert": False}

BODIES = (
    SPIN,
    "{{ 'x' | center(2000000000) }}",
    "{{ '%2000000000s' % 'x' }}",
    "{{ 'x' * 10000000000 }}",
    "{{ lipsum(100000) | length }}",
    "{{ 9 ** 999999999 }}",
    "{{ ('x' * 1000000).replace('x', 'y' * 1000000) | length }}",
    "{{ (['x' * 1000000] * 100000) | join | length }}",
    "{{ 'x' | indent(2000000000, true) }}",
    "{% set n = namespace(x='ab') %}{% for a in range(99999) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% autoescape ('x' | center(2000000000)) %}{% endautoescape %}",
)
BRIEF_CPU_S = 0.05  # for work that has no end
AMPLE_S = 60.0  # for work that has one, and for each wait

Make = Callable[..., Awaitable[Admission]]
Result = TypeVar("Result")


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    monkeypatch.setattr(tokenizing, "WALL_S", AMPLE_S)
    made: list[Admission] = []

    async def one(source: str | None, folder: Path = FOLDER) -> Admission:
        templates = None if source is None else TemplateSources(source, None, {})
        tokenizer = HuggingFaceTokenizer(folder)
        made.append(await asyncio.to_thread(Admission, tokenizer, templates, LIMITS, None, None, str(folder)))
        return made[-1]

    yield one
    for admission in made:
        await within(admission.close())


async def within(work: Awaitable[Result]) -> Result:
    return await asyncio.wait_for(work, AMPLE_S)


def limit_cpu(admission: Admission, cpu_s: float) -> None:
    for pool in admission.children._children.pools:
        pool._cpu_s = cpu_s


async def fails(admission: Admission, request: inference_pb2.GenerateRequest, match: str | None = None) -> None:
    limit_cpu(admission, BRIEF_CPU_S)
    with pytest.raises((ModelError, InvalidRequest), match=match):
        await within(admission.prepare(request, MODEL, None))
    limit_cpu(admission, AMPLE_S)


def chat(text: str) -> inference_pb2.GenerateRequest:
    messages = [inference_pb2.ChatMessage(role="user", content=text)]
    return inference_pb2.GenerateRequest(chat=inference_pb2.ChatPrompt(messages=messages))


async def text_of(admission: Admission, request: inference_pb2.GenerateRequest) -> str:
    prepared = await within(admission.prepare(request, MODEL, None))
    return admission.tokenizer.decode(prepared.prompt_ids)


async def test_a_template_that_exceeds_a_limit_fails_its_own_chat(make: Make) -> None:
    cases = (f"{{% if 'BAD {number}.' in m.content %}}{body}{{% endif %}}" for number, body in enumerate(BODIES))
    admission = await make(ON_DEMAND.replace("BODY", "".join(cases)))
    for number in range(len(BODIES)):
        await fails(admission, chat(f"BAD {number}."))
        assert await text_of(admission, chat("good")) == "good"
    assert admission.can_work


async def test_slow_chats_do_not_delay_quick_ones(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their processes have no end within the test: only the order decides."""
    monkeypatch.setattr(tokenizing, "SLOW_CPU_S", 10 * AMPLE_S)
    monkeypatch.setattr(tokenizing, "WALL_S", 10 * AMPLE_S)
    admission = await make(ON_DEMAND.replace("BODY", SPIN))
    slow = [asyncio.create_task(admission.prepare(chat(f"BAD {number}"), MODEL, None)) for number in range(6)]
    try:
        for number in range(3):
            assert await text_of(admission, chat(f"good {number}")) == f"good {number}"
        assert not any(one.done() for one in slow)
    finally:
        await within(admission.close())  # whatever runs
        await within(asyncio.wait(slow))
    assert all(one.cancelled() for one in slow)


async def test_a_short_chat_waits_little_for_new_clients(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of a new client, so the chats of several, which have no end, come first in the quick child."""
    granted_s: list[float] = []
    send = ChildProcess.send

    async def counted(child: ChildProcess, messages: Sequence[Mapping[str, Any]]) -> None:
        every_s = [one.get("cpu_s", 1.0) for one in messages]
        # Not of the first message, nor of a slow child's.
        granted_s.extend(cpu_s for cpu_s in every_s if cpu_s < tokenizing.SLOW_CPU_S)
        await send(child, messages)

    monkeypatch.setattr(ChildProcess, "send", counted)
    admission = await make(ON_DEMAND.replace("BODY", SPIN))
    clients = [ClientKey("host", f"client {number}") for number in range(7)]
    slow = [asyncio.create_task(admission.prepare(chat("BAD"), MODEL, None, one)) for one in clients[:6]]
    await asyncio.sleep(0)
    prepared = await within(admission.prepare(chat("good"), MODEL, None, clients[6]))
    assert admission.tokenizer.decode(prepared.prompt_ids) == "good"
    assert 0.0 < sum(granted_s) < 0.3
    await within(admission.close())
    await within(asyncio.wait(slow))


async def test_chats_that_wait_are_sent_together(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets its own answer, also those after one that has no end, and those after one that ends the child."""
    sent: list[int] = []
    send = ChildProcess.send

    async def counted(child: ChildProcess, messages: Sequence[Mapping[str, Any]]) -> None:
        sent.append(len(messages))
        await send(child, messages)

    monkeypatch.setattr(ChildProcess, "send", counted)
    admission = await make(ON_DEMAND.replace("BODY", SPIN))
    limit_cpu(admission, BRIEF_CPU_S)
    texts = [f"good {number}" for number in range(6)]
    for other in ("", "BAD"):
        asked = [*texts[:3], *([other] if other else []), *texts[3:]]
        work = [asyncio.create_task(admission.prepare(chat(one), MODEL, None)) for one in asked]
        found = await within(asyncio.gather(*work, return_exceptions=True))
        read = [admission.tokenizer.decode(one.prompt_ids) for one in found if not isinstance(one, BaseException)]
        assert read == texts
        assert [type(one) for one in found if isinstance(one, BaseException)] == ([ModelError] if other else [])
    assert max(sent) > 1

    child = admission.children._children.pools[0].children[0]
    receive, num_received = ChildProcess.receive, 0

    async def killed(child: ChildProcess) -> dict[str, Any]:
        nonlocal num_received
        num_received += 1
        if num_received == 2:
            assert child.pid is not None
            os.killpg(child.pid, signal.SIGSTOP)  # so that nothing more is answered before it ends
            os.killpg(child.pid, signal.SIGKILL)
        return await receive(child)

    monkeypatch.setattr(ChildProcess, "receive", killed)
    limit_cpu(admission, AMPLE_S)
    pid = child.pid
    work = [asyncio.create_task(admission.prepare(chat(one), MODEL, None)) for one in texts]
    found = await within(asyncio.gather(*work, return_exceptions=True))
    errors = [one for one in found if isinstance(one, BaseException)]
    assert child.pid != pid or not errors
    assert len(errors) <= 1  # the one that was answered next; none if all answers were in the pipe
    assert all(isinstance(one, Overloaded) for one in errors)


async def test_a_template_without_an_end_loads_and_fails_each_chat(make: Make) -> None:
    admission = await make(SPIN)
    await fails(admission, chat("x"), "chat_template: got no end within its time")
    assert await text_of(admission, inference_pb2.GenerateRequest(text="def f")) == "def f"


async def test_health_fails_while_no_child_starts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    admission = await make(ON_DEMAND)
    interpreter = sys.executable
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(InternalError, match="did not start"):
        await within(admission.prepare(chat("good"), MODEL, None))
    assert not admission.can_work
    assert not admission.children._children.pools[0]._queue._running, "a message that was not sent runs for nobody"
    monkeypatch.setattr(sys, "executable", interpreter)
    warming = asyncio.create_task(admission.children.keep_warm())  # no request is needed
    async with asyncio.timeout(AMPLE_S):
        while not admission.can_work:
            await asyncio.sleep(0.01)
    warming.cancel()
    assert await text_of(admission, chat("good")) == "good"


async def test_health_fails_while_every_child_hangs(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    admission = await make(ON_DEMAND)
    assert await text_of(admission, chat("good")) == "good"
    pool = admission.children._children.pools[0]
    pid = pool.children[0].pid
    assert pid is not None
    os.killpg(pid, signal.SIGSTOP)
    waiting = asyncio.create_task(admission.prepare(chat("good"), MODEL, None))
    await asyncio.sleep(0)
    async with asyncio.timeout(AMPLE_S):
        while not pool._began_s:
            await asyncio.sleep(0.01)
    pool._began_s = dict.fromkeys(pool._began_s, -1e9)
    assert not admission.can_work
    os.killpg(pid, signal.SIGKILL)
    with pytest.raises(Overloaded, match="was killed"):
        await within(waiting)
    assert admission.can_work


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


async def test_the_child_that_finds_the_facts_serves_the_chats() -> None:
    held = children()
    server = RouterServer(RouterConfig(model=str(FOLDER), port=0, cluster_secret=TEXT))
    try:
        await within(server.start())
        (started,) = children() - held
        admission = server._admission
        assert admission is not None
        assert (admission.tool_format, admission.reasoning_format) == ("hermes", "")
        limit_cpu(admission, AMPLE_S)
        assert "good" in await text_of(admission, chat("good"))
        assert children() - held == {started}
    finally:
        await within(server.stop())
    assert children() == held


@pytest.mark.parametrize(
    ("name", "content", "field"),
    [("tokenizer.json", "{}", "tokenizer.json"), ("chat_template.jinja", "{% for %}", "chat_template")],
)
async def test_a_router_does_not_start_with_files_it_cannot_read(
    tmp_path: Path, name: str, content: str, field: str
) -> None:
    folder, held = tmp_path / "model", children()
    shutil.copytree(FOLDER, folder)
    (folder / name).write_text(content)
    server = RouterServer(RouterConfig(model=str(folder), port=0, cluster_secret=TEXT))
    with pytest.raises(ModelError) as caught:
        await within(server.start())
    await within(server.stop())
    assert caught.value.field == field
    assert children() == held


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("/bin/false", "ended with status 1"),
        ("/bin/true", "ended with status 0"),
        ("/no/such/python", "cannot be started: .*No such file"),
    ],
)
async def test_a_child_that_does_not_start_names_the_reason(
    make: Make, monkeypatch: pytest.MonkeyPatch, program: str, why: str
) -> None:
    admission = await make(ON_DEMAND)
    with monkeypatch.context() as without_child:
        without_child.setattr(sys, "executable", program)
        with pytest.raises(InternalError, match=why):
            await within(admission.load())
    await within(admission.load())
    assert admission.can_work


@pytest.mark.parametrize(
    ("number", "kind", "why"),
    [
        (signal.SIGPROF, ModelError, "chat_template: got one that needs too much CPU time"),
        (signal.SIGABRT, ModelError, "chat_template: got one that needs too much memory"),
        (signal.SIGALRM, InternalError, "this machine is too busy"),
        (signal.SIGKILL, InternalError, "ended by SIGKILL; if by the kernel, this machine has too little memory"),
        (signal.SIGSEGV, InternalError, "ended by SIGSEGV"),
        (signal.SIGRTMIN + 1, InternalError, f"ended by signal {signal.SIGRTMIN + 1}"),  # it has no name
    ],
)
async def test_a_child_that_ends_while_it_loads_names_the_reason(
    make: Make, number: int, kind: type[Exception], why: str
) -> None:
    admission = await make(ON_DEMAND)
    waiting = asyncio.create_task(admission.load())
    child = admission.children._children.pools[0].children[0]
    while child.pid is None:
        await asyncio.sleep(0)
    os.killpg(child.pid, number)
    with pytest.raises(kind, match=why):
        await within(waiting)
    await within(admission.load())
    assert admission.can_work


async def test_an_error_names_the_files_that_the_child_loads(make: Make, tmp_path: Path) -> None:
    folder = slow_folder(tmp_path)
    for template, part in ((None, "tokenizer.json"), (ON_DEMAND, "chat_template or tokenizer.json")):
        admission = await make(template, folder)
        (folder / "tokenizer.json").rename(tmp_path / "held")
        with pytest.raises(ModelError) as caught:  # of the library
            await within(admission.load())
        assert caught.value.field == "model"
        (tmp_path / "held").rename(folder / "tokenizer.json")
        late = not_loaded(TimeoutError(), admission.children._load)
        assert late.message.startswith(f"the process that reads {part} was not ready within 60 s")


async def test_a_router_and_a_launcher_name_why_no_child_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    why, held = "chat_template cannot be started: .*No such file", children()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    server = RouterServer(RouterConfig(model=str(FOLDER), port=0, cluster_secret=TEXT))
    with pytest.raises(InternalError, match=why):
        await within(server.start())
    await within(server.stop())
    with pytest.raises(InternalError, match=why), finding_facts(TemplateSources(ON_DEMAND, None, {})):
        pass
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with (
        pytest.raises(InternalError, match="chat_template ended with status 0"),
        finding_facts(TemplateSources(ON_DEMAND, None, {})) as found,
    ):
        found()
    assert children() == held


def slow_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "slow"
    shutil.copytree(FOLDER, folder)
    held = json.loads((folder / "tokenizer.json").read_text())
    held["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [BACKTRACKING, held["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(held))
    return folder


async def test_a_pattern_that_backtracks_fails_its_own_text(make: Make, tmp_path: Path) -> None:
    admission = await make(ON_DEMAND, slow_folder(tmp_path))
    bad = "a" * 60 + "!"
    attacks = [inference_pb2.GenerateRequest(text=bad), chat(bad)]
    attacks.append(inference_pb2.GenerateRequest(text="x", sampling=inference_pb2.SamplingParams(bad_words=[bad])))
    for one in attacks:
        await fails(admission, one, r"tokenizer\.json: got (no end within its time|a pattern that fails)")
    limit_cpu(admission, BRIEF_CPU_S)
    with pytest.raises(ModelError):
        await within(admission.tokenize(inference_pb2.TokenizeRequest(text=bad), MODEL))
    limit_cpu(admission, AMPLE_S)
    plain = HuggingFaceTokenizer(FOLDER)
    text = "def f(x):\n    return x\n" * 20
    for request in (inference_pb2.GenerateRequest(text=text), chat(text)):
        assert list((await within(admission.prepare(request, MODEL, None))).prompt_ids) == plain.encode(text)
    tail = inference_pb2.GenerateRequest(text=text, truncate_prompt_tokens=5)
    assert list((await within(admission.prepare(tail, MODEL, None))).prompt_ids) == plain.encode(text)[-5:]
    long = inference_pb2.GenerateRequest(chat=chat("x = 1\n" * 400_000).chat)
    with pytest.raises(InvalidRequest, match="the prompt is too long"):
        await within(admission.prepare(long, MODEL, None))


def test_a_tokenizer_with_unknown_patterns_encodes_nothing_here(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(slow_folder(tmp_path))
    assert not tokenizer.is_linear
    with pytest.raises(InternalError):
        tokenizer.encode("x")
    assert tokenizer.decode(HuggingFaceTokenizer(FOLDER).encode("def f")) == "def f"
    assert HuggingFaceTokenizer(FOLDER).is_linear
