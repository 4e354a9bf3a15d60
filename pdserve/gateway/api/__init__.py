"""OpenAI's API as data: requests, answers, errors and the OpenAPI document. Pure.

Knows no socket; the rest of the gateway reads and writes with it. Read `sdk_call.py` first, which turns a request into
a call of the SDK, then `replies.py`, which turns its pieces into an answer.
"""
