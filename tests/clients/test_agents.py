"""Agents, unmodified, against a gateway before a scripted engine: they call a tool and get a typed result.

The engine calls `add` until it sees a result, and then answers. The tests check what the client got, and what reached
the engine. `make clients` makes the environments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clients.programs import node_of, run_client
from tests.clients.conftest import CLIENT, PROGRAMS
from tests.clients.scripted import AgentScript, scripted_gateway

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ADDED = [[2, 3], [2, 3]]  # the calls that a client made; the second is streamed
EITHER, FORCED = "grammar", "json_schema"  # calls or an answer by its schema; calls alone


@pytest.fixture
def script() -> AgentScript:
    return AgentScript("add", {"a": 2, "b": 3}, '{"total": 5}')


@pytest.fixture
def url(script: AgentScript) -> Iterator[str]:
    with scripted_gateway(script) as url:
        yield url


@pytest.fixture
def run(need: Callable[[str], Path], url: str, tmp_path: Path) -> Callable[[str, str], Any]:
    """Runs a program, and returns the object in its last line."""

    def run(environment: str, program: str) -> Any:
        words = [str(need(environment)), str(PROGRAMS / program), url, "m"]
        return json.loads(run_client(words, tmp_path).strip().splitlines()[-1])

    return run


@pytest.fixture
def need_node(record_property: Callable[[str, object], None]) -> Callable[[str], Path]:
    """The folder of a client for Node; skips the test if `make clients` has not made it."""

    def find(name: str) -> Path:
        record_property(CLIENT, name)
        found = node_of(name)
        if found is None:
            pytest.skip(f"the environment of {name} was not made: `make clients CLIENTS={name}`, which needs npm")
        return found

    return find


def check_results(script: AgentScript) -> None:
    """Each request after a call holds its result."""
    results = [one.content for request in script.requests for one in request.chat.messages if one.role == "tool"]
    assert results
    assert set(results) - {"Final result processed."} == {"5"}


@pytest.fixture
def run_node(need_node: Callable[[str], Path], url: str, tmp_path: Path) -> Callable[[str, str], Any]:
    """Runs a program of Node, and returns the object in its last line."""

    def run(environment: str, name: str) -> Any:
        folder = need_node(environment)
        program = tmp_path / name  # Node looks for packages beside the program
        program.write_text((PROGRAMS / name).read_text())
        (tmp_path / "node_modules").symlink_to(folder)
        return json.loads(run_client(["node", str(program), url, "m"], tmp_path).strip().splitlines()[-1])

    return run


def forms(script: AgentScript) -> set[str | None]:
    return {one.sampling.structured_output.WhichOneof("kind") for one in script.requests}


def test_pydantic_ai_gets_a_typed_result_in_each_form(run: Callable[[str, str], Any], script: AgentScript) -> None:
    found = run("pydantic_ai", "pydantic_ai_agent.py")
    kinds = ("OpenAIChatModel", "OpenAIResponsesModel")
    assert found == {
        f"{kind} {form}": [5, 5, 5, ADDED]
        for kind in kinds
        for form in ("ToolOutput", "NativeOutput", "PromptedOutput")
    }
    assert forms(script) == {EITHER, FORCED}
    check_results(script)


def test_openai_agents_get_a_typed_result(run: Callable[[str, str], Any], script: AgentScript) -> None:
    found = run("openai_agents", "openai_agents.py")
    assert found == {key: [5, 5, 5, ADDED] for key in ("OpenAIResponsesModel", "OpenAIChatCompletionsModel")}
    assert forms(script) == {EITHER}
    check_results(script)


def test_inspect_ai_completes_an_evaluation(run: Callable[[str, str], Any], script: AgentScript) -> None:
    found = run("inspect_ai", "inspect_ai_eval.py")
    names = [f"{api} {effort}" for api in ("responses", "chat") for effort in (None, "low")]
    assert found == {key: ["success", 1.0, ADDED[:1], None] for key in names}
    assert EITHER in forms(script)
    check_results(script)


def test_autogen_gets_a_typed_result(run: Callable[[str, str], Any], script: AgentScript) -> None:
    assert run("autogen", "autogen_agent.py") == [5, 5, '{"total": 5}', ADDED]
    assert EITHER in forms(script)
    check_results(script)


def test_the_ai_sdk_gets_a_typed_result(run_node: Callable[[str, str], Any], script: AgentScript) -> None:
    found = run_node("ai_sdk", "ai_sdk.mjs")
    assert found == {key: [5, 5, 5, 5, ADDED] for key in ("responses", "chat", "compatible")}
    assert forms(script) == {EITHER, FORCED}
    check_results(script)


@pytest.mark.parametrize("program", ["anthropic_sdk.py", "anthropic_sdk.mjs"])
def test_anthropic_s_client_completes_a_tool_loop(
    program: str,
    run: Callable[[str, str], Any],
    run_node: Callable[[str, str], Any],
    script: AgentScript,
) -> None:
    found = run("anthropic", program) if program.endswith(".py") else run_node("anthropic_js", program)
    answer = {"text": '{"total": 5}', "stop": "end_turn", "calls": ADDED[:1]}
    whole = dict.fromkeys(("create", "stream", "runner", *(["async"] if program.endswith(".py") else [])), answer)
    assert found == {
        **whole,
        "models": ["m"],
        "count": 0,  # the scripted router has no tokens for a chat
        "errors": {"model": [404, "not_found_error"], "image": [400, "invalid_request_error"]},
    }
    assert forms(script) == {None}
    check_results(script)


def test_claude_code_runs_a_command(need_node: Callable[[str], Path], tmp_path: Path) -> None:
    program = need_node("claude_code") / ".bin" / "claude"
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    command = {"command": "echo 42 > found.txt; echo written", "description": "Writes a file"}
    script = AgentScript("Bash", command, "All done.")
    with scripted_gateway(script) as url:
        given = {
            "HOME": home,
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": "m",
            "ANTHROPIC_SMALL_FAST_MODEL": "m",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "m",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        }
        words = [
            *("env", "-C", str(work), *(f"{name}={value}" for name, value in given.items())),
            *(str(program), "-p", "Write 42 to the file found.txt.", "--output-format", "json"),
            *("--allowedTools", "Bash", "--model", "m"),
        ]
        out = run_client(words, tmp_path)
    ended = json.loads(out.strip().splitlines()[-1])
    assert (ended["result"], ended["is_error"], ended["num_turns"]) == ("All done.", False, 2)
    assert (work / "found.txt").read_text().strip() == "42"
    turns = [one for one in script.requests if any("Bash" in tool for tool in one.chat.tools)]
    first, last = turns[0], turns[-1]
    assert "Write 42 to the file found.txt." in first.chat.messages[-1].content
    assert (last.chat.messages[-1].role, "written" in last.chat.messages[-1].content) == ("tool", True)
    systems = {one.chat.messages[0].content for one in turns}
    assert len(systems) == 1  # without what differs in each request, so that the prefix is found in the cache
    assert {one.session_id for one in turns} == {ended["session_id"]}


def test_codex_runs_a_command(need_node: Callable[[str], Path], tmp_path: Path) -> None:
    program = need_node("codex") / ".bin" / "codex"
    home = tmp_path / "home"
    home.mkdir()
    script = AgentScript("exec_command", {"cmd": "echo 42 > found.txt; echo written"}, "All done.")
    with scripted_gateway(script) as url:
        provider = f'{{name="pdserve",base_url="{url}",wire_api="responses"}}'
        words = [
            *("env", f"CODEX_HOME={home}", str(program), "exec", "--json", "--skip-git-repo-check", "-m", "m"),
            *("--dangerously-bypass-approvals-and-sandbox", "-c", 'model_provider="pdserve"'),
            *("-c", f"model_providers.pdserve={provider}", "Write 42 to the file found.txt."),
        ]
        out = run_client(words, tmp_path)
    events = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    said = [one["item"]["text"] for one in events if one.get("item", {}).get("type") == "agent_message"]
    assert said == ["All done."]
    assert events[-1]["type"] == "turn.completed"
    assert (tmp_path / "found.txt").read_text().strip() == "42"
    first, last = script.requests
    assert first.chat.messages[-1].content == "Write 42 to the file found.txt."
    assert (last.chat.messages[-1].role, "written" in last.chat.messages[-1].content) == ("tool", True)
