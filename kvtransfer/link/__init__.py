"""One connection between a prefill and a decode worker: connect, authenticate, send, receive; one thread each.

It executes what kvtransfer/protocol decides, over a transport of kvtransfer/transports. Read `sender.py` and
`receiver.py` first; `endpoint.py` makes both for a worker.
"""
