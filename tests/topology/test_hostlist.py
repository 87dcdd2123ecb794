"""Lists of names: expanded in order, with their zeros, and never without bound."""

import pytest

from syncline.errors import TopologyError
from syncline.topology.host_matching import expand_hostlist


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ("a",)),
        ("h[0-2]", ("h0", "h1", "h2")),
        ("n[08-10,12],login", ("n08", "n09", "n10", "n12", "login")),
        ("r[1-2]n[1-2]x", ("r1n1x", "r1n2x", "r2n1x", "r2n2x")),
    ],
)
def test_lists(text, names):
    assert expand_hostlist(text) == names


@pytest.mark.parametrize(
    "text", ["", "a,", "a[", "a]", "a[x]", "a[2-1]", "a[]", "a[[1]]", "a[0-999999]", "a[1-999][1-999]"]
)
def test_what_is_no_list_is_refused(text):
    with pytest.raises(TopologyError):
        expand_hostlist(text)
