"""Builds the JSON of a Grafana dashboard from rows of panels. Pure.

A panel is placed after the one before it, and on a new line where the line of 24 columns is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

SCHEMA_VERSION: Final = 41  # Grafana 12; older ones read what they know, newer ones migrate it
COLUMNS: Final = 24
DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
# Series of the chosen clusters. Both labels match series without them: only Kubernetes sets a namespace.
CHOSEN: Final = 'namespace=~"$namespace",model=~"$model"'

Unit = Literal["reqps", "ops", "s", "percentunit", "short", "Bps", "bytes", "none"]


@dataclass(frozen=True, slots=True)
class Query:
    """`expr` is PromQL whose selectors were written by `of`."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    description: str
    unit: Unit
    queries: Sequence[Query]
    kind: Literal["timeseries", "stat"] = "timeseries"
    needs: str = ""  # condition under which the queries return data; empty: any finished request
    warn: float | None = None  # threshold, drawn as a dashed line
    is_low_bad: bool = False
    is_stacked: bool = False
    most: float | None = None  # upper end of the axis
    width: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    uid: str
    title: str
    description: str
    rows: Sequence[Row]
    has_tenants: bool = False

    @property
    def panels(self) -> list[Panel]:
        return [panel for row in self.rows for panel in row.panels]


def of(metric: str, matchers: str = "") -> str:
    """The selector of a metric's series in the chosen clusters."""
    return f"{metric}{{{CHOSEN}{',' if matchers else ''}{matchers}}}"


def rate(metric: str, matchers: str = "") -> str:
    return f"rate({of(metric, matchers)}[$__rate_interval])"


def total(metric: str, matchers: str = "", by: str = "") -> str:
    """The summed rate of a counter."""
    return f"sum{f' by ({by})' if by else ''} ({rate(metric, matchers)})"


def gauge(metric: str, matchers: str = "", by: str = "") -> str:
    """The sum of a gauge."""
    return f"sum{f' by ({by})' if by else ''} ({of(metric, matchers)})"


def share(part: str, whole: str) -> str:
    """No data, instead of NaN, while `whole` is 0."""
    return f"{part} / ({whole} > 0)"


def quantiles(
    metric: str, *, matchers: str = "", by: str = "", levels: Sequence[float] = (0.5, 0.9, 0.99)
) -> list[Query]:
    label = f" {{{{{by}}}}}" if by else ""
    grouped = f"le, {by}" if by else "le"
    return [
        Query(
            f"histogram_quantile({level}, {total(f'{metric}_bucket', matchers, grouped)})", f"p{level * 100:g}{label}"
        )
        for level in levels
    ]


def render(dashboard: Dashboard) -> dict[str, Any]:
    """Dashboard JSON as Grafana exports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in dashboard.rows:
        panels.append(_row(row.title, len(panels) + 1, y))
        y, x, height = y + 1, 0, 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            panel_height = 4 if panel.kind == "stat" else 8
            panels.append(_panel(panel, len(panels) + 1, {"h": panel_height, "w": panel.width, "x": x, "y": y}))
            x, height = x + panel.width, max(height, panel_height)
        y += height
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["pdserve"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one crosshair for all panels
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": [_alerts()]},
        "links": [
            {
                "title": "pdserve",
                "type": "dashboards",
                "tags": ["pdserve"],
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
                "icon": "external link",
                "targetBlank": False,
                "tooltip": "",
                "url": "",
            }
        ],
        "templating": {"list": _variables(dashboard.has_tenants)},
        "panels": panels,
    }


def _variables(has_tenants: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {
            "name": "datasource",
            "type": "datasource",
            "query": "prometheus",
            "label": "Prometheus",
            "description": "The Prometheus that scrapes pdserve.",
            "refresh": 1,
        },
        _variable("namespace", "pdserve_requests_queued", "Only scrapes on Kubernetes set it."),
        _variable("model", "pdserve_requests_queued", "Scrapes of `pdserve up --metrics` set it."),
    ]
    if has_tenants:
        found.append(_variable("tenant", f"pdserve_tenant_requests_total{{{CHOSEN}}}", "Tenants of the key file."))
    return found


def _variable(name: str, source: str, description: str) -> dict[str, Any]:
    query = f"label_values({source}, {name})"
    return {
        "name": name,
        "type": "query",
        "label": name.capitalize(),
        "description": f"{description} All also matches series without the label.",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": "All", "value": "$__all"},
    }


def _alerts() -> dict[str, Any]:
    return {
        "name": "Alerts",
        "enable": True,
        "datasource": DATASOURCE,
        "expr": 'ALERTS{alertname=~"Pdserve.+",alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "iconColor": "red",
        "step": "10s",
    }


def _row(title: str, panel_id: int, y: int) -> dict[str, Any]:
    return {
        "id": panel_id,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": y},
        "panels": [],
    }


def _panel(panel: Panel, panel_id: int, place: dict[str, int]) -> dict[str, Any]:
    is_stat = panel.kind == "stat"
    return {
        "id": panel_id,
        "type": panel.kind,
        "title": panel.title,
        "description": f"{panel.description} Needs {panel.needs}." if panel.needs else panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": DATASOURCE,
                "editorMode": "code",
                "expr": query.expr,
                "legendFormat": query.legend,
                "range": True,
                **({"exemplar": True} if "histogram_quantile" in query.expr else {}),
            }
            for number, query in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": _defaults(panel, is_stat), "overrides": []},
        "options": _stat_options() if is_stat else _options(),
    }


def _defaults(panel: Panel, is_stat: bool) -> dict[str, Any]:
    fine, bad = ("red", "green") if panel.is_low_bad else ("green", "red")
    steps: list[dict[str, Any]] = [{"color": fine, "value": None}]
    if panel.warn is not None:
        steps.append({"color": bad, "value": panel.warn})
    found: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": steps},
        "color": {"mode": "thresholds" if is_stat else "palette-classic"},
    }
    if panel.most is not None:
        found["max"] = panel.most
    if not is_stat:
        found["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 30 if panel.is_stacked else 5,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "off" if panel.warn is None else "dashed"},
        }
    return found


def _options() -> dict[str, Any]:
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _stat_options() -> dict[str, Any]:
    return {
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "textMode": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }
