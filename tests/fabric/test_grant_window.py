"""A window that follows how quickly hosts answer, on times that the tests make up."""

from unittest.mock import Mock, call

from syncline.fabric.grant_window import GrantLog, GrantWindow

RATE = 1000.0


def learn(window, *, share_of_rate, num_bytes=10):
    """Let a piece arrive as it would where the link brings this part of its rate."""
    underway_bytes = window.num_bytes
    window.learn(num_bytes, underway_bytes=underway_bytes, took_s=underway_bytes / (share_of_rate * RATE))


def settled(*, share_of_rate, window=None):
    window = window or GrantWindow(500, least_bytes=200, bytes_per_s=RATE)
    for _ in range(2000):
        learn(window, share_of_rate=share_of_rate)
    return window.num_bytes


def test_on_a_busy_link_it_shrinks_to_the_least():
    assert settled(share_of_rate=0.956) == 200


def test_it_stays_where_the_link_idles():
    assert settled(share_of_rate=0.8) == 500


def test_it_grows_again_when_hosts_become_slow():
    window = GrantWindow(500, least_bytes=200, bytes_per_s=RATE)
    assert settled(share_of_rate=1.0, window=window) == 200
    assert settled(share_of_rate=0.8, window=window) == 500


def test_it_comes_to_rest_near_what_a_round_needs():
    window = GrantWindow(500, least_bytes=200, bytes_per_s=RATE)
    sizes = []
    for _ in range(3000):
        learn(window, share_of_rate=min(1.0, window.num_bytes / 300))
        sizes.append(window.num_bytes)
    assert 225 < min(sizes[1000:]) <= 300 <= max(sizes[1000:]) < 380


def test_one_late_arrival_among_prompt_ones_does_not_let_it_grow():
    window = GrantWindow(500, least_bytes=200, bytes_per_s=RATE)
    for number in range(2000):
        learn(window, share_of_rate=0.3 if number % 100 == 0 else 1.0)
    assert window.num_bytes == 200


def test_where_little_was_wanted_nothing_is_learnt():
    window = GrantWindow(500, least_bytes=200, bytes_per_s=RATE)
    for _ in range(1000):
        window.learn(10, underway_bytes=400, took_s=0.4)
    assert window.num_bytes == 500


def test_equal_bounds_and_unknown_rates_keep_it():
    assert GrantWindow(500).is_fixed
    assert GrantWindow(500, least_bytes=100).is_fixed
    assert GrantWindow(500, least_bytes=900, bytes_per_s=RATE).is_fixed
    assert not GrantWindow(500, least_bytes=100, bytes_per_s=RATE).is_fixed


def test_a_log_lets_the_window_learn_from_what_it_knows():
    window = Mock()
    log = GrantLog(underway_bytes=5)
    log.granted(10, underway_bytes=15, now_s=1.0)
    log.granted(20, underway_bytes=35, now_s=2.0)
    log.arrived(5, window, now_s=2.5)
    assert window.learn.mock_calls == [], "these were under way before, nobody knows since when"
    log.arrived(4, window, now_s=3.0)
    assert window.learn.mock_calls == [call(4, underway_bytes=15, took_s=2.0)]
    log.arrived(16, window, now_s=5.0)
    assert window.learn.mock_calls[1:] == [
        call(6, underway_bytes=15, took_s=4.0),
        call(10, underway_bytes=35, took_s=3.0),
    ]
