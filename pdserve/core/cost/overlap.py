"""The time from a prompt's first token to the arrival of its KV, in closed form. Pure.

KV becomes ready in parts, the last part together with the first token. Parts are sent in order. A part is sent when it
is ready and the part before it was sent:

    left_i  = max(left_(i-1), ready_i) + bytes_i / bandwidth
    exposed = latency + left_n - ready_n
            = latency + max over i of (bytes_i + .. + bytes_n) / bandwidth - (ready_n - ready_i)

The rest is hidden behind computation. The simulator's network follows the same rule, so the cost of a placement, the
prefill worker's choice of when to send, and simulation use one formula.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.core.cost.latency import LinkModel


def exposed_s(parts: Iterable[tuple[float, float]], link: LinkModel) -> float:
    """Seconds from when the last part is ready to when it has arrived; 0 if there are no parts.

    `parts`: (when the part is ready, in seconds; its bytes), in order of readiness.
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
    """Like `exposed_s`, in constant time, for chunks of `chunk_bytes` each, except the last one.

    `chunks_s` is the time from the first to the last chunk's readiness, and `last_s` from the last but one. The result
    is exact if no chunk, except the last, takes less time than the one before it, as with growing context. The maximum
    in the formula is then over a convex function of i, so it is at one of the ends.
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
    """The exposed time, without latency, of a single chunk that is sent in `groups` equal groups of layers while it is
    computed."""
    later = 1.0 - 1.0 / groups
    return max(num_bytes / groups / bandwidth, num_bytes / bandwidth - computing_s * later)


def hidden_share(busy_s: float, exposed_s: float) -> float:
    """The share of a transfer's busy time that prefill hid: it was before the end of the last chunk's computation.

    `exposed_s` includes the latency of the last message and the receiver's confirmation, so the share is a lower bound.
    """
    return max(0.0, 1.0 - exposed_s / busy_s) if busy_s > 0.0 else 0.0
