"""What is full: the queue, the batches, the KV blocks, or the compute of one role?"""

from __future__ import annotations

from typing import Final

from scripts.dashboards.panels import Dashboard, Panel, Query, Row, gauge, of, quantiles, rate, share, total

_WORKER: Final = "{{instance}}"
_COMPONENTS: Final = "the label `component`, which the two scrape configurations set"


def _busy(component: str) -> str:
    """The mean share of time that the workers of a role spend in engine steps."""
    matcher = f'component="{component}"'
    return f"avg ({rate('pdserve_engine_step_seconds_sum', matcher)})"


_ROUTER: Final = Row(
    title="Router",
    panels=(
        Panel(
            title="Queued and running requests",
            description="Queued requests wait in the router for a placement; running ones are on workers.",
            unit="short",
            queries=[
                Query(gauge("pdserve_requests_queued"), "queued"),
                Query(gauge("pdserve_requests_running"), "running"),
            ],
        ),
        Panel(
            title="Connected workers",
            description="Of the router that is connected to the fewest.",
            unit="short",
            queries=[Query(f"min by (role) ({of('pdserve_workers')})", "{{role}}")],
        ),
        Panel(
            title="Placements",
            description="remote: prefill and decode on two workers; local: both on the decode worker. Replacements "
            "place a request again after a failed attempt, or move its answer from a draining worker (migrations).",
            unit="ops",
            queries=[
                Query(total("pdserve_placements_total", by="path"), "{{path}}"),
                Query(total("pdserve_replacements_total"), "replacements"),
                Query(total("pdserve_migrations_total"), "migrations"),
            ],
        ),
        Panel(
            title="Time of a decision",
            description="Time in which the router processes one event.",
            unit="s",
            queries=quantiles("pdserve_decision_seconds", levels=(0.5, 0.99)),
        ),
        Panel(
            title="Tokens",
            description="Prompt tokens of finished requests, and tokens sent to clients.",
            unit="ops",
            queries=[
                Query(total("pdserve_prompt_tokens_total"), "prompt"),
                Query(total("pdserve_output_tokens_total"), "output"),
            ],
        ),
        Panel(
            title="Connections",
            description="Open connections to the routers' ports. router.max_connections limits those of each.",
            unit="short",
            queries=[Query(gauge("pdserve_connections", by="instance"), _WORKER)],
        ),
    ),
)
_WORKERS: Final = Row(
    title="Workers",
    panels=(
        Panel(
            title="Batch",
            description="Sequences in each worker's batch.",
            unit="short",
            queries=[Query(gauge("pdserve_worker_running", by="instance"), _WORKER)],
        ),
        Panel(
            title="Waiting",
            description="Sequences that wait on each worker. worker.inbox_depth limits them.",
            unit="short",
            queries=[Query(gauge("pdserve_worker_waiting", by="instance"), _WORKER)],
        ),
        Panel(
            title="KV blocks in use",
            description="Share of the pool that sequences use. Cached blocks can be evicted and count as free.",
            unit="percentunit",
            warn=0.95,
            most=1.0,
            queries=[
                Query(
                    gauge("pdserve_kv_blocks", 'state="used"', "instance")
                    + " / "
                    + gauge("pdserve_kv_blocks", by="instance"),
                    _WORKER,
                )
            ],
        ),
        Panel(
            title="KV blocks by state",
            description="Over all workers.",
            unit="short",
            is_stacked=True,
            queries=[Query(gauge("pdserve_kv_blocks", by="state"), "{{state}}")],
        ),
        Panel(
            title="Preemptions and refusals",
            description="Preempted sequences lose their KV blocks and are computed again. Refused requests are "
            "placed again.",
            unit="ops",
            queries=[
                Query(total("pdserve_preemptions_total"), "preempted"),
                Query(total("pdserve_worker_refusals_total", by="reason"), "refused: {{reason}}"),
            ],
        ),
        Panel(
            title="Speculative decoding",
            description="Draft tokens that were verified. Both lines are 0 where speculation is off.",
            unit="ops",
            queries=[Query(total("pdserve_draft_tokens_total", by="outcome"), "{{outcome}}")],
        ),
    ),
)
_BALANCE: Final = Row(
    title="Prefill and decode",
    panels=(
        Panel(
            title="Busy share",
            description="Share of time in engine steps, mean over the workers of a role. If one role is near 100 % "
            "and the other is not, the cluster needs another ratio of workers.",
            unit="percentunit",
            most=1.0,
            needs=_COMPONENTS,
            queries=[Query(_busy("prefill"), "prefill"), Query(_busy("decode"), "decode")],
        ),
        Panel(
            title="Waiting sequences by role",
            description="Summed over the workers of each role.",
            unit="short",
            needs=_COMPONENTS,
            queries=[Query(gauge("pdserve_worker_waiting", by="component"), "{{component}}")],
        ),
        Panel(
            title="Prefill work per decode work",
            description="Seconds of prefill steps per second of decode steps, over all workers. With the same number "
            "of workers of both roles, 1 is balanced.",
            unit="none",
            needs=_COMPONENTS,
            queries=[
                Query(
                    share(
                        total("pdserve_engine_step_seconds_sum", 'component="prefill"'),
                        total("pdserve_engine_step_seconds_sum", 'component="decode"'),
                    ),
                    "prefill / decode",
                )
            ],
        ),
        Panel(
            title="Tokens computed by role",
            description="Prompt tokens computed, and tokens sampled. Decode workers compute short prompts themselves.",
            unit="ops",
            width=12,
            needs=_COMPONENTS,
            queries=[
                Query(total("pdserve_prefilled_tokens_total", by="component"), "prompt, {{component}}"),
                Query(total("pdserve_sampled_tokens_total", by="component"), "sampled, {{component}}"),
            ],
        ),
        Panel(
            title="Time of an engine step",
            description="A step of a decode worker is a lower bound of the time per output token.",
            unit="s",
            width=12,
            needs=_COMPONENTS,
            queries=quantiles("pdserve_engine_step_seconds", by="component", levels=(0.5, 0.99)),
        ),
    ),
)
_PROCESSES: Final = Row(
    title="Processes",
    panels=(
        Panel(
            title="CPU",
            description="Cores that each process uses.",
            unit="short",
            needs=_COMPONENTS,
            queries=[Query(total("process_cpu_seconds_total", 'component!=""', "instance"), _WORKER)],
        ),
        Panel(
            title="Memory",
            description="Resident memory of each process.",
            unit="bytes",
            needs=_COMPONENTS,
            queries=[Query(gauge("process_resident_memory_bytes", 'component!=""', "instance"), _WORKER)],
        ),
        Panel(
            title="Restarts in 15 minutes",
            description="Starts of a process after an end that nobody asked for.",
            unit="short",
            warn=2,
            needs="`pdserve up --metrics`",
            queries=[Query(f"sum by (process) (increase({of('pdserve_process_starts_total')}[15m]))", "{{process}}")],
        ),
    ),
)

CAPACITY: Final = Dashboard(
    uid="pdserve-capacity",
    title="pdserve / Capacity",
    description="What is full: the queue, the batches, the KV blocks, or the compute of one role?",
    rows=(_ROUTER, _WORKERS, _BALANCE, _PROCESSES),
)
