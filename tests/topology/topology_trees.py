"""Random topologies for property tests: any shape, hosts beside subtrees, sockets, several ranks on a host."""

import math
from dataclasses import replace

from hypothesis import strategies as st

from syncline.topology import Host, Link, Rank, Socket, Switch, Topology

rates = st.floats(min_value=1e-3, max_value=1e15) | st.just(math.inf)
latencies = st.just(0.0) | st.floats(min_value=1e-9, max_value=10.0)
losses = st.just(0.0) | st.floats(min_value=1e-9, max_value=0.99)
links = st.builds(Link, up_bytes_per_s=rates, down_bytes_per_s=rates, latency_s=latencies, loss_share=losses)
features = st.dictionaries(
    st.text(min_size=1, max_size=5), st.floats(allow_nan=False) | st.text(max_size=5), max_size=2
)


class _Numbers:
    def __init__(self):
        self.num_names = 0
        self.num_ranks = 0

    def name(self, prefix):
        self.num_names += 1
        return f"{prefix}{self.num_names}"

    def rank(self):
        self.num_ranks += 1
        return self.num_ranks - 1


@st.composite
def topologies(draw, max_depth=4, max_degree=3):
    numbers = _Numbers()

    def ranks():
        return tuple(Rank(rank=numbers.rank(), link=draw(links)) for _ in range(draw(st.integers(1, 3))))

    def sockets(above, depth):
        names = [f"{above}/s{place}" for place in range(draw(st.integers(1, 2)))]
        return tuple(
            Socket(
                name=name,
                link=draw(links),
                children=sockets(name, depth - 1) if depth and draw(st.booleans()) else ranks(),
            )
            for name in names
        )

    def host(link):
        name = numbers.name("h")
        inside = {"sockets": sockets(name, 1)} if draw(st.integers(0, 3)) == 0 else {"ranks": ranks()}
        plain = Host(name=name, link=link, **inside)
        gateway = draw(st.sampled_from(["every", "one", "auto", *["helper"] * (len(plain.ranks) > 1)]))
        memory_bytes = draw(st.none() | st.integers(0, 2**50))
        return replace(
            plain, ranks=inside.get("ranks", ()), features=draw(features), memory_bytes=memory_bytes, gateway=gateway
        )

    def node(depth, link):
        if depth == 0 or draw(st.booleans()):
            return host(link)
        name = numbers.name("s")
        children = tuple(node(depth - 1, draw(links)) for _ in range(draw(st.integers(1, max_degree))))
        return Switch(name=name, link=link, children=children)

    topology = Topology(name="random", root=node(draw(st.integers(0, max_depth)), None))
    if draw(st.booleans()):
        return topology.permuted(draw(st.permutations(range(topology.num_ranks))))
    return topology
