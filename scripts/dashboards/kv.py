"""What KV transfers cost, and what the prefix cache saves."""

from __future__ import annotations

from typing import Final

from scripts.dashboards.panels import Dashboard, Panel, Query, Row, gauge, quantiles, share, total

_REMOTE: Final = "requests on the remote path"

_TRANSFERS: Final = Row(
    title="KV transfers",
    panels=(
        Panel(
            title="KV bytes",
            description="Received and committed, and saved because the receiver already had them.",
            unit="Bps",
            queries=[
                Query(total("pdserve_kv_transfer_bytes_total"), "transferred"),
                Query(total("pdserve_kv_transfer_saved_bytes_total"), "saved"),
            ],
        ),
        Panel(
            title="Transfers by outcome",
            description="A cancelled transfer was no longer needed. The prompt of a failed one is computed again.",
            unit="ops",
            queries=[Query(total("pdserve_kv_transfers_total", by="outcome"), "{{outcome}}")],
        ),
        Panel(
            title="Share of transfers that failed",
            description="Of those that were committed or failed. The alert PdserveTransfersFail fires above 1 %.",
            unit="percentunit",
            warn=0.01,
            needs=_REMOTE,
            queries=[
                Query(
                    share(
                        total("pdserve_kv_transfers_total", 'outcome="failed"'),
                        total("pdserve_kv_transfers_total", 'outcome=~"committed|failed"'),
                    ),
                    "failed",
                )
            ],
        ),
        Panel(
            title="Duration of a transfer",
            description="From the first byte to commit, measured by the receiver. It includes waiting for the prefill.",
            unit="s",
            needs=_REMOTE,
            queries=quantiles("pdserve_kv_transfer_seconds", levels=(0.5, 0.99)),
        ),
        Panel(
            title="Exposed time",
            description="From the end of the prefill until the receiver confirmed the transfer, measured by the "
            "sender. The second token waits for it.",
            unit="s",
            needs=_REMOTE,
            queries=quantiles("pdserve_kv_exposed_seconds", levels=(0.5, 0.99)),
        ),
        Panel(
            title="Bandwidth while busy",
            description="Bytes per second of the time with chunks in flight.",
            unit="Bps",
            needs=_REMOTE,
            queries=[
                Query(
                    share(total("pdserve_kv_transfer_bytes_total"), total("pdserve_kv_busy_seconds_sum")), "bandwidth"
                )
            ],
        ),
        Panel(
            title="Hidden behind the prefill",
            description="Share of the transfer time that overlapped with the prefill, and share of the bytes that were "
            "sent before the last chunk of the prompt was computed.",
            unit="percentunit",
            most=1.0,
            needs=_REMOTE,
            queries=[
                Query(
                    share(total("pdserve_kv_hidden_ratio_sum"), total("pdserve_kv_hidden_ratio_count")), "time, mean"
                ),
                Query(
                    share(total("pdserve_kv_sent_bytes_total", 'when="early"'), total("pdserve_kv_sent_bytes_total")),
                    "bytes sent early",
                ),
            ],
        ),
        Panel(
            title="When KV is sent",
            description="Prompts by the plan for their KV: at the end, after each chunk, or in groups of layers.",
            unit="ops",
            queries=[Query(total("pdserve_kv_pushes_total", by="plan"), "{{plan}}")],
        ),
        Panel(
            title="Bytes by dtype",
            description="Dtype of the KV during the transfer (worker.kv_wire).",
            unit="Bps",
            needs=_REMOTE,
            queries=[Query(total("pdserve_kv_wire_bytes_total", by="dtype"), "{{dtype}}")],
        ),
        Panel(
            title="Unusual events",
            description="Events of the transfer protocol that are rare in a healthy cluster.",
            unit="ops",
            width=24,
            queries=[Query(total("pdserve_kv_transfer_events_total", by="event"), "{{event}}")],
        ),
    ),
)
_PREFIX: Final = Row(
    title="Prefix cache",
    panels=(
        Panel(
            title="Prompt tokens from the cache",
            description="Share of the prompt tokens of finished requests whose KV came from a prefix cache.",
            unit="percentunit",
            most=1.0,
            queries=[
                Query(
                    share(total("pdserve_cached_prompt_tokens_total"), total("pdserve_prompt_tokens_total")), "cached"
                )
            ],
        ),
        Panel(
            title="Lookups in the index",
            description="unavailable: the index did not answer within router.prefix_lookup_s.",
            unit="ops",
            queries=[Query(total("pdserve_prefix_lookups_total", by="outcome"), "{{outcome}}")],
        ),
        Panel(
            title="Time of a lookup",
            description="Part of the time to first token.",
            unit="s",
            queries=quantiles("pdserve_prefix_lookup_seconds", levels=(0.5, 0.99)),
        ),
        Panel(
            title="Computed and reused prompt tokens",
            description="On workers. A prompt that is placed twice counts twice.",
            unit="ops",
            queries=[
                Query(total("pdserve_prefilled_tokens_total"), "computed"),
                Query(total("pdserve_reused_tokens_total"), "reused"),
            ],
        ),
        Panel(
            title="Cached blocks",
            description="Blocks that hold a prefix which no sequence uses now.",
            unit="short",
            queries=[Query(gauge("pdserve_kv_blocks", 'state="cached"', "instance"), "{{instance}}")],
        ),
        Panel(
            title="Stale blocks",
            description="Sequences that were computed again because a block held other content than expected.",
            unit="ops",
            queries=[Query(total("pdserve_kv_mistaken_total"), "computed again")],
        ),
    ),
)

KV: Final = Dashboard(
    uid="pdserve-kv",
    title="pdserve / KV cache",
    description="What KV transfers cost, and what the prefix cache saves.",
    rows=(_TRANSFERS, _PREFIX),
)
