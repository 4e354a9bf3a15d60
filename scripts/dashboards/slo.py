"""Do requests meet their targets, how fast is the error budget spent, and what happens to those that miss?"""

from __future__ import annotations

from typing import Final

from scripts.dashboards.panels import Dashboard, Panel, Query, Row, of, quantiles, share, total

_ENDED: Final = 'outcome!="cancelled"'
_RULES: Final = "the recording rules (`rules.yml`)"


def _met(kept: str) -> str:
    return total("pdserve_slo_total", f'kept=~"{kept}"')


def _burn(window: str) -> Query:
    return Query(of(f"pdserve:slo_burn:rate{window}"), f"{window}, {{{{target}}}}")


_ARRIVED: Final = total("pdserve_requests_total", _ENDED)
_FINISHED: Final = total("pdserve_slo_total")

_NOW: Final = Row(
    title="Now",
    panels=(
        Panel(
            title="Met both targets",
            description="Share of the requests that ended, except cancelled ones. Rejected requests miss "
            "their targets.",
            unit="percentunit",
            kind="stat",
            warn=0.9,
            is_low_bad=True,
            most=1.0,
            width=6,
            queries=[Query(share(_met("both"), _ARRIVED), "both targets")],
        ),
        Panel(
            title="Goodput",
            description="Requests per second that met both targets.",
            unit="reqps",
            kind="stat",
            width=6,
            queries=[Query(_met("both"), "goodput")],
        ),
        Panel(
            title="Rejected",
            description="Share of the requests that the router rejected, because they could not meet their target.",
            unit="percentunit",
            kind="stat",
            warn=0.05,
            width=6,
            queries=[Query(share(total("pdserve_requests_total", 'outcome="rejected"'), _ARRIVED), "rejected")],
        ),
        Panel(
            title="Burn rate, last hour",
            description="1 spends exactly the error budget. The alert PdserveSloBurnsFast fires above 6.",
            unit="none",
            kind="stat",
            needs=_RULES,
            warn=6,
            width=6,
            queries=[Query(of("pdserve:slo_burn:rate1h"), "{{target}}")],
        ),
    ),
)
_BUDGET: Final = Row(
    title="Targets and error budget",
    panels=(
        Panel(
            title="Attainment",
            description="Share of requests that met each target. Only finished requests count for TPOT; for the "
            "others, requests that were rejected, failed or expired count as missed.",
            unit="percentunit",
            needs=f"{_RULES} for the line of the objective",
            most=1.0,
            width=12,
            queries=[
                Query(share(_met("both|ttft"), _ARRIVED), "TTFT"),
                Query(share(_met("both|tpot"), _FINISHED), "TPOT"),
                Query(share(_met("both"), _ARRIVED), "both"),
                Query("pdserve:slo:objective", "objective"),
            ],
        ),
        Panel(
            title="Burn rate",
            description="Share of requests that missed a target, divided by the share that may. The alerts look at 5m "
            "with 1h (above 6) and at 30m with 6h (above 3).",
            unit="none",
            needs=_RULES,
            warn=6,
            width=12,
            queries=[_burn(window) for window in ("5m", "30m", "1h", "6h")],
        ),
        Panel(
            title="Goodput and arrivals",
            description="Requests per second that met both targets, beside all that ended and were not cancelled.",
            unit="reqps",
            queries=[Query(_met("both"), "goodput"), Query(_ARRIVED, "arrivals")],
        ),
        Panel(
            title="Requests by outcome",
            description="`late` requests finished, but missed a target.",
            unit="reqps",
            is_stacked=True,
            queries=[Query(total("pdserve_requests_total", by="outcome"), "{{outcome}}")],
        ),
        Panel(
            title="Errors by reason",
            description="Requests that ended with an error. OVERLOADED: rejected by admission control; QUOTA: over the "
            "quota of their tenant.",
            unit="reqps",
            queries=[Query(total("pdserve_request_errors_total", by="reason"), "{{reason}}")],
        ),
    ),
)
_LATENCY: Final = Row(
    title="Latency",
    panels=(
        Panel(
            title="Time to first token",
            description="From arrival to the first token, of finished requests.",
            unit="s",
            queries=quantiles("pdserve_ttft_seconds"),
        ),
        Panel(
            title="Time per output token",
            description="Mean over the tokens after the first, of finished requests with two tokens or more.",
            unit="s",
            queries=quantiles("pdserve_tpot_seconds"),
        ),
        Panel(
            title="Time in the router's queue",
            description="From arrival to placement on workers.",
            unit="s",
            queries=quantiles("pdserve_queue_seconds"),
        ),
        Panel(
            title="Time to first token by path",
            description="remote: a prefill worker computes the prompt; local: the decode worker does.",
            unit="s",
            width=12,
            needs="requests on the path",
            queries=quantiles("pdserve_ttft_seconds", by="path", levels=(0.5, 0.99)),
        ),
        Panel(
            title="HTTP requests by status",
            description="Requests to the HTTP gateway. 499: the client disconnected.",
            unit="reqps",
            width=12,
            needs="`--http`, and requests over HTTP",
            queries=[Query(total("pdserve_http_requests_total", by="status"), "{{status}}")],
        ),
    ),
)

SLO: Final = Dashboard(
    uid="pdserve-slo",
    title="pdserve / SLO",
    description="Do requests meet their targets, and how fast is the error budget spent?",
    rows=(_NOW, _BUDGET, _LATENCY),
)
