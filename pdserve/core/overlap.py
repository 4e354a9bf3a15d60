"""How long after its first token a prompt's KV has landed, in closed form. Pure.

KV becomes ready in parts, the last of them with the first token. Parts leave in order, each once it is ready and
the link has moved those before it:

    left_i  = max(left_(i-1), ready_i) + bytes_i / bandwidth
    exposed = latency + left_n - ready_n
            = latency + max over i of (bytes_i + .. + bytes_n) / bandwidth - (ready_n - ready_i)

What is not exposed is hidden behind the computing. The simulator's network moves parts by the same rule, so the
price of a placement, the prefill worker's choice of when to send, and what a simulation shows are one formula.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.core.latency import LinkModel


def exposed_s(parts: Iterable[tuple[float, float]], link: LinkModel) -> float:
    """Seconds from the last part's readiness to its landing; 0 where nothing travels.

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
    """The same for chunks that hold `chunk_bytes` each, but for the last: in constant time.

    `chunks_s` passes from the first part's readiness to the last one's, `last_s` from the last but one's. Exact where
    no chunk but the last takes less time than the one before it, as with growing context: what waits then is a convex
    function of the part that the link has been busy since, and greatest at one of its ends.
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
    """What is exposed of one chunk alone, latency apart, where it leaves in `groups` equal ones as layers are done."""
    later = 1.0 - 1.0 / groups
    return max(num_bytes / groups / bandwidth, num_bytes / bandwidth - computing_s * later)


def hidden_share(busy_s: float, exposed_s: float) -> float:
    """Of the time that a transfer's bytes were on their way, the share that passed before the last was computed.

    `exposed_s` holds the last message's latency and the receiver's word, too, so the share is not flattered.
    """
    return max(0.0, 1.0 - exposed_s / busy_s) if busy_s > 0.0 else 0.0
