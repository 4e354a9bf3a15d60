"""How long after its first token a prompt's KV has arrived, in closed form. Pure.

KV becomes ready in parts, the last of them with the first token. Parts are sent in order, each when it is ready and the
previous ones were sent:

    left_i  = max(left_(i-1), ready_i) + bytes_i / bandwidth
    exposed = latency + left_n - ready_n
            = latency + max over i of (bytes_i + .. + bytes_n) / bandwidth - (ready_n - ready_i)

The rest is hidden behind computation. The simulator's network follows the same rule, so the cost of a placement, the
prefill worker's choice of when to send, and simulation use one formula.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.core.latency import LinkModel


def exposed_s(parts: Iterable[tuple[float, float]], link: LinkModel) -> float:
    """Seconds from the last part's readiness to its arrival; 0 if nothing is sent.

    `parts`: (seconds when it is ready, bytes) in order of readiness.
    """
    latency_s, bandwidth = link.latency_s, link.bandwidth_bytes_s
    ready_s = left_s = total = 0.0
    for ready_s, num_bytes in parts:
        left_s = max(left_s, ready_s) + num_bytes / bandwidth
        total += num_bytes
    return latency_s + left_s - ready_s if total > 0.0 else 0.0


def chunked_exposed_s(
    link: LinkModel,
    *,
    num_bytes: float,
    chunk_bytes: float,
    last_bytes: float,
    chunks_s: float,
    last_s: float,
) -> float:
    """The same for chunks of `chunk_bytes` each, except the last, in constant time.

    `chunks_s` is the time from the first part's readiness to the last one's, `last_s` that from the last but one. The
    result is exact if no chunk but the last takes less time than the one before it, as with growing context: the
    waiting time is then a convex function of the part since which the link is busy, so its maximum is at one of the
    ends.
    """
    latency_s, per_byte_s = link.coefficients
    waiting_s = per_byte_s * (last_bytes if last_bytes < num_bytes else num_bytes)
    two_bytes = last_bytes + chunk_bytes
    two_s = per_byte_s * (two_bytes if two_bytes < num_bytes else num_bytes) - last_s
    if two_s > waiting_s:
        waiting_s = two_s
    all_s = per_byte_s * num_bytes - chunks_s
    if all_s > waiting_s:
        waiting_s = all_s
    return latency_s + waiting_s if num_bytes > 0.0 else 0.0


def grouped_s(num_bytes: float, computing_s: float, groups: int, bandwidth: float) -> float:
    """The exposed time of a single chunk, without latency, if it is sent in `groups` equal groups of layers as they are
    computed."""
    later = 1.0 - 1.0 / groups
    return max(num_bytes / groups / bandwidth, num_bytes / bandwidth - computing_s * later)


def hidden_share(busy_s: float, exposed_s: float) -> float:
    """The share of a transfer's busy time that was before the last chunk was computed.

    `exposed_s` includes the latency of the last message and the receiver's confirmation, so the share is a lower bound.
    """
    return max(0.0, 1.0 - exposed_s / busy_s) if busy_s > 0.0 else 0.0
