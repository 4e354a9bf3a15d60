"""langchain-openai: prints what it received as one JSON object. Runs in the client's own environment."""

import json
import sys

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAI

URL, MODEL = sys.argv[1:]
PARAMETERS = {
    "title": "add",
    "description": "adds",
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["a"],
    "additionalProperties": False,
}
MESSAGES = [HumanMessage("add two numbers")]

chat = ChatOpenAI(base_url=URL, api_key="none", model=MODEL, max_tokens=16, temperature=0, seed=5, max_retries=0)
found = {"chat": chat.invoke(MESSAGES).content, "streamed": "".join(one.content for one in chat.stream(MESSAGES))}
patient = ChatOpenAI(base_url=URL, api_key="none", model=MODEL, max_tokens=120, temperature=0, max_retries=0)
[call, *_] = patient.bind_tools([PARAMETERS], tool_choice="any").invoke(MESSAGES).tool_calls
found["tool"] = [call["name"], call["args"]]
found["structured"] = patient.with_structured_output(PARAMETERS, method="json_schema").invoke(MESSAGES)
responses = ChatOpenAI(
    base_url=URL, api_key="none", model=MODEL, max_tokens=16, temperature=0, max_retries=0, use_responses_api=True
)
found["response"] = responses.invoke(MESSAGES).text
text = OpenAI(base_url=URL, api_key="none", model=MODEL, max_tokens=16, temperature=0, max_retries=0)
found["text"] = text.invoke("def")
try:
    chat.invoke("x = 1\n" * 10_000)
except ContextOverflowError:
    found["too_long"] = True
print(json.dumps(found, default=str))
