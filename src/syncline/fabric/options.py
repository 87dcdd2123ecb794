"""Every setting of the TCP fabric, each checked once; those that go together are made so by whoever makes them."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Annotated

from syncline.arguments import Bounds, Count, Whole, check_fields
from syncline.endpoints import only_port
from syncline.errors import ConfigurationError

MIN_SECRET_BYTES = 32
MAX_CHUNK_BYTES = 256 << 10
"""The transport's limit on a chunk: no receiver ever drains more than this at once."""
MAX_CLASSES = 16
MOST_CONNECTED = 16
"""So many ranks may all exchange something with each other, however little it is."""
MAX_DSCP = 63
NOWHERE = ("", 0)
"""What a rank advertises that others cannot dial."""
Positive = Annotated[float, Bounds(above=0)]
Mark = Annotated[int, Bounds(0, MAX_DSCP)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricOptions:
    """How one rank's TCP fabric behaves. All ranks of a job are given the same.

    >>> FabricOptions(secret=b"s" * 32, dead_s=30.0).send_s  # seconds
    300.0
    """

    job_id: str = "syncline"
    """Which job this is: connections of another job are refused."""
    secret: bytes | None = None
    """At least 32 bytes that all ranks share and that never go through the store; None: loopback only."""
    insecure: bool = False
    """Allow addresses other than loopback without a secret. Whoever reaches the port can then join the job."""
    authenticate_frames: bool | None = None
    """Let every frame carry a code that only who knows the secret can make, so that none can be changed, repeated or
    left out on the way. None: where there is a secret, and ranks are on several machines."""
    address: str | None = None
    """The address, interface or name of this machine to bind to; None is loopback."""
    ports: tuple[int, int] | None = None
    """The first and the last port on which this rank may listen; None is any that is free. If both are one, all ranks
    of a host share it."""
    advertised: tuple[str, int] | None = None
    """Where others reach this rank, if not where it listens: an address, and a port, or 0 for that on which it does.
    ``NOWHERE``: only ranks of its own host reach it, and it connects to all others (:mod:`syncline.fabric.reach`)."""
    network: str | None = None
    """By which name other ranks of this rank's host lend it their network; None: it has its own."""

    heartbeat_s: Positive = 1.0
    """Less than ``suspect_s``, which is at most ``dead_s``."""
    suspect_s: Positive = 3.0
    dead_s: Positive = 10.0
    stall_s: Positive = 300.0
    """A rank whose training thread makes no call for this long is stalled, though its process lives."""
    held_s: Positive = 300.0
    """How long a foreign call may hold the interpreter's lock before this rank falls silent."""
    handshake_s: Positive = 5.0
    connect_s: Positive = 60.0
    close_s: Positive = 10.0

    eager_bytes: Whole = 16 << 10
    """Messages of at most this size are sent without asking, within the credit; 0: always ask. No other size is less.

    Larger ones too between hosts of one switch, where the topology has rates and there is one class.
    """
    credit_bytes: Whole = 4 << 20
    """How much one peer may send to this rank before its receives are posted; less where ``eager_bytes`` is larger."""
    grant_window_bytes: Count | None = None
    """How much may be granted and not yet here; None takes it from the topology's rates."""
    chunk_bytes: Annotated[int, Bounds(4096, MAX_CHUNK_BYTES)] = 256 << 10
    """An urgent message waits for at most one chunk of another on its connection. Slow routes have smaller ones."""

    most_connected: Count = MOST_CONNECTED
    """So many ranks, or fewer, are all connected from the start. Of more, each is to some neighbours, and to another
    rank once one of the two sends the other something (:mod:`syncline.fabric.gossip`); to all, where a rank cannot be
    dialled."""
    idle_s: Positive = 60.0
    """Of more, those that are no neighbours close their connections when neither has sent the other anything for so
    long; who does then opens them again."""
    num_classes: Annotated[int, Bounds(1, MAX_CLASSES)] = 1
    """Number of data connections to each peer; class 0 is the most urgent."""
    dscp: tuple[Mark, ...] | None = None
    """A DSCP mark (0 to 63) for each class; None leaves the marks alone."""
    unsent_bytes: Whole = 256 << 10
    """``TCP_NOTSENT_LOWAT``: what the kernel may hold beyond what is on the wire; less on slow routes."""
    shares_memory: bool = True
    """Copy messages between ranks of one machine straight from memory to memory, where the kernel allows it."""
    binds_thread: bool = True
    """Bind the communication thread to this rank's share of the machine's cores where ranks share memory, unless
    someone has restricted the process already."""
    congestion: str | None = None
    """``TCP_CONGESTION``, such as ``"bbr"``; None is cubic within a machine and where the topology has rates, bbr where
    it has a round trip of 4 ms as well and the kernel has bbr, else the system's default."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.secret is not None and len(self.secret) < MIN_SECRET_BYTES:
            raise ConfigurationError(
                f"the shared secret must have at least {MIN_SECRET_BYTES} bytes, not {len(self.secret)}; "
                "make one with: head -c 32 /dev/urandom | base64 > FILE"
            )

    @property
    def send_s(self) -> float:
        """How long a peer may leave sent bytes unacknowledged (``TCP_USER_TIMEOUT``): a backstop, far above dead_s.

        A peer whose interpreter is held does not read either.
        """
        return max(3 * self.dead_s, self.held_s)

    def check_exposure(self, address: str) -> None:
        """Refuse to listen on ``address`` where strangers could reach it and nothing would stop them.

        Refused as well are codes on frames that anyone could make.
        """
        if self.authenticate_frames and self.secret is None:
            raise ConfigurationError(
                "authenticate_frames=True needs a secret, and there is none: anyone could make the codes; give "
                "all ranks the same secret (SYNCLINE_SECRET_FILE, mode 0600, at least 32 bytes), or leave it off"
            )
        if self.secret is not None or self.insecure or ipaddress.ip_address(address).is_loopback:
            return
        raise ConfigurationError(
            f"address {address} can be reached from other machines and there is no shared secret: anyone could join "
            "the job; give all ranks the same secret (SYNCLINE_SECRET_FILE, mode 0600, at least 32 bytes), or say "
            "insecure=True on a network that you trust"
        )

    @property
    def shared_port(self) -> int | None:
        """The port at which all that listens on this host does so (:mod:`syncline.fabric.shared_port`), if one is."""
        return only_port(self.ports)

    def decided_for(self, addresses: Collection[str]) -> FabricOptions:
        """Return these options where all ranks listen on ``addresses``: whether frames carry codes is decided.

        >>> FabricOptions(secret=b"s" * 32).decided_for({"10.0.0.1", "10.0.0.2"}).authenticate_frames
        True
        """
        if self.authenticate_frames is not None:
            return self
        return replace(self, authenticate_frames=self.secret is not None and len(set(addresses)) > 1)
