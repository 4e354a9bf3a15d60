"""The HTTP gateway: serves OpenAI's API in front of any router, to which it connects with the SDK.

Pure modules convert requests to SDK calls, pieces to chunks and errors to statuses. `app.py` and its helpers do the
I/O.
"""
