import numpy as np
import pytest
from hypothesis import given, strategies as st

from syncline.updates.clustered.means import mixing_shares, mixing_weights, resized, update_contributions


def gram_of(vectors: np.ndarray) -> np.ndarray:
    return vectors @ vectors.T


@given(st.integers(0, 10_000), st.integers(1, 6))
def test_contributions_are_the_formula(seed: int, num_clusters: int) -> None:
    generator = np.random.default_rng(seed)
    before = generator.random((num_clusters, num_clusters))
    vectors = generator.normal(size=(num_clusters, 3))
    after = update_contributions(before, gram_of(vectors), range(num_clusters))
    for c in range(num_clusters):
        for k in range(num_clusters):
            cosine = vectors[k] @ vectors[c] / np.linalg.norm(vectors[k]) / np.linalg.norm(vectors[c])
            assert after[c, k] == pytest.approx(0.9 * before[c, k] + 0.1 * max(0, cosine))


def test_a_cluster_that_was_absent_keeps_what_it_had() -> None:
    before = np.array([[0, 0.5, 0.3], [0.5, 0, 0.2], [0.3, 0.2, 0]])
    after = update_contributions(before, np.ones((3, 3)), [0, 1])
    assert after[0, 1] == pytest.approx(0.55)
    assert after[0, 2] == 0.3


def test_a_zero_vector_is_like_nothing() -> None:
    after = update_contributions(np.zeros((2, 2)), gram_of(np.array([[0.0], [1.0]])), [0, 1])
    assert after.tolist() == [[0, 0], [0, pytest.approx(0.1)]]


def test_weights_are_relative_to_the_own_cluster_and_never_below_the_least() -> None:
    table = np.array([[0.5, 0.5, 0.25, 0.001], [0] * 4, [0] * 4, [0] * 4])
    assert mixing_weights(table, 0, range(4)).tolist() == [1, 1, 0.5, 0.1]
    assert mixing_weights(table, 0, [0, 2]).tolist() == [1, 0, 0.5, 0]


def test_where_nothing_is_known_all_count_alike() -> None:
    assert mixing_weights(np.zeros((3, 3)), 1, range(3)).tolist() == [1, 1, 1]


def test_shares_are_samples_times_weights() -> None:
    assert mixing_shares((1.0, 2.0, 1.0), np.array([1.0, 0.5, 0.0])).tolist() == [0.5, 0.5, 0]
    assert mixing_shares((0.0, 0.0), np.ones(2)).tolist() == [0, 0]


def test_a_table_for_other_clusters_keeps_what_is_known_by_number() -> None:
    table = np.array([[0.0, 0.5], [0.25, 0.0]])
    assert resized(table, 2).tolist() == [[0.0, 0.5], [0.25, 0.0]]
    assert resized(table, 1).tolist() == [[0.0]]
    assert resized(table, 3).tolist() == [[0.0, 0.5, 0.0], [0.25, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert resized(np.zeros((0, 0)), 2).tolist() == [[0.0, 0.0], [0.0, 0.0]]
