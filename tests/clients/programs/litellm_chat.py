"""litellm: prints what it received as one JSON object. Runs in the client's own environment."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it fetches a list of prices

import litellm

URL, MODEL = sys.argv[1:]
COMMON = {"api_base": URL, "api_key": "none", "max_tokens": 16, "temperature": 0}
MESSAGES = [{"role": "user", "content": "add two numbers"}]

chat = litellm.completion(model=f"openai/{MODEL}", messages=MESSAGES, **COMMON)
stream = litellm.completion(model=f"openai/{MODEL}", messages=MESSAGES, stream=True, **COMMON)
text = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="def", **COMMON)
response = litellm.responses(
    model=f"openai/{MODEL}",
    input=MESSAGES,
    api_base=URL,
    api_key="none",
    max_output_tokens=16,
    temperature=0,
    include=["reasoning.encrypted_content"],
    tools=[{"type": "web_search"}],
    reasoning={"effort": "low", "summary": "auto"},
    text={"verbosity": "low"},
    extra_body={"ignore_eos": True, "client_metadata": {"a": "b"}},
)
is_too_long = False
try:
    litellm.completion(model=f"openai/{MODEL}", messages=[{"role": "user", "content": "x = 1\n" * 10_000}], **COMMON)
except litellm.ContextWindowExceededError:
    is_too_long = True
print(
    json.dumps(
        {
            "chat": chat.choices[0].message.content,
            "tokens": chat.usage.completion_tokens,
            "streamed": "".join(one.choices[0].delta.content or "" for one in stream),
            "text": text.choices[0].text,
            "response": response.output[0].content[0].text,
            "too_long": is_too_long,
        }
    )
)
