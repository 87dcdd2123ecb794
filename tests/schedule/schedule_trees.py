"""Random topologies for property tests of schedules: any shape, hosts beside subtrees, sockets, any ranks on a host.

Other rooms may import it: ``from schedule_trees import trees`` (put ``tests/schedule`` on the path).
"""

from hypothesis import strategies as st

from syncline.topology import Host, Link, Rank, Socket, Switch, Topology

RATES = st.sampled_from([12.5e6, 25e6, 50e6, 125e6, 1.25e9])


def links(rates=RATES):
    return st.builds(Link, up_bytes_per_s=rates, down_bytes_per_s=rates)


LOCAL = st.just(Link.unlimited()) | links()


class _Grower:
    """Draws a tree and counts its names and ranks."""

    def __init__(self, draw, max_ranks, max_degree, link):
        self.draw = draw
        self.ranks_left = max_ranks
        self.max_degree = max_degree
        self.link = link
        self.num_ranks = 0
        self.num_names = 0

    def name(self, prefix):
        self.num_names += 1
        return f"{prefix}{self.num_names}"

    def host(self, link):
        num_ranks = self.draw(st.integers(1, max(1, min(self.max_degree, self.ranks_left))))
        first, self.num_ranks = self.num_ranks, self.num_ranks + num_ranks
        self.ranks_left -= num_ranks
        ranks = tuple(Rank(rank=first + k, link=self.draw(LOCAL)) for k in range(num_ranks))
        name = self.name("h")
        if num_ranks < 3 or self.draw(st.integers(0, 3)):
            return Host(name=name, link=link, ranks=ranks)
        halves = [ranks[: num_ranks // 2], ranks[num_ranks // 2 :]]
        sockets = [Socket(name=f"{name}/s{k}", link=self.draw(LOCAL), children=half) for k, half in enumerate(halves)]
        return Host(name=name, link=link, sockets=tuple(sockets))

    def node(self, depth, link):
        if depth == 0 or self.ranks_left <= 1 or self.draw(st.integers(0, 3)) == 0:
            return self.host(link)
        name = self.name("s")
        degree = self.draw(st.integers(1, self.max_degree))
        children = [self.node(depth - 1, self.draw(self.link))]
        while len(children) < degree and self.ranks_left > 0:
            children.append(self.node(depth - 1, self.draw(self.link)))
        return Switch(name=name, link=link, children=tuple(children))


@st.composite
def trees(draw, max_depth=4, max_degree=8, max_ranks=24, link=None, permuted=True):
    """Depth 1 to 5 counted in links, degree 1 to 8; ranks in file order, or sometimes in any if ``permuted``."""
    grower = _Grower(draw, max_ranks, max_degree, links() if link is None else link)
    topology = Topology(name="random", root=grower.node(draw(st.integers(0, max_depth)), None))
    if permuted and draw(st.integers(0, 3)) == 0:
        return topology.permuted(draw(st.permutations(range(topology.num_ranks))))
    return topology


def balanced_tree(shape, rate=125e6):
    """Build a tree of a nested list: a number is a host with so many ranks."""
    grower = _Grower(None, 0, 0, None)

    def build(part, link):
        if isinstance(part, int):
            first, grower.num_ranks = grower.num_ranks, grower.num_ranks + part
            ranks = tuple(Rank(rank=first + k, link=Link.unlimited()) for k in range(part))
            return Host(name=grower.name("h"), link=link, ranks=ranks)
        name = grower.name("s")
        return Switch(name=name, link=link, children=tuple(build(child, Link.symmetric(rate)) for child in part))

    return Topology(name="built", root=build(shape, None))


def star(rates):
    """Build one switch whose hosts have links of these (up, down) rates."""
    hosts = tuple(
        Host(name=f"h{k}", link=Link(up_bytes_per_s=up, down_bytes_per_s=down), ranks=(Rank(rank=k),))
        for k, (up, down) in enumerate(rates)
    )
    return Topology(name="star", root=Switch(name="switch", link=None, children=hosts))
