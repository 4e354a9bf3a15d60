"""`echo`, `max_tokens: 0`, and the logprobs of /v1/completions: positions are the text's, and nothing is lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from pdserve.client.results import TokenLogprob
from pdserve.gateway.api.logprobs import TextOffsets, prompt_logprobs, prompt_offsets, text_logprobs
from tests.unit.gateway.conftest import Served

PROMPT = "def größe(näm, 日本):\n    return"
Ask = Callable[..., dict[str, Any]]


def merged(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that the chunks of a stream give together."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            one = choices.setdefault(part["index"], {"index": part["index"], "text": "", "logprobs": None})
            one["text"] += part["text"]
            if part["logprobs"] is not None:
                found = one["logprobs"] or {name: [] for name in part["logprobs"]}
                one["logprobs"] = {name: found[name] + part["logprobs"][name] for name in found}
            if part["finish_reason"] is not None:
                one |= {name: part[name] for name in ("finish_reason", "stop_reason")}
            if "token_ids" in part:
                one["token_ids"] = one.get("token_ids", []) + part["token_ids"]
    usage = next((chunk["usage"] for chunk in chunks if chunk.get("usage")), None)
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def answered(served: Served, body: dict[str, Any], path: str = "completions") -> dict[str, Any]:
    status, answer = served.post(f"/v1/{path}", body)
    assert status == 200, answer
    return dict(json.loads(answer))


@pytest.fixture(params=["whole", "streamed"])
def ask(request: pytest.FixtureRequest, bundled: Served) -> Ask:
    """Asks for a completion, whole and streamed."""

    def post(**fields: Any) -> dict[str, Any]:
        body = {"prompt": PROMPT, "seed": 3, "max_tokens": 6, **fields}
        if request.param == "whole":
            return answered(bundled, body)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        status, answer = bundled.post("/v1/completions", body)
        assert status == 200, answer
        lines = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return merged([json.loads(line) for line in lines[:-1]])

    return post


def refused(served: Served, **fields: Any) -> str:
    status, answer = served.post("/v1/completions", {"prompt": PROMPT, **fields})
    assert status == 400, answer
    return str(json.loads(answer)["error"]["param"])


def expected_prompt(served: Served, ids: list[int], top: int) -> list[TokenLogprob | None]:
    return list(served.sdk.generate(ids, max_tokens=1, prompt_logprobs=top).prompt_logprobs)


def check_scores(logprobs: Mapping[str, Any], text: str) -> None:
    offsets = logprobs["text_offset"]
    assert len({len(values) for values in logprobs.values()}) == 1
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(text) for offset in offsets)
    for token, offset, end in zip(logprobs["tokens"], offsets, [*offsets[1:], len(text)], strict=True):
        if not token.startswith("bytes:"):
            assert text[offset:end] in (token, "")


def test_an_echo_repeats_the_prompt(ask: Ask) -> None:
    plain, echoed = ask(), ask(echo=True)
    assert echoed["choices"][0]["text"] == PROMPT + plain["choices"][0]["text"]
    assert echoed["choices"][0]["logprobs"] is None
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [echoed["usage"][name] for name in counts] == [plain["usage"][name] for name in counts]


@pytest.mark.parametrize("top", [0, 1, 4])
def test_an_echo_has_the_logprobs_of_the_prompt_first(top: int, ask: Ask, bundled: Served) -> None:
    ids = bundled.sdk.tokenize(PROMPT)
    [plain], [found] = ask(logprobs=top)["choices"], ask(logprobs=top, echo=True)["choices"]
    scores, scored = found["logprobs"], expected_prompt(bundled, ids, top)
    count = len(ids)
    assert found["text"] == PROMPT + plain["text"]
    check_scores(scores, found["text"])
    assert [scores["tokens"][0], scores["token_logprobs"][0], scores["top_logprobs"][0]] == ["def", None, None]
    assert scores["text_offset"][0] == 0
    assert scores["token_logprobs"][1:count] == pytest.approx([one.logprob for one in scored[1:] if one], abs=1e-5)
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert scores[name][count:] == plain["logprobs"][name]
    assert scores["text_offset"][count:] == [len(PROMPT) + one for one in plain["logprobs"]["text_offset"]]
    tops = list(zip(scores["top_logprobs"][1:], scores["token_logprobs"][1:], scores["tokens"][1:], strict=True))
    assert all(found[token] == logprob for found, logprob, token in tops)
    assert {len(found) for found, _, _ in tops} <= {top, top + 1}


def test_partial_characters_have_keys_of_their_own(ask: Ask, bundled: Served) -> None:
    [found] = ask(logprobs=2, echo=True)["choices"]
    ids = bundled.sdk.tokenize(PROMPT)
    raw = bundled.sdk.token_bytes(ids)
    names = found["logprobs"]["tokens"][: len(ids)]
    assert any(name.startswith("bytes:\\x") for name in names)
    for name, one in zip(names, raw, strict=True):
        is_whole = one.decode("utf-8", "ignore").encode() == one
        assert name == (one.decode() if is_whole else "bytes:" + "".join(f"\\x{byte:02x}" for byte in one))


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_no_tokens_only_score(echo: bool, logprobs: int | None, ask: Ask, bundled: Served) -> None:
    found = ask(max_tokens=0, echo=echo, logprobs=logprobs, return_token_ids=True)
    [choice] = found["choices"]
    count = len(bundled.sdk.tokenize(PROMPT))
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (PROMPT if echo else "", "length", None)
    assert choice.get("token_ids", []) == []
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (count, 0)
    assert found["usage"]["total_tokens"] == count
    if logprobs is not None and echo:
        assert len(choice["logprobs"]["tokens"]) == count
    else:
        assert (choice["logprobs"] or {"tokens": []})["tokens"] == []


def test_each_of_several_prompts_and_answers_is_echoed(ask: Ask, bundled: Served) -> None:
    prompts = ["a", "class A:", "x = 1\ny"]
    for n, logprobs in itertools.product((1, 3), (None, 1)):
        found = ask(prompt=prompts, n=n, echo=True, logprobs=logprobs, temperature=0.9)["choices"]
        plain = ask(prompt=prompts, n=n, logprobs=logprobs, temperature=0.9)["choices"]
        assert [one["index"] for one in found] == list(range(len(prompts) * n))
        for one, other in zip(found, plain, strict=True):
            prompt = prompts[one["index"] // n]
            assert one["text"] == prompt + other["text"]
            if logprobs is not None:
                check_scores(one["logprobs"], one["text"])
                count = len(bundled.sdk.tokenize(prompt))
                assert one["logprobs"]["token_logprobs"][0] is None
                assert one["logprobs"]["tokens"][count:] == other["logprobs"]["tokens"]
    [zero, one] = ask(prompt=prompts[0], n=2, echo=True, logprobs=0, max_tokens=0, temperature=0.5)["choices"]
    assert {**zero, "index": 1} == one


def test_token_ids_are_echoed_as_their_text(ask: Ask, bundled: Served) -> None:
    ids = bundled.sdk.tokenize(PROMPT)
    [text], [given] = ask(echo=True, logprobs=1)["choices"], ask(prompt=ids, echo=True, logprobs=1)["choices"]
    assert given == text
    both = ask(prompt=[ids, ids[:3]], echo=True, max_tokens=0)["choices"]
    assert [one["text"] for one in both] == [PROMPT, bundled.sdk.detokenize(ids[:3])]


def test_special_tokens_take_no_place_unless_shown(ask: Ask, bundled: Served) -> None:
    ids = [0, *bundled.sdk.tokenize("a = 1")]  # <|endoftext|>
    [hidden] = ask(prompt=ids, echo=True, logprobs=0, max_tokens=0)["choices"]
    [shown] = ask(prompt=ids, echo=True, logprobs=0, max_tokens=0, skip_special_tokens=False)["choices"]
    assert (hidden["text"], hidden["logprobs"]["text_offset"][:2]) == ("a = 1", [0, 0])
    assert (shown["text"], shown["logprobs"]["text_offset"][:2]) == ("<|endoftext|>a = 1", [0, 13])
    assert hidden["logprobs"]["tokens"] == shown["logprobs"]["tokens"]


def test_a_truncated_prompt_is_echoed_as_kept(ask: Ask, bundled: Served) -> None:
    ids = bundled.sdk.tokenize("a = 1\nb = 2")
    for logprobs in (None, 1):
        fields: dict[str, Any] = {"truncate_prompt_tokens": 3, "echo": True, "max_tokens": 0, "logprobs": logprobs}
        [found] = ask(prompt="a = 1\nb = 2", **fields)["choices"]
        assert found["text"] == bundled.sdk.detokenize(ids[-3:])
    assert len(found["logprobs"]["tokens"]) == 3


def test_prompt_logprobs_are_separate(bundled: Served) -> None:
    body = {"prompt": "a = 1", "echo": True, "logprobs": 3, "max_tokens": 1, "prompt_logprobs": 1}
    [found] = answered(bundled, body)["choices"]
    assert {len(one) for one in found["prompt_logprobs"] if one} <= {1, 2}
    body.pop("prompt_logprobs")
    [found] = answered(bundled, body)["choices"]
    assert "prompt_logprobs" not in found


def test_every_rank_is_filled(bundled: Served) -> None:
    scored = bundled.sdk.generate(PROMPT, max_tokens=1, prompt_logprobs=20).prompt_logprobs
    bare = bundled.sdk.generate(PROMPT, max_tokens=1, prompt_logprobs=0).prompt_logprobs
    for one, other in zip(scored[1:], bare[1:], strict=True):
        assert one is not None
        assert other is not None
        ids = [token_id for token_id, _ in one.top]
        assert one.rank == other.rank
        assert one.rank == ids.index(one.token_id) + 1 if one.token_id in ids else (one.rank or 0) > 20
    for path, prompt in (
        ("completions", {"prompt": PROMPT}),
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        body = {**prompt, "max_tokens": 1, "prompt_logprobs": 0}
        found = answered(bundled, body, path)
        entries = found["prompt_logprobs"] if "chat" in path else found["choices"][0]["prompt_logprobs"]
        assert all(isinstance(value["rank"], int) for one in entries[1:] for value in one.values())


def test_impossible_scores_are_refused_by_name(bundled: Served) -> None:
    assert refused(bundled, echo=True, logprobs=21) == "logprobs"
    assert refused(bundled, max_tokens=0, min_tokens=1) == "min_tokens"
    assert refused(bundled, max_tokens=-1) == "max_tokens"
    assert refused(bundled, echo="yes") == "echo"
    assert refused(bundled, echo=True, logprobs=1, prompt="") == "prompt"
    assert refused(bundled, echo=True, logprobs=1, prompt="a" * 100_000) == "prompt"
    for ids in ([4096], [2**32], [-1], [5] * 3000):
        for logprobs in (None, 1):
            assert refused(bundled, echo=True, logprobs=logprobs, prompt=ids).partition("[")[0] == "prompt"
    _, answer = bundled.post("/v1/completions", {"prompt": [5] * 3000, "echo": True})
    assert json.loads(answer)["error"]["code"] == "context_length_exceeded"


class Table:
    def __init__(self, *tokens: bytes, special: tuple[int, ...] = ()) -> None:
        self._tokens, self._special = tokens, special

    def __call__(self, token_id: int) -> bytes:
        return self._tokens[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special


def test_tokens_of_equal_text_do_not_overwrite_each_other() -> None:
    tokens = Table(b"a", b"a", b"\xe2", b"\xe2", b"b", b"bytes:\\xe2")
    top = ((1, -0.5), (0, -1.0), (3, -2.0), (2, -2.5), (5, -2.6))
    scored = [TokenLogprob(token_id=0, logprob=-1.0, top=top), TokenLogprob(token_id=4, logprob=-9.0, top=top)]
    found = text_logprobs([0, 4], scored, [0, 1], 5, tokens)
    others = {"bytes:\\xe2": -2.0, "token_id:2": -2.5, "token_id:5": -2.6}
    assert list(found["top_logprobs"]) == [
        {"token_id:1": -0.5, "a": -1.0, **others},
        {"a": -0.5, "token_id:0": -1.0, **others, "b": -9.0},
    ]
    assert list(text_logprobs([4], scored[1:], [0], 0, tokens)["top_logprobs"]) == [{"b": -9.0}]
    assert list(text_logprobs([4], scored[1:], [0], 1, tokens)["top_logprobs"]) == [{"a": -0.5, "b": -9.0}]


def test_offsets_count_whole_characters() -> None:
    tokens = Table(b"a", "ß".encode(), b"\xe6", b"\x97", b"\xa5", b"<s>", b" a", b"\xff", special=(5,))
    counted = TextOffsets(tokens, 4, has_special_tokens=False)
    assert counted.take([0, 1, 2, 3, 4, 5, 0]) == [4, 5, 6, 6, 6, 7, 7]
    assert counted.take([7, 0]) == [8, 9]
    assert TextOffsets(tokens, 0, has_special_tokens=True).take([5, 0]) == [0, 3]
    assert prompt_offsets("aß日a", [5, 0, 1, 2, 3, 4, 0], tokens) == [0, 0, 1, 2, 2, 2, 3]
    assert prompt_offsets("aa", [6, 0], tokens) == [0, 1]
    assert prompt_offsets("<s>a", [5, 0], tokens) == [0, 3]
    assert prompt_offsets("A\N{REPLACEMENT CHARACTER}a", [0, 7, 0], tokens) == [0, 1, 2]


def test_a_rank_beyond_the_likeliest_is_that_of_the_engine() -> None:
    one = TokenLogprob(token_id=0, logprob=-3.0, top=((1, -0.1), (2, -2.0)), rank=17)
    [found] = prompt_logprobs([one], 1, Table(b"a", b"b", b"c"))
    assert found is not None
    assert {name: value["rank"] for name, value in found.items()} == {"0": 17, "1": 1}
