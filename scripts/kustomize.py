"""Writes deploy/kuberay from the Helm chart: the manifests of the default values, and a kustomize component for each
file of deploy/helm/values, whose patches are what the file changes.

    python -m scripts.kustomize            writes them
    python -m scripts.kustomize --check    exit status 1 if a file is not what would be written
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import helm_python
import yaml

ROOT: Final = Path(__file__).parents[1]
CHART: Final = ROOT / "deploy/helm"
KUBERAY: Final = ROOT / "deploy/kuberay"
#: Each component, and those that must precede it. Patches commute only with other components' appended list items.
COMPONENTS: Final[dict[str, tuple[str, ...]]] = {
    "gpu": (),
    "gpu-parallel": ("gpu",),
    "vllm": (),
    "tls": (),
    "tenants": (),
}
HEADER: Final = "# Generated from deploy/helm by `make reference`. Change the chart instead.\n"

Manifest = dict[str, Any]


def merged(into: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Values as `helm -f A -f B` merges them."""
    found = dict(into)
    for name, value in values.items():
        own = found.get(name)
        found[name] = merged(own, value) if isinstance(own, dict) and isinstance(value, dict) else value
    return found


def values_of(names: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        found = merged(found, yaml.safe_load((CHART / f"values/{name}.yaml").read_text()))
    return found


def rendered(values: dict[str, Any]) -> str:
    """What `helm template pdserve deploy/helm` prints, without the lines that name the templates."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        files = chart.render(values=values, name="pdserve", namespace="default")
    texts = [text.strip("\n") for name, text in sorted(files.items()) if name.endswith(".yaml")]
    return "\n---\n".join(text for text in texts if text) + "\n"


def parsed(text: str) -> list[Manifest]:
    return [one for one in yaml.load_all(text, yaml.CSafeLoader) if one]


def by_name(manifests: Sequence[Manifest]) -> dict[tuple[str, str], Manifest]:
    return {(one["kind"], one["metadata"]["name"]): one for one in manifests}


def operations(before: Any, after: Any, path: str = "") -> Iterator[dict[str, Any]]:
    """The JSON patch (RFC 6902) from one document to another. A list may only change its items, or grow at its end."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in [*before, *(one for one in after if one not in before)]:
            at = f"{path}/{name.replace('~', '~0').replace('/', '~1')}"
            if name not in after:
                yield {"op": "remove", "path": at}
            elif name not in before:
                yield {"op": "add", "path": at, "value": after[name]}
            else:
                yield from operations(before[name], after[name], at)
    elif isinstance(before, list) and isinstance(after, list) and len(before) <= len(after):
        for index, (old, new) in enumerate(zip(before, after, strict=False)):
            yield from operations(old, new, f"{path}/{index}")
        for new in after[len(before) :]:
            yield {"op": "add", "path": f"{path}/-", "value": new}
    elif before != after:
        yield {"op": "replace", "path": path, "value": after}


def component(name: str) -> str:
    before = by_name(parsed(rendered(values_of(COMPONENTS[name]))))
    after = by_name(parsed(rendered(values_of([*COMPONENTS[name], name]))))
    if before.keys() != after.keys():
        raise SystemExit(f"values/{name}.yaml adds or removes a resource, which a component of patches cannot do")
    comment = [line for line in (CHART / f"values/{name}.yaml").read_text().splitlines() if line.startswith("#")]
    lines = [HEADER.rstrip(), *comment, "apiVersion: kustomize.config.k8s.io/v1alpha1", "kind: Component", "patches:"]
    for (kind, called), old in before.items():
        changes = [json.dumps(one) for one in operations(old, after[kind, called])]
        if changes:
            lines += [f"  - target: {{kind: {kind}, name: {called}}}", "    patch: |"]
            lines += [f"      - {one}" for one in changes]
    return "\n".join(lines) + "\n"


def files() -> dict[Path, str]:
    found = {KUBERAY / "pdserve.yaml": HEADER + rendered({})}
    for name in COMPONENTS:
        found[KUBERAY / name / "kustomization.yaml"] = component(name)
    return found


def main() -> int:
    is_check = sys.argv[1:] == ["--check"]
    stale = {path: text for path, text in files().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        print(f"{path.relative_to(ROOT)} {'is not what the chart renders: make reference' if is_check else 'written'}")
        if not is_check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    return int(is_check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
