"""What hosts are asked to own, and what they have memory for."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from syncline.errors import ConfigurationError
from syncline.topology import Host, Topology
from syncline.updates import Sharded
from syncline.updates.bucket import BucketPlan, ParameterEntry, plan_buckets
from syncline.updates.ownership import most_shares, rank_shares, state_bytes_per_element

DEEP = Topology.load("deep-asymmetric")
CPU = torch.device("cpu")
NUM_ELEMENTS = 1000


def plans_of(num_elements: int = NUM_ELEMENTS) -> tuple[BucketPlan, ...]:
    entry = ParameterEntry(name="p", group=0, shape=(num_elements,), stride=(1,), dtype=torch.float32, device=CPU)
    return plan_buckets([entry], bucket_bytes=1 << 20)


def optimizer_of(kind: Any = torch.optim.Adam, **options: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = kind([torch.nn.Parameter(torch.zeros(2))], **options)
    return made


def test_hosts_share_as_they_are_told_and_their_ranks_alike() -> None:
    weights = {host.name: 1.0 for host in DEEP.hosts} | {"h6": 4.0, "h0": 0.0}
    shares = rank_shares(DEEP, weights)
    assert sum(shares) == pytest.approx(1.0)
    ranks = {host.name: [shares[rank.rank] for rank in host.ranks] for host in DEEP.hosts}
    assert ranks["h6"] == pytest.approx([2 / 11] * 2)
    assert ranks["h0"] == [0.0]
    assert ranks["h1"] == pytest.approx([1 / 11])


def test_a_host_s_part_is_that_of_the_ranks_that_speak_for_it() -> None:
    gateway = "{host: a, ranks: 3, gateway: one, memory: 24 kB, uplink: 1 Gbit/s}"
    text = f"{{topology: t, switch: s, children: [{gateway}, {{host: b, ranks: 2, uplink: 1 Gbit/s}}]}}"
    topology = Topology.parse(text)
    assert rank_shares(topology, {"a": 3.0, "b": 1.0}) == (0.75, 0.0, 0.0, 0.125, 0.125)
    most = most_shares(topology, plans_of(500), optimizer_of(), num_copies=1, tells=True)  # all three hold 4000 bytes
    assert most == (1.0, 0.0, 0.0, 1.0, 1.0)
    most = most_shares(topology, plans_of(900), optimizer_of(), num_copies=1, tells=True)
    assert most is not None
    assert most[:3] == pytest.approx(((24000 - 3 * 7200) / 7200, 0.0, 0.0))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"h0": 1.0}, "leave out 'h1'; its hosts are h0, h1, h2, h3"),
        ({"h0": 1.0, "h1": 1.0, "h2": 1.0, "h3": 1.0, "h9": 1.0}, "name 'h9', which it has not; its hosts are h0"),
    ],
)
def test_portions_name_the_hosts_that_there_are(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        rank_shares(Topology.load("demo-1-3"), weights)


@pytest.mark.parametrize("wrong", ["even", {"h0": -1.0}, {"h0": float("nan")}, {"h0": 0.0}, {}, 0.5, {"h0": "1"}])
def test_portions_that_are_none_are_refused_when_the_rule_is_made(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="portions"):
        Sharded(portions=wrong)


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (torch.optim.SGD, {}, 0),
        (torch.optim.SGD, {"momentum": 0.9}, 4),
        (torch.optim.AdamW, {}, 8),
        (torch.optim.Adam, {"amsgrad": True}, 12),
        (torch.optim.Adagrad, {}, 4),
    ],
)
def test_state_is_counted_as_the_optimizer_keeps_it(kind: Any, options: dict[str, Any], expected: int) -> None:
    assert state_bytes_per_element(optimizer_of(kind, **options), 0, torch.float32, CPU) == expected


def with_memory(topology: Topology, memory_bytes: dict[str, int]) -> Topology:
    """Return the topology with hosts of so much memory."""

    def changed(node: Any) -> Any:
        if isinstance(node, Host):
            return replace(node, memory_bytes=memory_bytes.get(node.name))
        return replace(node, children=tuple(map(changed, node.children)))

    return replace(topology, root=changed(topology.root))


def test_memory_that_is_left_beside_parameters_and_gradients_limits_the_state() -> None:
    # 8000 bytes hold both, and the state takes 8000
    topology = with_memory(Topology.load("demo-1-3"), {"h0": 8000 + 2000, "h1": 100, "h2": 1 << 30})
    assert most_shares(topology, plans_of(), optimizer_of(), num_copies=1, tells=True) == (0.25, 0.0, 1.0, 1.0)
    with_copies = with_memory(topology, {"h0": 12000 + 4000})
    assert most_shares(with_copies, plans_of(), optimizer_of(), num_copies=2, tells=True) == (0.25, 1.0, 1.0, 1.0)


def test_a_host_s_memory_is_shared_by_its_ranks() -> None:
    topology = with_memory(DEEP, {"h6": 2 * (8000 + 800)})
    most = most_shares(topology, plans_of(), optimizer_of(), num_copies=1, tells=True)
    assert most is not None
    assert [most[rank.rank] for rank in DEEP.hosts[6].ranks] == [0.1, 0.1]


def test_memory_limits_nothing_where_it_or_the_state_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    assert most_shares(DEEP, plans_of(), optimizer_of(), num_copies=1, tells=True) is None
    small = with_memory(DEEP, {"h0": 1})
    assert most_shares(small, plans_of(), optimizer_of(torch.optim.SGD), num_copies=1, tells=True) is None, (
        "it keeps no state"
    )
    own = type("Own", (torch.optim.SGD,), {})
    with caplog.at_level(logging.WARNING, logger="syncline.updates.ownership"):
        assert most_shares(small, plans_of(), optimizer_of(own), num_copies=1, tells=True) is None
    assert "nobody knows what Own keeps" in caplog.text


def test_state_that_fits_nowhere_is_refused_with_sizes() -> None:
    small = with_memory(Topology.load("demo-1-3"), dict.fromkeys(("h0", "h1", "h2", "h3"), 9000))
    with pytest.raises(
        ConfigurationError, match=r"h0 8.789 KiB.* the 7.812 KiB of state that Adam keeps beside 7.812 KiB"
    ):
        most_shares(small, plans_of(), optimizer_of(), num_copies=1, tells=True)
