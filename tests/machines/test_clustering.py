import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from sklearn.metrics import silhouette_score

from syncline.errors import ConfigurationError
from syncline.machines.clustering import cluster_vectors, keep_numbers, mean_silhouette, reconsider
from syncline.machines.features import build_table, topology_features, topology_latencies
from syncline.topology import Topology


def of_topology(name: str) -> tuple[tuple[int, ...], ...]:
    topology = Topology.load(name)
    table = build_table(topology_features(topology), latencies_s=topology_latencies(topology))
    return cluster_vectors(table.vectors).clusters


def test_clusters_follow_the_network() -> None:
    assert of_topology("two-sites") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert of_topology("three-racks-uneven-uplinks") == ((0, 1), (2, 3, 4), (5, 6, 7, 8))
    assert of_topology("flat-8") == (tuple(range(8)),)


@pytest.mark.parametrize("num_groups", [2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_groups_that_lie_apart_are_found(num_groups: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    truth = np.repeat(np.arange(num_groups), 4)
    vectors = np.eye(num_groups)[truth] + generator.normal(scale=0.05, size=(len(truth), num_groups))
    clustering = cluster_vectors(vectors)
    assert clustering.labels == tuple(truth)
    assert max(clustering.silhouettes, key=clustering.silhouettes.__getitem__) == num_groups


def test_no_structure_is_one_cluster() -> None:
    vectors = np.random.default_rng(0).normal(size=(30, 8))
    clustering = cluster_vectors(vectors)
    assert len(clustering.clusters) == 1
    assert "below 0.5" in clustering.reason


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_too_few_hosts_to_compare_are_one_cluster(num_hosts: int) -> None:
    assert len(cluster_vectors(np.arange(num_hosts, dtype=float)[:, None]).clusters) == 1


def test_a_number_of_clusters_can_be_asked_for() -> None:
    vectors = np.array([[0.0], [10.0]])
    assert cluster_vectors(vectors, num_clusters=2).clusters == ((0,), (1,))
    assert cluster_vectors(vectors, num_clusters=1).clusters == ((0, 1),)
    assert len(cluster_vectors(np.zeros((5, 2)), num_clusters=3).clusters) == 3
    with pytest.raises(ConfigurationError, match="1 to 2"):
        cluster_vectors(vectors, num_clusters=3)


@given(st.integers(0, 10_000), st.integers(3, 20), st.integers(2, 4))
def test_silhouette_is_that_of_scikit_learn(seed: int, num_hosts: int, num_clusters: int) -> None:
    generator = np.random.default_rng(seed)
    vectors = generator.normal(size=(num_hosts, 3))
    labels = np.concatenate([np.arange(2), generator.integers(0, num_clusters, num_hosts - 2)])
    if len(np.unique(labels)) < num_hosts:
        assert mean_silhouette(vectors, labels) == pytest.approx(silhouette_score(vectors, labels))


@settings(max_examples=25)
@given(st.integers(0, 10_000))
def test_every_host_is_in_one_cluster_and_all_ranks_find_the_same(seed: int) -> None:
    generator = np.random.default_rng(seed)
    vectors = generator.integers(0, 3, size=(int(generator.integers(1, 12)), 2)).astype(float)
    clustering = cluster_vectors(vectors)
    assert sorted(host for hosts in clustering.clusters for host in hosts) == list(range(len(vectors)))
    assert [hosts[0] for hosts in clustering.clusters] == sorted(hosts[0] for hosts in clustering.clusters)
    assert clustering == cluster_vectors(vectors)


def test_clusters_keep_their_numbers() -> None:
    before = ((0, 1, 2), (3, 4, 5))
    assert keep_numbers(((0, 3, 4, 5), (1, 2)), before) == ((1, 2), (0, 3, 4, 5))
    assert keep_numbers(((3, 4), (0, 1, 2), (5,)), before) == ((0, 1, 2), (3, 4), (5,))
    assert keep_numbers(((0, 1, 2, 3, 4, 5),), before) == ((0, 1, 2, 3, 4, 5),)


def test_hosts_move_only_for_clusters_that_are_clearly_better() -> None:
    vectors = np.array([[0.0], [0.1], [1.0], [1.1]])
    assert reconsider(vectors, [0, 0, 1, 1]) is None
    assert reconsider(vectors, [1, 1, 0, 0]) is None
    found = reconsider(vectors, [0, 1, 0, 1])
    assert found is not None
    assert found.clusters == ((0, 1), (2, 3))
    evenly = np.arange(5.0)[:, None]  # 2 and 3 hosts are as good as 3 and 2
    assert reconsider(evenly, [0, 0, 1, 1, 1], num_clusters=2) is None
    assert reconsider(evenly, [0, 0, 0, 1, 1], num_clusters=2) is None
    assert reconsider(np.zeros((4, 1)), [0, 0, 1, 1]) is None
