"""Several Tidegates behind one Envoy: all are asked, and each is told what it has let go."""

from __future__ import annotations

import pytest

from extproc.render.access_log import attempts, outcomes
from extproc.render.clusters import clusters
from extproc.render.parts import parts
from extproc.settings import Settings, SettingsError, parse
from tests.render.rig import Data, settings_of

TWO = "service: {address: '127.0.0.1:20', addresses: ['127.0.0.1:20', 'two.house:21'], replicas: 2}"


def service_clusters(settings: Settings) -> dict[str, Data]:
    return {one["name"]: one for one in clusters(settings) if one["name"].startswith("tidegate:service")}


def ports(cluster: Data) -> list[int]:
    (place,) = cluster["load_assignment"]["endpoints"]
    return [one["endpoint"]["address"]["socket_address"]["port_value"] for one in place["lb_endpoints"]]


def target(log: Data) -> str:
    found: str = log["typed_config"]["common_config"]["grpc_service"]["envoy_grpc"]["cluster_name"]
    return found


def test_admission_asks_all_and_each_has_a_cluster_of_its_own() -> None:
    found = service_clusters(settings_of(TWO, mine=1))
    assert {name: ports(one) for name, one in found.items()} == {
        "tidegate:service": [20, 21],
        "tidegate:service:0": [20],
        "tidegate:service:1": [21],
    }
    assert [one["type"] for one in found.values()] == ["STRICT_DNS", "STATIC", "STRICT_DNS"]
    assert [name for name, one in found.items() if "health_checks" in one] == ["tidegate:service"]


def test_the_end_of_a_request_is_told_to_whom_its_ticket_names() -> None:
    settings = settings_of(TWO, mine=1)
    logs = outcomes(settings)
    assert list(map(target, logs)) == ["tidegate:service:0", "tidegate:service:1"]
    prefixes = [log["filter"]["metadata_filter"]["matcher"]["value"]["string_match"]["prefix"] for log in logs]
    assert prefixes == ["0-", "1-"]
    assert [one["match_if_key_not_found"] for one in (log["filter"]["metadata_filter"] for log in logs)] == [False] * 2
    assert list(map(target, attempts(settings))) == ["tidegate:service:0", "tidegate:service:1"]


def test_among_others_only_marked_requests_are_told() -> None:
    ours = parts(settings_of(TWO, mine=1))
    here, ticket = ours.access_log[1]["filter"]["and_filter"]["filters"]
    assert here["metadata_filter"]["matcher"]["filter"] == "tidegate"
    assert ticket == outcomes(settings_of(TWO, mine=1))[1]["filter"]
    assert sum(one["name"].startswith("tidegate:service") for one in ours.clusters) == 3


def test_the_only_one_is_told_everything() -> None:
    settings = settings_of(mine=1)
    (log,) = outcomes(settings)
    assert target(log) == "tidegate:service"
    assert "filter" not in log
    assert list(service_clusters(settings)) == ["tidegate:service"]
    assert settings.service.rank is None


def test_each_knows_which_it_is() -> None:
    assert settings_of(TWO.replace("address: '127.0.0.1:20'", "address: 'two.house:21'"), mine=1).service.rank == 1


@pytest.mark.parametrize(
    ("service", "said"),
    [
        (
            "{addresses: ['a:1', 'b:1'], replicas: 2}",
            "addresses: 127.0.0.1:10003, this one's own address, is not among",
        ),
        ("{address: 'a:1', addresses: ['a:1', 'a:1'], replicas: 2}", "addresses: one is named twice"),
        ("{address: 'a:1', addresses: ['a:1', 'b:1']}", "replicas: 1, but there are 2 addresses"),
        ("{address: 'a:1', addresses: ['a:1', 'unix:/x'], replicas: 2}", r"addresses\S*: must be host:port"),
    ],
)
def test_addresses_that_cannot_be_are_told(service: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        parse(f"upstreams: {{a: {{provider: fake, url: 'http://x:1', concurrency: 4}}}}\nservice: {service}", "test")
