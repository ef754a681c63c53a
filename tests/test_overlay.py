"""Values laid over the settings for a while: where they may lie, and what has to make sense with them."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.settings import Settings, SettingsError
from extproc.settings.changes import differences, version_of
from extproc.settings.overlay import Change, by_name, overlaid, value_at

RAW: dict[str, Any] = {
    "upstreams": {
        "a": {"provider": "openai", "limits": [{"model": "gpt-4.1", "tpm": 1000}, {"model": "*", "rpm": 10}]},
        "a.b": {"provider": "compatible", "url": "http://b", "concurrency": 3},
    },
    "routes": [{"models": ["gpt-4.1", "m"], "chain": ["a", "a.b"], "acknowledge_unowned": True, "first_token_s": 9}],
    "lanes": {"P1": {"max_wait_s": 30}, "P2": {"max_wait_s": 60, "min_share": 0.3}},
    "tenants": {"team.x": {"tpm": 500}, "plain": {}},
}  # fmt: skip
SETTINGS = Settings.model_validate(RAW)


def laid(*changes: tuple[str, float]) -> Settings:
    return overlaid(SETTINGS, SETTINGS, [Change(str(n), *change) for n, change in enumerate(changes)])


@pytest.mark.parametrize(
    ("place", "before", "told"),
    [
        ("lanes.P2.max_requests", SETTINGS.lanes["P2"].max_requests, "lanes.P2.max_requests"),
        ("upstreams.a.limits.0.tpm", 1000, "upstreams.a.limits.gpt-4.1.tpm"),
        ("upstreams.a.limits.gpt-4.1.tpm", 1000, "upstreams.a.limits.gpt-4.1.tpm"),
        ("upstreams.a.limits.*.rpm", 10, "upstreams.a.limits.*.rpm"),
        ("upstreams.a.b.concurrency", 3, "upstreams.a.b.concurrency"),
        ("routes.0.first_token_s", 9, "routes.gpt-4.1.first_token_s"),
        ("routes.gpt-4.1.first_token_s", 9, "routes.gpt-4.1.first_token_s"),
        ("tenants.team.x.tpm", 500, "tenants.team.x.tpm"),
        ("tenants.plain.tpm", None, "tenants.plain.tpm"),
        ("lanes.P2.min_share", 0.3, "lanes.P2.min_share"),
    ],
)
def test_a_number_lies_over_another(place: str, before: float | None, told: str) -> None:
    """By number or by name, with dots in names or without; also where nothing was set. It is told like any change."""
    value = 0.25 if before == 0.3 else 7
    changed = laid((place, value))
    assert (value_at(SETTINGS, place), value_at(changed, place)) == (before, value)
    assert [one.place for one in differences(SETTINGS, changed)] == [told]
    assert by_name(SETTINGS, place) == told
    assert version_of(changed) != version_of(SETTINGS)


def test_a_number_stays_where_its_name_leads_elsewhere() -> None:
    """A model may be called like a number of others."""
    limits = [{"model": name, "rpm": at + 1} for at, name in enumerate(("1", "x", "y"))]
    settings = Settings.model_validate(
        {**RAW, "upstreams": {**RAW["upstreams"], "a": {"provider": "openai", "limits": limits}}}
    )
    places = [f"upstreams.a.limits.{at}.rpm" for at in range(3)]
    assert [by_name(settings, place) for place in places] == [
        "upstreams.a.limits.0.rpm", "upstreams.a.limits.x.rpm", "upstreams.a.limits.y.rpm",
    ]  # fmt: skip
    assert value_at(settings, by_name(settings, places[0])) == 1


def test_the_last_of_several_counts() -> None:
    """And none at all leaves things as they are."""
    assert laid(("lanes.P2.max_requests", 5), ("lanes.P2.max_requests", 6)).lanes["P2"].max_requests == 6
    assert laid() is SETTINGS


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        ("lanes.P9.max_requests", 5, "lanes.P9.max_requests: no such setting in lanes; there are P1, P2"),
        ("lanes.P2.max_request", 5, "lanes.P2.max_request: no such setting in lanes.P2; there are max_wait_s"),
        ("nonsense", 5, "nonsense: no such setting; there are gateway"),
        ("", 5, ": no such setting; there are gateway"),
        ("upstreams.a.limits.2.tpm", 5, "no such setting in upstreams.a.limits; there are 0 to 1"),
        ("upstreams.a.concurrency.x", 5, "upstreams.a.concurrency.x: upstreams.a.concurrency is not set"),
        ("lanes.P2.max_requests.x", 5, "lanes.P2.max_requests.x: lanes.P2.max_requests is no section"),
        ("other_endpoints.x", 5, "other_endpoints.x: other_endpoints is not set"),
        ("statuses.x.y", 5, "statuses.x.y: no such setting in statuses; there are none"),
        ("tenants.plain.lanes.0", 5, "tenants.plain.lanes.0: no such setting in tenants.plain.lanes; there are none"),
        ("lanes.P2", 5, "lanes.P2: Input should be"),
        ("lanes.P2.max_requests", -5, "lanes.P2.max_requests: Input should be greater than or equal to 1"),
        ("lanes.P2.max_requests", 5.5, "lanes.P2.max_requests: Input should be a valid integer"),
        ("lanes.P2.when_busy", 5, "lanes.P2.when_busy: Input should be"),
        ("tenants.plain.vip", 1, "tenants.plain.vip: is no number"),
        ("lanes.P1.min_share", 0.8, "lanes: the min_shares add up to 1.1"),
        ("gateway.port", 9999, "gateway.port: needs Envoy's config rendered again, so it cannot be changed"),
        ("telemetry.tenants", 9, "telemetry.tenants: needs a restart, so it cannot be changed for a while"),
        ("lanes.P2.max_wait_s", 500, "lanes.P2.max_wait_s: needs Envoy's config rendered again"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told_with_its_place(place: str, value: float, why: str) -> None:
    """Nothing of it holds then."""
    with pytest.raises(SettingsError) as refused:
        laid((place, value))
    assert why in str(refused.value)


def test_many_names_are_not_all_told() -> None:
    """The first twenty are enough to see what is meant."""
    many = Settings.model_validate({**RAW, "tenants": {f"t{n}": {} for n in range(50)}})
    with pytest.raises(SettingsError) as refused:
        value_at(many, "tenants.x.tpm")
    assert "t19, ..." in str(refused.value)
    assert "t20" not in str(refused.value)
