"""Quantities parse to exact numbers, print back to themselves, and refuse slips with the right spelling."""

import math

import pytest
from hypothesis import given, strategies as st

from syncline.errors import UnitError
from syncline.units import (
    format_duration,
    format_frequency,
    format_rate,
    format_share,
    format_size,
    parse_duration,
    parse_frequency,
    parse_rate,
    parse_share,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("10 Gbit/s", 1.25e9),
        ("200 Mbit/s", 25e6),
        ("200Mbit/s", 25e6),
        ("200Mbit", 25e6),
        ("1 GbE", 125e6),
        ("10 Gbps", 1.25e9),
        ("5 Mb/s", 625e3),
        (" 1.5 kbit/s ", 187.5),
        ("125 MB/s", 125e6),
        ("1 GiB/s", 2.0**30),
        ("1e3 B/s", 1000.0),
        ("0 bit/s", 0.0),
        ("unlimited", math.inf),
    ],
)
def test_rates(text, bytes_per_s):
    assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize(("text", "size"), [("64 MiB", 64 << 20), ("16 MB", 16_000_000), ("0 B", 0), ("1.5 KiB", 1536)])
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(("text", "seconds"), [("5 ms", 0.005), ("200 us", 0.0002), ("2 min", 120.0), ("1.5 s", 1.5)])
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(("text", "hertz"), [("3 GHz", 3e9), ("1980 MHz", 1.98e9), ("50 Hz", 50.0), ("2.4GHz", 2.4e9)])
def test_frequencies(text, hertz):
    assert parse_frequency(text) == hertz


@pytest.mark.parametrize(("text", "share"), [("0.2 %", 0.002), ("1%", 0.01), ("0 %", 0.0), ("100 %", 1.0)])
def test_shares(text, share):
    assert parse_share(text) == share


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_rate, "10 Gbps/s", "'10 Gbps/s' is not a rate; write '10 Gbit/s'"),
        (parse_rate, "5 MBps", "'5 MBps' is not a rate; write '5 MB/s'"),
        (parse_rate, "5 mb/s", "'5 mb/s' is not a rate; write '5 Mbit/s'"),
        (parse_rate, 5, "5 is not a rate; write a number and its unit, such as '10 Gbit/s'"),
        (parse_rate, "-5 Mbit/s", "'-5 Mbit/s' is not a rate; write a number and its unit, such as '10 Gbit/s'"),
        (parse_rate, "1e99 bit/s", "'1e99 bit/s' is too large a rate; write one such as '10 Gbit/s'"),
        (parse_size, "64 mib", "'64 mib' is not a size; write '64 MiB'"),
        (parse_size, "0.3 B", "'0.3 B' is not a whole number of bytes; write '0 B'"),
        (parse_size, "7 furlongs", "'7 furlongs' is not a size; write it in one of B, kB, MB, GB, TB"),
        (parse_duration, "5 msec", "'5 msec' is not a duration; write '5 ms'"),
        (parse_frequency, "3 ghz", "'3 ghz' is not a frequency; write '3 GHz'"),
        (parse_share, 0.2, "0.2 is not a share; write a number and its unit, such as '0.2 %'"),
        (parse_duration, None, "None is not a duration; write a number and its unit, such as '5 ms'"),
    ],
)
def test_slips_are_named_with_their_remedy(parse, text, message):
    with pytest.raises(UnitError) as caught:
        parse(text)
    assert str(caught.value).startswith(message)


@given(st.text(max_size=80))
def test_any_text_is_a_quantity_or_a_unit_error(text):
    for parse in (parse_rate, parse_size, parse_duration, parse_frequency, parse_share):
        message = ""
        try:
            parse(text)
        except UnitError as error:
            message = str(error)
        assert message == "" or repr(text[:64]) in message


@given(st.floats(min_value=1e-3, max_value=1e20))
def test_exact_spelling_parses_to_the_same_number(number):
    assert parse_rate(format_rate(number, exact=True)) == number
    assert parse_duration(format_duration(number, exact=True)) == number


@given(st.floats(min_value=1e-12, max_value=1.0))
def test_shares_parse_to_the_same_number(share):
    assert parse_share(format_share(share)) == share


@given(st.floats(min_value=1e-3, max_value=1e20))
def test_short_spelling_is_within_four_digits(number):
    assert parse_rate(format_rate(number)) == pytest.approx(number, rel=1e-3)


def test_spelling_for_people():
    assert format_rate(25e6) == "200 Mbit/s"
    assert format_rate(math.inf) == "unlimited"
    assert format_rate(0.0) == "0 bit/s"
    assert format_size(64 << 20) == "64 MiB"
    assert format_size(100) == "100 B"
    assert format_duration(0.005) == "5 ms"
    assert format_frequency(2.4e9) == "2.4 GHz"
    assert [format_share(share) for share in (0.002, 0.5, 1e-5)] == ["0.2 %", "50 %", "0.001 %"]
    assert format_duration(0.00025, exact=True) == "250 us"
