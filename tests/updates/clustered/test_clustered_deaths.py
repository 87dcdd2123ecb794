"""A job as users start it goes on when a whole cluster is killed, and then the server of another one.

How long its ranks go without a step is measured by `make bench-check`.
"""

from pathlib import Path

from clustered_deaths import WHOLE_CLUSTER
from clustered_job import CLUSTERS, lose_a_cluster_and_a_server


def test_a_whole_cluster_and_then_a_server_die_and_the_others_go_on(tmp_path: Path) -> None:
    found = lose_a_cluster_and_a_server(tmp_path)
    first = found[0]
    (victim,) = {0, 1} - {one["rank"] for one in found}
    assert first["clusters"] == CLUSTERS
    assert {one["rank"] for one in found} == {1 - victim, 4, 5}
    assert sorted(first["dead"]) == sorted({*WHOLE_CLUSTER, victim})
    assert [one["servers"][:2] for one in found] == [[1 - victim, None]] * 3
    assert [one["num_replaced"] for one in found if one["rank"] == 1 - victim] == [1]
    assert first["weights"] == [1 / 3, 0.0, 2 / 3]
    assert len({one["digest"] for one in found}) == 1, "parameters are averaged at the end of a term"
