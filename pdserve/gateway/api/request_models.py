"""The fields of OpenAI's requests, and vLLM's additions, as pydantic models. Pure: types and meanings only.

docs/reference/http.md lists them; field_support.py has the API's other fields.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, final

from pydantic import BaseModel, ConfigDict, Discriminator, Field, GetCoreSchemaHandler, Tag, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from pdserve.core.grammar import MAX_CHOICES
from pdserve.core.types import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_MESSAGES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
)

TOO_MANY: Final = "too_many"  # pydantic's type of the error
MAX_PROMPTS: Final = 128
MAX_PROMPT_IDS: Final = 2**20  # more than the context window of any model
MAX_PARTS: Final = 1024  # of a message's content
MAX_NAMES: Final = 256  # in an object with known fields
MAX_KEYWORDS: Final = 4096  # in a schema


@final
@dataclass(frozen=True, slots=True)
class Most:
    """The most items of an array, or names in an object. The number is checked before the first item is validated, and
    validation ends at the first wrong item of an array. So a body costs no more steps than its limits allow.

    Every array and every object with free names needs one (tests/unit/gateway/test_steps.py).
    """

    count: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        inner = handler(source)
        assert inner["type"] in ("list", "dict")
        inner["max_length"] = self.count  # type: ignore[typeddict-unknown-key]
        if inner["type"] == "list":
            inner["fail_fast"] = True
        return core_schema.no_info_before_validator_function(self._checked, inner)

    def _checked(self, given: Any) -> Any:
        if isinstance(given, (list, dict)):
            _check_count(given, self.count)
        return given


def _check_count(given: Sized, most: int) -> None:
    if len(given) > most:
        noun = "names" if isinstance(given, dict) else "items"
        raise PydanticCustomError(TOO_MANY, "at most {most} {noun}", {"seen": len(given), "most": most, "noun": noun})


Schema = Annotated[dict[str, Any], Most(MAX_KEYWORDS)]
TokenIds = Annotated[list[int], Most(MAX_PROMPT_IDS)]
TemplateArguments = Annotated[dict[str, str | bool | int | float], Most(MAX_NAMES)]


class NullIsAbsent(BaseModel):
    """At every level, as http_input.parse does for the request itself: clients of typed languages send all fields."""

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        _check_count(given, MAX_NAMES)
        return {name: value for name, value in given.items() if value is not None}


class Strict(NullIsAbsent):
    """Converts no types and accepts no unknown fields, because an ignored value would silently change the answer."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class History(NullIsAbsent):
    """What a client sends back, of earlier answers or of its own. Clients add fields to it (`parsed`, `index`, ids)
    that are not part of the conversation; these are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class JsonSchema(Strict):
    name: str = "schema"
    description: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class PlainFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[PlainFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Strict):
    """vLLM's; one of the five."""

    json_: Schema | str | bool | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Most(MAX_CHOICES)] | None = None
    grammar: str | None = None


def described(text: str) -> Any:
    """An optional field, and its line in the reference."""
    return Field(default=None, description=text)


class SamplingFields(Strict):
    """The fields that all requests share. An absent field has the server's default."""

    model: str | None = described("name of the served model or of a LoRA adapter; may be absent")
    stream: bool | None = described("server-sent events")
    temperature: float | None = described("0 to 100; 0 is greedy; where absent, the model's default or 1")
    top_p: float | None = described("above 0, to 1")
    stop: str | Annotated[list[str], Most(MAX_STOP_STRINGS)] | None = described("up to 16 strings")
    seed: int | None = described("64 bits, signed or unsigned; random where absent")
    presence_penalty: float | None = described("-2 to 2")
    frequency_penalty: float | None = described("-2 to 2")
    logit_bias: Annotated[dict[str, float], Most(MAX_LOGIT_BIASES)] | None = described(
        "token id to -100 to 100; up to 1024"
    )
    # vLLM's
    top_k: int | None = described("vLLM; 0 or -1 means all")
    min_p: float | None = described("vLLM; 0 to 1")
    top_n_sigma: float | None = described("pdserve only; 0 to 100")
    repetition_penalty: float | None = described("vLLM; 0.01 to 100")
    min_tokens: int | None = described("vLLM; least generated tokens")
    ignore_eos: bool | None = described("vLLM; continue after the end of sequence")
    stop_token_ids: Annotated[list[int], Most(MAX_STOP_TOKEN_IDS)] | None = described("vLLM; up to 64")
    include_stop_str_in_output: bool | None = described("vLLM; keep the stop string in the text")
    skip_special_tokens: bool | None = described("vLLM; false shows special tokens")
    bad_words: Annotated[list[str], Most(MAX_BAD_WORDS)] | None = described(
        "vLLM; texts that the answer never contains"
    )
    allowed_token_ids: Annotated[list[int], Most(MAX_ALLOWED_TOKEN_IDS)] | None = described(
        "vLLM; only these are sampled"
    )
    truncate_prompt_tokens: int | None = described("vLLM; keep this many last prompt tokens")
    priority: int | None = described("vLLM; a smaller value is served first among requests of equal slack")
    cache_salt: str | None = described(
        "vLLM; only requests with the same salt share cached prefixes; 1 to 256 characters"
    )
    request_id: str | None = described("vLLM; 1 to 128 printable characters; the header `x-request-id` does the same")


class SamplingRequest(SamplingFields):
    """The fields that chat and text completions share."""

    stream_options: StreamOptions | None = described(
        "`include_usage`, `include_obfuscation`, and vLLM's `continuous_usage_stats`"
    )
    max_tokens: int | None = described(
        "most generated tokens; absent: 16 for texts, the server's limit for chats; 0 for texts only: scores the prompt"
    )
    n: int | None = described("answers, 1 to 16; over 1 only with a temperature above 0")
    response_format: ResponseFormat | None = described(
        "`text`, `json_object` or `json_schema`, which is always enforced"
    )
    prompt_logprobs: int | None = described("vLLM; 0 to 20, not while streaming")
    structured_outputs: StructuredOutputs | None = described(
        "vLLM; one of `json`, `json_object`, `regex`, `choice`, `grammar`"
    )
    return_token_ids: bool | None = described("vLLM; `token_ids` of each choice")


class TextPart(History):
    type: Literal["text"]
    text: str


class RefusalPart(History):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class Function(Strict):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")  # OpenAI allows 64, Anthropic 128
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedChoice(Strict):
    type: Literal["function"]
    function: FunctionName


class CalledFunction(History):
    name: str
    arguments: str | None = None  # null or empty: no arguments


class ToolCall(History):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(History):
    """Has all fields of a message in our answers, because clients send those back unchanged. What an answer of
    another server said in `refusal`, `audio` or `function_call` is rejected and not ignored."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Most(MAX_PARTS)] | None = None
    tool_calls: Annotated[list[ToolCall], Most(MAX_TOOL_CALLS)] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    refusal: str | None = None  # in place of the content
    audio: None = None
    function_call: None = None
    reasoning_content: str | None = None  # of an earlier answer; the template decides what the model sees of it
    reasoning: str | None = None  # vLLM's newer name of it


class ChatRequest(SamplingRequest):
    messages: Annotated[list[Message], Most(MAX_MESSAGES)] = Field(
        description="roles system, developer (as system), user, assistant and tool; content is text or parts of text"
    )
    max_completion_tokens: int | None = described("the same as `max_tokens`")
    tools: Annotated[list[Tool], Most(MAX_TOOLS)] | None = described("functions that the model may call; up to 128")
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = described(
        "`none`, `auto`, `required` or a function; the last two are enforced by a grammar"
    )
    parallel_tool_calls: bool | None = described("false allows one call")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = described(
        "to the chat template, if it reads the effort or whether to reason; `chat_template_kwargs` override it"
    )
    stop_in_reasoning: bool | None = described("pdserve only; true applies `stop` to the reasoning too")
    allow_special_tokens: bool | None = described(
        "pdserve only; true lets names of control tokens in the messages become these tokens"
    )
    chat_template_kwargs: TemplateArguments | None = described(
        "vLLM; values for names that the model's chat template reads, such as `enable_thinking`"
    )
    logprobs: bool | None = described("logprobs of the generated tokens")
    top_logprobs: int | None = described("0 to 64 most likely tokens, with `logprobs`")


class TextRequest(SamplingRequest):
    prompt: str | Annotated[list[str], Most(MAX_PROMPTS)] | TokenIds | Annotated[list[TokenIds], Most(MAX_PROMPTS)] = (
        Field(description="a text, token ids, or up to 128 of either, of which each gets `n` answers")
    )
    echo: bool | None = described("the prompt comes before each answer, with `logprobs` also its tokens")
    best_of: int | None = described("samples this many and returns the best `n`, at the end")
    logprobs: int | None = described(
        "0 to 64 most likely tokens beside each one, and the token itself; 0 to 20 beside `echo`"
    )


class TokenizeRequest(Strict):
    """vLLM's. A text or messages."""

    model: str | None = described("name of the served model; may be absent")
    prompt: str | None = described("a text")
    messages: Annotated[list[Message], Most(MAX_MESSAGES)] | None = described("a chat, as of /v1/chat/completions")
    tools: Annotated[list[Tool], Most(MAX_TOOLS)] | None = described("of a chat: functions that the model may call")
    add_special_tokens: bool | None = described(
        "the tokens that the tokenizer puts around a text; absent: true for a text, false for a chat"
    )
    add_generation_prompt: bool | None = described(
        "of a chat: the template begins the assistant's next message; true where absent"
    )
    continue_final_message: Literal[False] | None = described("of a chat: only false")
    chat_template_kwargs: TemplateArguments | None = described(
        "of a chat: values for names that the model's chat template reads"
    )
    return_token_strs: bool | None = described("the text of each token")


class DetokenizeRequest(Strict):
    """vLLM's."""

    model: str | None = described("name of the served model; may be absent")
    tokens: TokenIds = Field(description="token ids, at most as many as the context window has")


class LoadLoraRequest(Strict):
    """vLLM's."""

    lora_name: str = Field(
        description="that requests choose as their model; a present adapter of this name is replaced"
    )
    lora_path: str = Field(description="a folder on the workers, below one of their lora_folders")
    load_inplace: bool | None = described("without effect: an adapter is always replaced")


class UnloadLoraRequest(Strict):
    """vLLM's."""

    lora_name: str = Field(description="name of a loaded adapter")
    lora_int_id: int | None = described("without effect")


# --- /v1/responses --------------------------------------------------------------------------------------------

LOGPROBS: Final = "message.output_text.logprobs"


Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class InputPart(History):
    type: Literal["input_text", "output_text", "text"]
    text: str


_Part = Annotated[InputPart | RefusalPart, Field(discriminator="type")]


class InputMessage(History):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[_Part], Most(MAX_PARTS)]


class InputCall(History):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str | None = None


class InputResult(History):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[InputPart], Most(MAX_PARTS)]


class InputReasoning(History):
    """Reasoning of an earlier answer. Its text becomes `reasoning_content` of the assistant's message that follows."""

    type: Literal["reasoning"]
    summary: Annotated[list[Any], Most(MAX_PARTS)] | None = None
    content: Annotated[list[Any], Most(MAX_PARTS)] | None = None


class FunctionTool(History):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class OtherTool(NullIsAbsent):
    """One that OpenAI's or Anthropic's service runs, whose schema only its models know, or whose calls are no JSON. The
    model does not see it."""

    model_config = ConfigDict(extra="ignore", strict=True)
    type: str = Field(pattern=r"^[a-z0-9_]{1,64}$")


def by_type(*functions: str | None) -> Discriminator:
    """Tells tools of these types, whose tag is "function", from others, whose tag is "other"."""

    def tag(given: Any) -> str:
        kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
        return "function" if kind in functions else "other"

    return Discriminator(tag)


class FunctionChoice(Strict):
    type: Literal["function"]
    name: str


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    name: str
    schema_: Schema = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(Strict):
    format: PlainFormat | JsonObjectFormat | SchemaFormat | None = Field(default=None, discriminator="type")
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(History):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None


class ResponseStreamOptions(Strict):
    """The usage comes with the last event in any case."""

    include_obfuscation: bool = False
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


ITEMS: Final = {
    "message": InputMessage,
    "function_call": InputCall,
    "function_call_output": InputResult,
    "reasoning": InputReasoning,
}


class ResponsesRequest(SamplingFields):
    input: str | Annotated[list[Annotated[dict[str, Any], Most(MAX_NAMES)]], Most(MAX_MESSAGES)] = Field(
        description="a text, or items: messages, `function_call` and `function_call_output`"
    )
    instructions: str | None = described("a system message before the input")
    max_output_tokens: int | None = described("most generated tokens; absent: the server's limit")
    stream_options: ResponseStreamOptions | None = described("`include_obfuscation`; the usage is always sent")
    text: TextOptions | None = described(
        "`format`: `text`, `json_object` or `json_schema`, which is always enforced; `verbosity` has no effect"
    )
    reasoning: ReasoningOptions | None = described("`effort` as `reasoning_effort` of a chat; `summary` has no effect")
    tools: (
        Annotated[
            list[
                Annotated[
                    Annotated[FunctionTool, Tag("function")] | Annotated[OtherTool, Tag("other")], by_type("function")
                ]
            ],
            Most(2 * MAX_TOOLS),  # with those that are ignored
        ]
        | None
    ) = described("functions that the model may call; up to 128. Tools of other types are ignored")
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = described(
        "`none`, `auto`, `required` or a function; the last two are enforced by a grammar"
    )
    parallel_tool_calls: bool | None = described("false allows one call")
    chat_template_kwargs: TemplateArguments | None = described(
        "vLLM; values for names that the model's chat template reads, such as `enable_thinking`"
    )
    include: Annotated[list[Include], Most(MAX_NAMES)] | None = described(
        f"`{LOGPROBS}`; the others name parts that no answer has"
    )
    top_logprobs: int | None = described("0 to 64 most likely tokens, with the logprobs in `include`")
