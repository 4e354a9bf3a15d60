"""The format of the key file, and invalid files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.core.access.key_file import (
    MAX_FILE_BYTES,
    MAX_KEYS,
    MAX_TENANTS,
    KeyFile,
    Tenant,
    is_key,
    key_hash,
    make_key,
    parse,
)
from pdserve.core.errors import ConfigError
from pdserve.core.types import Slo

KEY = make_key(bytes(32))
OTHER = make_key(bytes([1] * 32))
QUICK = {"ttft_s": 0.5, "tpot_s": 0.05}


def text_of(tenants: Any, **rest: Any) -> str:
    return json.dumps({"tenants": tenants, **rest})


def keyed(*keys: str, **quotas: Any) -> dict[str, Any]:
    return {**quotas, "keys": [{"sha256": key_hash(key)} for key in keys]}


def test_a_key_belongs_to_its_tenant() -> None:
    quotas = {"tokens_per_minute": 600, "max_concurrent": 3, "slo": "quick", "max_priority": 5}
    found = parse(text_of({"acme": keyed(KEY, **quotas), "b": keyed(OTHER)}, slo_classes={"quick": QUICK}))
    acme = Tenant(name="acme", tokens_per_minute=600, max_concurrent=3, slo=Slo(**QUICK), max_priority=5)
    assert found.tenant_of(KEY) == acme
    assert found.tenant_of(OTHER) == Tenant(name="b", max_priority=0)
    assert found.tenants == {"acme": acme, "b": Tenant(name="b", max_priority=0)}


@pytest.mark.parametrize(
    "given", ["", "pdk_", KEY[:-1], KEY + "A", KEY.upper(), " " + KEY, KEY + "\n", "hunter2", "é" * 47, "\ud800"]
)
def test_other_texts_are_no_keys(given: str) -> None:
    assert parse(text_of({"acme": keyed(KEY)})).tenant_of(given) is None


def test_a_listed_password_is_not_a_key() -> None:
    assert not is_key("hunter2")
    assert parse(text_of({"acme": {"keys": [{"sha256": key_hash("hunter2")}]}})).tenant_of("hunter2") is None


def test_a_null_quota_is_no_limit() -> None:
    assert parse(text_of({"acme": {"tokens_per_minute": None}})).tenants["acme"].tokens_per_minute is None


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "key_file"),
        ("[]", "key_file"),
        ("[" * 100_000, "key_file"),
        ('{"tenants": {}, "tenants": {}}', "key_file"),
        ('{"tenants": {"a": {}, "a": {}}}', "key_file"),
        ('{"tenants": {"a": {"max_concurrent": NaN}}}', "tenants.a.max_concurrent"),
        (text_of([]), "tenants"),
        (text_of({}, tenant={}), "tenant"),
        (text_of({"a": []}), "tenants.a"),
        (text_of({"": {}}), "tenant"),
        (text_of({"a b": {}}), "tenant"),
        (text_of({"default": {}}), "tenant"),
        (text_of({"other": {}}), "tenant"),
        (text_of({"x" * 65: {}}), "tenant"),
        (text_of({"a": {"quota": 1}}), "tenants.a.quota"),
        (text_of({"a": {"tokens_per_minute": 0}}), "tenants.a.tokens_per_minute"),
        (text_of({"a": {"max_concurrent": True}}), "tenants.a.max_concurrent"),
        (text_of({"a": {"max_concurrent": 1.5}}), "tenants.a.max_concurrent"),
        (text_of({"a": {"max_priority": 2**31}}), "tenants.a.max_priority"),
        (text_of({"a": {"slo": "quick"}}), "tenants.a.slo"),
        (text_of({"a": {"slo": []}}), "tenants.a.slo"),
        (text_of({}, slo_classes={"quick": {"ttft_s": 1.0}}), "slo_classes.quick.tpot_s"),
        (text_of({}, slo_classes={"quick": {**QUICK, "ttft_s": 0}}), "slo_classes.quick.ttft_s"),
        (text_of({}, slo_classes={"quick": {**QUICK, "ttft_s": "1"}}), "slo_classes.quick.ttft_s"),
        (text_of({}, slo_classes={"quick": {**QUICK, "x": 1}}), "slo_classes.quick.x"),
        (text_of({"a": {"keys": {}}}), "tenants.a.keys"),
        (text_of({"a": {"keys": [KEY]}}), "tenants.a.keys[0]"),
        (text_of({"a": {"keys": [{"sha256": KEY}]}}), "tenants.a.keys[0].sha256"),
        (text_of({"a": {"keys": [{}]}}), "tenants.a.keys[0].sha256"),
        (text_of({"a": {"keys": [{"sha256": key_hash(KEY), "created": 3}]}}), "tenants.a.keys[0].created"),
        (text_of({"a": keyed(KEY), "b": keyed(KEY)}), "tenants.b.keys"),
        (" " * (MAX_FILE_BYTES + 1), "key_file"),
        (text_of({f"t{number}": {} for number in range(MAX_TENANTS + 1)}), "tenants"),
    ],
)
def test_an_invalid_file_names_its_field(text: str, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert caught.value.field == field
    assert KEY not in caught.value.message


def test_a_key_in_place_of_its_hash_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text_of({"a": {"keys": [{"sha256": KEY}]}}))
    assert KEY not in str(caught.value)


def test_the_number_of_keys_is_limited() -> None:
    keys = [{"sha256": f"{number:064x}"} for number in range(MAX_KEYS + 1)]
    with pytest.raises(ConfigError) as caught:
        parse(text_of({"a": {"keys": keys}}))
    assert caught.value.field == "tenants"


def test_the_largest_file_is_read() -> None:
    names = [f"t{number}" for number in range(MAX_TENANTS)]
    keys = {name: make_key(number.to_bytes(32, "little")) for number, name in enumerate(names)}
    found = parse(text_of({name: keyed(keys[name], max_concurrent=2) for name in names}))
    assert all(found.tenant_of(keys[name]) is found.tenants[name] for name in names)


class _LookedUp(dict[bytes, Tenant]):
    """Counts lookups. Keys cannot be compared one by one, because iterating over them fails."""

    def __init__(self, content: dict[bytes, Tenant]) -> None:
        super().__init__(content)
        self.asked: list[bytes] = []

    def get(self, key: bytes, default: Any = None) -> Any:
        self.asked.append(key)
        return super().get(key, default)

    def __iter__(self) -> Any:
        raise AssertionError("keys are compared one by one")

    items = keys = values = __iter__  # type: ignore[assignment]


@pytest.mark.parametrize("other", [OTHER, KEY[:-1] + "B", KEY[:5] + "B" * 42], ids=["random", "near the end", "near"])
def test_a_lookup_takes_the_same_steps_for_every_key(other: str) -> None:
    """A lookup is one hash and one access by it, so its time does not depend on how much of a wrong key is right."""
    keys = _LookedUp({bytes.fromhex(key_hash(KEY)): Tenant(name="acme")})
    file = KeyFile({}, keys)
    assert (file.tenant_of(KEY), file.tenant_of(other)) == (Tenant(name="acme"), None)
    assert keys.asked == [bytes.fromhex(key_hash(one)) for one in (KEY, other)]
