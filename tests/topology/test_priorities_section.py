"""The section ``priorities`` of a topology file: checked with file and line, written and read again."""

from __future__ import annotations

import pytest

from syncline.errors import TopologyError
from syncline.priorities.settings import Priorities
from syncline.topology import Topology

HOSTS = "switch: core\nchildren: [{host: h0, uplink: 1 Gbit/s}, {host: h1, uplink: 1 Gbit/s}]\n"


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("", None),
        ("priorities: on", Priorities()),
        ("priorities: {}", Priorities()),
        ("priorities: off", Priorities.off()),
        (
            "priorities: {num_classes: 2, dscp: null}",
            Priorities(num_classes=2, dscp=None),
        ),
        (
            "priorities: {num_classes: 2, dscp: [40, 0], search: [1, 3]}",
            Priorities(num_classes=2, dscp=(40, 0), search=(1, 3)),
        ),
        (
            "priorities: {search: equal, measure_steps: 4}",
            Priorities(search="equal", measure_steps=4),
        ),
    ],
)
def test_a_section_is_read_and_written(section: str, expected: Priorities | None) -> None:
    topology = Topology.parse(HOSTS + section)
    assert topology.priorities == expected
    assert Topology.parse(topology.to_yaml()).priorities == expected


def test_priorities_do_not_change_what_network_it_is() -> None:
    assert Topology.parse(HOSTS + "priorities: off") == Topology.parse(HOSTS)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("priorities:\n  num_clases: 4", "line 4: unknown key 'num_clases'; did you mean 'num_classes'"),
        (
            "priorities:\n  num_classes: 40",
            "line 3: Priorities: num_classes must be a whole number from 1 to 16, not 40",
        ),
        ("priorities:\n  num_classes: '2'", "line 4: 'num_classes' cannot be '2'"),
        ("priorities:\n  dscp: [1, 2]", "one value for each of the 4 classes"),
        ("priorities: {search: best}", "line 3: Priorities: search must be"),
        ("priorities: maybe", "line 3: 'priorities' cannot be 'maybe'"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_line(section: str, message: str) -> None:
    with pytest.raises(TopologyError) as caught:
        Topology.parse(HOSTS + section, source="net.yaml")
    assert str(caught.value).startswith("Topology 'net.yaml' line ")
    assert message in str(caught.value)
