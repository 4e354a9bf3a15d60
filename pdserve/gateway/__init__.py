"""The HTTP gateway: OpenAI's API in front of any router, by the SDK alone.

Pure modules convert (requests to SDK calls, pieces to chunks, errors to statuses); `app.py` and what it uses act.
"""
