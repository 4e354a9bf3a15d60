"""Does each tenant get its share?"""

from __future__ import annotations

from typing import Final

from scripts.dashboards.panels import Dashboard, Panel, Query, Row, gauge, of, quantiles, rate, share

_CHOSEN: Final = 'tenant=~"$tenant"'
_LEGEND: Final = "{{tenant}}"
_REQUESTS: Final = "pdserve_tenant_requests_total"


def _by_tenant(metric: str, matchers: str = "", *more: str) -> str:
    return f"sum by ({', '.join(('tenant', *more))}) ({rate(metric, ','.join(filter(None, (_CHOSEN, matchers))))})"


_ATTAINMENT: Final = share(_by_tenant(_REQUESTS, 'outcome="served"'), _by_tenant(_REQUESTS, 'outcome!="cancelled"'))

_FAIRNESS: Final = Row(
    title="Fairness",
    panels=(
        Panel(
            title="Attainment by tenant",
            description="Share of a tenant's requests that met both targets. Calls over a quota do not count.",
            unit="percentunit",
            warn=0.9,
            is_low_bad=True,
            most=1.0,
            width=12,
            queries=[Query(_ATTAINMENT, _LEGEND)],
        ),
        Panel(
            title="Fairness of attainment",
            description="Jain's index over the tenants' attainment: 1 if all are equal, 1/n if one of n gets "
            "everything.",
            unit="none",
            warn=0.8,
            is_low_bad=True,
            most=1.0,
            width=6,
            needs="a tenant whose requests met their targets",
            queries=[
                Query(
                    f"sum ({_ATTAINMENT}) ^ 2 / (count ({_ATTAINMENT}) * sum (({_ATTAINMENT}) ^ 2) > 0)", "Jain's index"
                )
            ],
        ),
        Panel(
            title="Starved tenants",
            description="Tenants whose attainment over 10 minutes is less than half that of all tenants together.",
            unit="short",
            kind="stat",
            warn=1,
            width=6,
            needs="the recording rules (`rules.yml`)",
            queries=[
                Query(
                    f"count ({of('pdserve:tenant_attainment:ratio10m', _CHOSEN)}"
                    " < on (namespace, cluster, model) group_left () 0.5 * pdserve:tenants_attainment:ratio10m)"
                    f" or 0 * count ({of('pdserve:tenant_attainment:ratio10m')})",
                    "starved",
                )
            ],
        ),
    ),
)
_USE: Final = Row(
    title="Use",
    panels=(
        Panel(
            title="Requests by tenant",
            description="Requests that ended, whatever their outcome.",
            unit="reqps",
            is_stacked=True,
            queries=[Query(_by_tenant(_REQUESTS), _LEGEND)],
        ),
        Panel(
            title="Tokens by tenant",
            description="Prompt tokens of finished requests, and tokens sent to clients.",
            unit="ops",
            is_stacked=True,
            queries=[Query(_by_tenant("pdserve_tenant_tokens_total", "", "kind"), "{{tenant}}, {{kind}}")],
        ),
        Panel(
            title="Answers in progress",
            description="They count for max_concurrent.",
            unit="short",
            needs="tenants in a key file",
            queries=[Query(gauge("pdserve_tenant_answers_running", _CHOSEN, "tenant"), _LEGEND)],
        ),
        Panel(
            title="Time to first token by tenant",
            description="Of finished requests.",
            unit="s",
            queries=quantiles("pdserve_tenant_ttft_seconds", matchers=_CHOSEN, by="tenant", levels=(0.5, 0.9)),
        ),
        Panel(
            title="Rejected by admission control",
            description="Requests that could not meet their target.",
            unit="reqps",
            needs="a rejected request",
            queries=[Query(_by_tenant(_REQUESTS, 'outcome="rejected"'), _LEGEND)],
        ),
        Panel(
            title="Rejected over a quota",
            description="Calls of a tenant that has used up a quota of its key file.",
            unit="reqps",
            needs="a call over a quota",
            queries=[Query(_by_tenant("pdserve_tenant_quota_rejections_total", "", "quota"), "{{tenant}}, {{quota}}")],
        ),
    ),
)

TENANTS: Final = Dashboard(
    uid="pdserve-tenants",
    title="pdserve / Tenants",
    description="Does each tenant get its share?",
    rows=(_FAIRNESS, _USE),
    has_tenants=True,
)
