"""The HTTP gateway: serves OpenAI's API in front of any router, to which it connects with the SDK.

`api` and `tools` convert requests to SDK calls, pieces to chunks and errors to statuses; they are pure. `app.py` and
its helpers do the I/O. It reaches the cluster by pdserve.client alone, and never imports the router or an engine. Read
`app.py` first, then `api/sdk_call.py`.
"""
