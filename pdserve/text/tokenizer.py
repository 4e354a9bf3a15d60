"""A model's tokenizer: a Hugging Face tokenizer.json, or `toy`, whose tokens are bytes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, final

from pdserve.bounded_file import MAX_TOKENIZER_BYTES, parse_json, read_json_object, read_text
from pdserve.core.errors import InternalError, InvalidRequest, ModelError
from pdserve.model_source import TOY_MODELS
from pdserve.text.detokenize import (
    ByteDetokenizer,
    Detokenizer,
    Join,
    byte_level_bytes,
    make_detokenizer,
    read_rule,
    token_bytes,
)
from pdserve.text.pieces import MIN_CHARS, KeptParts, PieceEncoder
from pdserve.text.text_bounds import TextBounds, text_bounds
from pdserve.tokenizer_json import is_linear, is_rust_error, tokens_around, without_patterns

MAX_WHOLE_CHARS: Final = 1_000_000  # limit of a text whose tail is needed but cannot be cut: tokenizing it takes 0.2 GB
TOY_EOS: Final = 256
SPACE_MARKS: Final = (" ", "▁", "Ġ")  # spellings of a space in vocabularies
NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer(Protocol):
    """Thread-safe."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, has_special_tokens: bool = True, salt: bytes | None = None) -> list[int]:
        """Token ids of `text`; optionally with the tokens that the tokenizer adds around a text (BOS).

        `salt` is that of the text's KV blocks. The ids of a long text's parts are kept for texts with the same salt;
        None: they are not kept.
        """
        ...

    def warm_up(self) -> None:
        """Prepares for long texts, in up to a second of CPU time; until then encode() reads them whole."""
        ...

    @property
    def kept(self) -> KeptParts | None:
        """The kept ids; None if there are none."""
        ...

    @property
    def bounds(self) -> TextBounds: ...

    @property
    def is_linear(self) -> bool:
        """Whether texts may be encoded in this process: the time and memory are in proportion to the text. Otherwise
        encode() raises InternalError, and a child process encodes (pdserve/text/child.py)."""
        ...

    def encode_tail(self, text: str, num_tokens: int) -> list[int]:
        """The last `num_tokens` of encode(text). Reads only the required part of the text, if it is known.

        Raises InvalidRequest if it would have to read more than MAX_WHOLE_CHARS.
        """
        ...

    def tail_start(self, text: str, num_tokens: int) -> int:
        """The position from which `text` must be tokenized so that its last `num_tokens` tokens are found.

        Raises InvalidRequest if more than MAX_WHOLE_CHARS would have to be read.
        """
        ...

    def control_tokens(self, template: str) -> dict[str, int]:
        """The id of each token that a chat must not contain as text: special tokens, and others that `template`
        writes."""
        ...

    def with_names(self, names: Mapping[str, str]) -> Callable[[str], list[int]]:
        """encode(text, has_special_tokens=False), where some tokens have other names, and their own are only text."""
        ...

    def decode(self, token_ids: Sequence[int], *, has_special_tokens: bool = False) -> str:
        """Text, with or without special tokens."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What the token writes after other text; the name of a special token; empty if the id has no token."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether the token has no text where special tokens are skipped."""
        ...

    def detokenizer(self, prompt_token_ids: Iterable[int] = (), *, has_special_tokens: bool = False) -> Detokenizer:
        """For the tokens after a prompt: decodes the text that they add to the prompt's text."""
        ...


def load_tokenizer(model: str) -> Tokenizer:
    """Raises ModelError if the folder has no supported tokenizer.json."""
    return ToyTokenizer() if model in TOY_MODELS else HuggingFaceTokenizer(Path(model))


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, or {} if there is none."""
    return read_json_object(folder / "tokenizer_config.json") or {}


def named_token(config: dict[str, Any], name: str) -> str | None:
    """`bos_token` and similar fields are text or an object with `content`."""
    held = config.get(name)
    content = held.get("content") if isinstance(held, dict) else held
    return content if isinstance(content, str) else None


@final
class HuggingFaceTokenizer:
    def __init__(self, folder: Path, *, is_limited: bool = False) -> None:
        """`is_limited`: this process has limits for each text, so that any tokenizer may encode. Raises ModelError."""
        from tokenizers import Tokenizer as Backend  # imported here, so that toy processes do not load it

        path = folder / "tokenizer.json"
        if not folder.is_dir():
            raise ModelError("model", str(folder), "a folder of a Hugging Face checkpoint, or toy")
        if not os.path.lexists(path):
            raise ModelError("model", f"{folder} without tokenizer.json", "a folder with tokenizer.json")
        config = read_tokenizer_config(folder)

        def load(text: str) -> Any:
            try:
                backend = Backend.from_str(text)
                backend.no_truncation()
                backend.no_padding()
                _mark_special(backend, config)
                with contextlib.suppress(Exception):  # some panic only when they encode
                    backend.encode("a")
            except BaseException as error:
                if not is_rust_error(error):
                    raise
                raise ModelError(
                    "tokenizer.json", str(error), "a tokenizer that the tokenizers library reads"
                ) from error
            return backend

        text = read_text(path, MAX_TOKENIZER_BYTES, path.name, ModelError)
        raw = parse_json(text, path.name, ModelError)
        if not isinstance(raw, dict):
            raise ModelError(path.name, type(raw).__name__, "a JSON object")
        # The library compiles and runs patterns while it loads.
        is_known = is_linear(raw)
        serialized: dict[str, Any] = {}
        if is_known or is_limited:
            self._backend = load(text)
            serialized = json.loads(self._backend.to_str())
            is_known = is_known and is_linear(serialized)  # as the library has read it
        self.is_linear = is_known or is_limited
        if not self.is_linear:
            self._backend = load(json.dumps(without_patterns(raw)))
            serialized = json.loads(self._backend.to_str())
            serialized |= {name: raw.get(name) for name in ("normalizer", "pre_tokenizer")}
        self.bounds = text_bounds(serialized)
        self._around = tokens_around(serialized)
        self._making = threading.Lock()
        self._pieces: PieceEncoder | None = None
        self._rule = read_rule(serialized.get("decoder"))
        self._special = frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        self._tokens: dict[int, str | None] = {}
        self._bytes: dict[int, bytes] = {}
        self._written: dict[int, bytes] = {}

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *, has_special_tokens: bool = True, salt: bytes | None = None) -> list[int]:
        self._check_linear()
        around = self._around if has_special_tokens else ((), ())
        pieces = self._pieces  # not made here, and not waited for: an event loop calls this
        if pieces is None or len(text) < MIN_CHARS or around is None:
            return self._encode_all([text], has_special_tokens=has_special_tokens)[0]
        return [*around[0], *pieces.encode(text, salt), *around[1]]

    def warm_up(self) -> None:
        if not self.is_linear or not self.bounds.word_end:
            return
        with self._making:
            if self._pieces is None:
                tokens = (
                    token_bytes(self._rule, one) for one in self._backend.get_vocab() if one.startswith(SPACE_MARKS)
                )
                words = (one.decode("utf-8", "replace") for one in tokens)
                self._pieces = PieceEncoder(self._encode_all, words, self.bounds.word_end)

    @property
    def kept(self) -> KeptParts | None:
        return None if self._pieces is None else self._pieces.kept

    def _encode_all(self, texts: Sequence[str], *, has_special_tokens: bool = False) -> list[list[int]]:
        # The batch call releases the GIL; encode() would block other threads, and with them every stream.
        found = self._backend.encode_batch_fast(texts, add_special_tokens=has_special_tokens)
        return [one.ids for one in found]

    def encode_tail(self, text: str, num_tokens: int) -> list[int]:
        return self.encode(text[self.tail_start(text, num_tokens) :])[-num_tokens:]

    def tail_start(self, text: str, num_tokens: int) -> int:
        start = self.bounds.tail_start(text, num_tokens)
        if start == 0 and len(text) > max(MAX_WHOLE_CHARS, self.bounds.max_chars(num_tokens) or 0):
            raise InvalidRequest(
                "prompt",
                f"{len(text)} characters, without a place where they could be cut",
                f"at most {MAX_WHOLE_CHARS} characters, or words with spaces between them",
            )
        return start

    def control_tokens(self, template: str) -> dict[str, int]:
        added = self._backend.get_added_tokens_decoder()
        return {
            token.content: token_id
            for token_id, token in added.items()
            if token.content.strip() and (token.special or _is_control(token.content, template))
        }

    def with_names(self, names: Mapping[str, str]) -> Callable[[str], list[int]]:
        from tokenizers import Tokenizer as Backend

        from pdserve.text.control_tokens import renamed_tokenizer  # needs jinja2, which `doctor` must run without

        self._check_linear()
        serialized = json.dumps(renamed_tokenizer(json.loads(self._backend.to_str()), names))
        backend = Backend.from_str(serialized)
        for token, name in names.items():
            if (token_id := self._backend.token_to_id(token)) != backend.token_to_id(name):
                raise ModelError("tokenizer.json", f"{token!r} with the id {token_id}", "an id that follows its order")

        def encode(text: str) -> list[int]:
            ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return ids

        return encode

    def _check_linear(self) -> None:
        if not self.is_linear:
            raise InternalError("a tokenizer with unknown patterns was to encode without a limit")

    def decode(self, token_ids: Sequence[int], *, has_special_tokens: bool = False) -> str:
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=not has_special_tokens)
        return text

    def detokenizer(self, prompt_token_ids: Iterable[int] = (), *, has_special_tokens: bool = False) -> Detokenizer:
        if self._rule.join is Join.BYTES and not has_special_tokens:
            return ByteDetokenizer(self._byte_piece)
        lookup = self._any_token if has_special_tokens else self._token
        is_continued = any(lookup(token_id) for token_id in prompt_token_ids)
        return make_detokenizer(self._rule, lookup, is_continued=is_continued)

    def token_bytes(self, token_id: int) -> bytes:
        """Cached, because a call may ask for thousands; the size is bounded by the vocabulary."""
        found = self._written.get(token_id)
        if found is None:
            if token_id in self._special:
                found = (self._backend.id_to_token(token_id) or "").encode()
            else:
                token = self._token(token_id)
                found = b"" if token is None else token_bytes(self._rule, token)
            if found:
                self._written[token_id] = found
        return found

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def _token(self, token_id: int) -> str | None:
        """Cached; the size is bounded by the vocabulary."""
        try:
            return self._tokens[token_id]
        except KeyError:
            token = None if token_id in self._special else self._backend.id_to_token(token_id)
            if token is not None:
                self._tokens[token_id] = token
            return token

    def _any_token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id) if token_id in self._special else self._token(token_id)

    def _byte_piece(self, token_id: int) -> bytes:
        try:
            return self._bytes[token_id]
        except KeyError:
            token = self._token(token_id)
            piece = byte_level_bytes(token)
            if token is not None:
                self._bytes[token_id] = piece
            return piece


@final
class ToyTokenizer:
    """Token id = byte value; TOY_EOS ends the text and has no spelling."""

    is_linear = True
    kept = None
    vocab_size = 257
    bounds = TextBounds(max_token_chars=1, separators="")

    def encode(self, text: str, *, has_special_tokens: bool = True, salt: bytes | None = None) -> list[int]:
        return list(text.encode())

    def warm_up(self) -> None:
        pass

    def encode_tail(self, text: str, num_tokens: int) -> list[int]:
        return list(text[-num_tokens:].encode())[-num_tokens:]

    def tail_start(self, text: str, num_tokens: int) -> int:
        return max(len(text) - num_tokens, 0)

    def control_tokens(self, template: str) -> dict[str, int]:
        return {}

    def with_names(self, names: Mapping[str, str]) -> Callable[[str], list[int]]:
        return self.encode

    def decode(self, token_ids: Sequence[int], *, has_special_tokens: bool = False) -> str:
        return b"".join(map(_toy_piece, token_ids)).decode("utf-8", "replace")

    def detokenizer(self, prompt_token_ids: Iterable[int] = (), *, has_special_tokens: bool = False) -> Detokenizer:
        return ByteDetokenizer(_toy_piece)

    def token_bytes(self, token_id: int) -> bytes:
        return _toy_piece(token_id)

    def is_special(self, token_id: int) -> bool:
        return token_id == TOY_EOS


def _toy_piece(token_id: int) -> bytes:
    return bytes((token_id,)) if token_id < TOY_EOS else b""


def _is_control(token: str, template: str) -> bool:
    """Of a token that is not marked as special. Models also have tokens for spaces and for HTML, which are text."""
    is_mark = re.search(r"[^\w\s]", token) is not None
    return (is_mark and token in template) or re.fullmatch(r"<[|｜].*[|｜]>", token) is not None


def _mark_special(backend: Any, config: dict[str, Any]) -> None:
    """Tokens in tokenizer_config.json are special even if tokenizer.json does not mark them.

    As in transformers, add_bos_token and add_eos_token are ignored: the post-processor of tokenizer.json adds tokens
    around a text.
    """
    named = [named_token(config, name) for name in NAMED_TOKENS]
    known = [token for token in named if token is not None and backend.token_to_id(token) is not None]
    backend.add_special_tokens(list(dict.fromkeys(known)))


# --- bad words ------------------------------------------------------------------------------------------------
# Bad words as token sequences, for the engine to ban.
#
# As in vLLM, a word is tokenised both at the beginning of a text and after a space, which may give different tokens. A
# sequence that ends with another one of the list is redundant and left out.


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    found: dict[tuple[int, ...], None] = {}  # in order
    for word in words:
        bare = word.lstrip() or word
        for text in (bare, " " + bare):
            found[tuple(tokenizer.encode(text, has_special_tokens=False))] = None
    return [one for one in found if not any(other != one and _ends_in(one, other) for other in found)]


def _ends_in(sequence: tuple[int, ...], end: tuple[int, ...]) -> bool:
    return 0 < len(end) <= len(sequence) and sequence[len(sequence) - len(end) :] == end
