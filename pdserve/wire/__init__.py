"""Messages on gRPC: codecs, statuses, proofs of the cluster's secret, and common parts of servers.

It imports core, tls and the generated stubs (pdserve/v1), but decides nothing about requests. Read `codec.py` first
(how a dataclass becomes a message), then `protocol.py`.
"""
