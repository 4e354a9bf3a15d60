"""A process that runs chat templates, and tokenizers whose patterns may never end (pdserve/isolated/process.py starts
it).

Its first message has `templates`, the `control_tokens` that they must not mix with a request's text, the `nonce` of the
secret names, and the `folder` of a tokenizer; each may be null. It is answered by {"failed": reason or null} and the
facts about the templates. Each further message names what to do: `render` a chat, or encode a `chat`, a `text` or
`bad_words`. A chat is the ChatPrompt of inference.proto; texts and token ids are bytes too.
"""

from __future__ import annotations

import resource
import sys
from array import array
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

from pdserve.core.errors import ConfigError, InvalidRequest, ModelError
from pdserve.isolated import child
from pdserve.text.chat import ChatTemplate, TemplateSources, compile_templates, reasoning_format
from pdserve.text.chat_encoder import Chat, ChatEncoder, ChatRenderer, chat_of, secret_names
from pdserve.text.tokenizer import HuggingFaceTokenizer, bad_word_ids
from pdserve.v1 import inference_pb2

MEMORY_BYTES: Final = 512 * 2**20
COMPILING: Final = child.Limits(cpu_s=5.0, wall_s=50.0, memory_bytes=MEMORY_BYTES)
LOADING: Final = child.Limits(cpu_s=20.0, wall_s=50.0, memory_bytes=4 * 2**30)  # a tokenizer too
PROBE_CPU_S: Final = 0.25  # of one history that is rendered to learn about a template
PROBES_CPU_S: Final = 1.0  # of all of them


@final
@dataclass(slots=True)
class _Probes:
    """Renders in processes of their own, because only some histories may have no end."""

    left_s: float = PROBES_CPU_S

    def __call__(self, render: Callable[[], str]) -> str | None:
        if self.left_s <= 0:
            return None

        def work() -> str | None:
            try:
                return render()
            except Exception:  # the template takes no such history
                return None

        before_s = _cpu_of_children_s()
        cpu_s = min(PROBE_CPU_S, self.left_s)
        found = child.run(work, child.Limits(cpu_s, 10 * cpu_s, MEMORY_BYTES))
        if "ended" in found:
            self.left_s -= max(_cpu_of_children_s() - before_s, 0.0)
        text: str | None = found.get("value")
        return text


@final
class _TooLong(Exception):
    pass


@final
class _Texts:
    def __init__(self, load: dict[str, Any]) -> None:
        """Raises ModelError."""
        template = None if load["templates"] is None else _template(load["templates"])
        self.facts = {} if template is None else _facts(template)
        self._renderer: ChatRenderer | None = None
        self._encoder: ChatEncoder | None = None
        self._tokenizer: HuggingFaceTokenizer | None = None
        if load["folder"] is not None:
            self._tokenizer = HuggingFaceTokenizer(Path(load["folder"]), is_limited=True)
            self._tokenizer.warm_up()
            if template is not None:
                self._encoder = ChatEncoder(self._tokenizer, template)
        elif template is not None and load["control_tokens"] is not None:
            names = secret_names(load["control_tokens"], load["nonce"])
            self._renderer = ChatRenderer(template, load["control_tokens"], names)

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._answer(asked)
        except (InvalidRequest, ModelError) as error:
            kind = "model" if isinstance(error, ConfigError) else "request"
            return {"error": [kind, str(error.field), str(error.seen), error.expected]}
        except _TooLong as error:
            return {"num_chars": error.args[0]}

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        keep = asked.get("keep")
        if asked["do"] == "render":
            assert self._renderer is not None
            rendered = self._renderer.render(_chat(asked))
            return {"marked": to_bytes(rendered.marked), "reasoning": rendered.reasoning.value}
        assert self._tokenizer is not None
        if asked["do"] == "chat":
            assert self._encoder is not None
            most = asked["max_chars"]

            def check_chars(num_chars: int) -> None:
                if most is not None and num_chars > most:
                    raise _TooLong(num_chars)

            encoded = self._encoder.encode(_chat(asked), keep, check_chars)
            return {"ids": ids_to_bytes(encoded.token_ids), "reasoning": encoded.reasoning.value}
        if asked["do"] == "bad_words":
            return {"ids": bad_word_ids(asked["words"], self._tokenizer)}
        text = to_text(asked["text"])
        if keep is not None:
            return {"ids": ids_to_bytes(self._tokenizer.encode_tail(text, keep))}
        return {"ids": ids_to_bytes(self._tokenizer.encode(text, has_special_tokens=asked["has_special_tokens"]))}


def to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def to_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def ids_to_bytes(ids: list[int]) -> bytes:
    return array("I", ids).tobytes()


def ids_of(data: bytes) -> list[int]:
    return array("I", data).tolist()


def _chat(asked: dict[str, Any]) -> Chat:
    return chat_of(
        inference_pb2.ChatPrompt.FromString(asked["chat"]),
        has_special_tokens=asked["has_special_tokens"],
        add_generation_prompt=asked["add_generation_prompt"],
    )


def _template(held: dict[str, Any]) -> ChatTemplate:
    return compile_templates(TemplateSources(**held), _Probes())


def _facts(template: ChatTemplate) -> dict[str, Any]:
    return {"tool_format": template.tool_format, "reasoning_format": reasoning_format(template)}


def _cpu_of_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    load = child.begin()
    child.limit_loading(COMPILING if load["folder"] is None else LOADING)
    try:
        texts = _Texts(load)
    except ModelError as error:
        child.send({"failed": [str(error.field), str(error.seen), error.expected]})
        return 0
    except MemoryError:
        child.send({"failed": [part_of(load), "one that needs too much memory", "one that loads with less memory"]})
        return 0
    child.end_loading()
    child.send({"failed": None, **texts.facts})
    child.serve(texts.answer, MEMORY_BYTES)
    return 0


def load_message(
    templates: TemplateSources | None,
    *,
    control_tokens: list[str] | None = None,
    nonce: str = "",
    folder: str | None = None,
) -> dict[str, Any]:
    """The first message. Without control tokens, it only checks the templates."""
    held = None if templates is None else {**asdict(templates), "named_tokens": dict(templates.named_tokens)}
    return {"templates": held, "control_tokens": control_tokens, "nonce": nonce, "folder": folder}


def part_of(load: Mapping[str, Any]) -> str:
    """The files of the model that a process with this first message loads."""
    if load["folder"] is None:
        return "chat_template"
    return "tokenizer.json" if load["templates"] is None else "chat_template or tokenizer.json"


if __name__ == "__main__":
    sys.exit(main())
