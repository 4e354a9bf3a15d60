"""Reads deploy/kuberay as `kubectl apply -k` would: the resources, with the patches of components on them."""

import copy
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
KUBERAY = ROOT / "deploy/kuberay"
SECRET_MOUNT = "/run/secrets/pdserve/"

Manifest = dict[str, Any]


def read_yaml(path: Path) -> list[Any]:
    return [one for one in yaml.load_all(path.read_text(), yaml.CSafeLoader) if one]


@functools.cache
def kustomized(components: tuple[str, ...]) -> list[Manifest]:
    [kustomization] = read_yaml(KUBERAY / "kustomization.yaml")
    found: list[Manifest] = [one for name in kustomization["resources"] for one in read_yaml(KUBERAY / name)]
    for component in components:
        [kustomization] = read_yaml(KUBERAY / component / "kustomization.yaml")
        for patch in kustomization["patches"]:
            [target] = [one for one in found if is_target(one, patch["target"])]
            for operation in yaml.safe_load(patch["patch"]):
                apply(target, operation)
    return found


def load(*components: str) -> list[Manifest]:
    """The resources of deploy/kuberay with these components."""
    return copy.deepcopy(kustomized(components))


def is_target(manifest: Manifest, target: dict[str, str]) -> bool:
    return manifest["kind"] == target["kind"] and manifest["metadata"]["name"] == target["name"]


def apply(document: Any, operation: dict[str, Any]) -> None:
    """One JSON patch operation (RFC 6902): add, replace or remove."""
    *path, last = (part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:])
    for part in path:
        document = document[int(part)] if isinstance(document, list) else document[part]
    if isinstance(document, list):
        if operation["op"] == "add" and last == "-":
            document.append(copy.deepcopy(operation["value"]))
        else:
            assert operation["op"] == "replace", operation
            document[int(last)] = operation["value"]
    elif operation["op"] == "remove":
        del document[last]
    else:
        assert operation["op"] in ("add", "replace"), operation
        assert operation["op"] == "add" or last in document, f"nothing to replace at {operation['path']}"
        document[last] = copy.deepcopy(operation["value"])


def pod_templates(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Every pod template, with a name for it."""
    for one in manifests:
        spec = one.get("spec", {})
        if one["kind"] == "RayCluster":
            yield "ray-head", spec["headGroupSpec"]["template"]
            for group in spec["workerGroupSpecs"]:
                yield f"ray-{group['groupName']}", group["template"]
        elif "template" in spec:
            yield one["metadata"]["name"], spec["template"]


def container(manifests: list[Manifest], template_name: str) -> Manifest:
    [found] = [template for name, template in pod_templates(manifests) if name == template_name]
    [only] = found["spec"]["containers"]
    return dict(only)


def expanded(words: list[str], values: dict[str, str]) -> list[str]:
    """`$(NAME)` replaced, as the kubelet does. An unknown name is an error here; the kubelet would leave it."""
    return [re.sub(r"\$\(([A-Z_]+)\)", lambda found: values[found.group(1)], word) for word in words]


def environment(only: Manifest, secrets: dict[str, str], fields: dict[str, str]) -> dict[str, str]:
    """The container's variables: those of secrets by their key, those of the pod's own fields by their name."""
    found: dict[str, str] = {}
    for one in only.get("env", []):
        source = one.get("valueFrom", {})
        if "secretKeyRef" in source:
            found[one["name"]] = secrets[source["secretKeyRef"]["key"]]
        elif source:
            found[one["name"]] = fields[one["name"]]
        else:
            [value] = expanded([one["value"]], found)  # names that stand before it, as the kubelet does
            if one["name"].endswith("_FILE"):  # the content, which the process reads from its mount
                value, name = secrets[value.removeprefix(SECRET_MOUNT)], one["name"].removesuffix("_FILE")
                found[name] = value
            else:
                found[one["name"]] = value
    return found
