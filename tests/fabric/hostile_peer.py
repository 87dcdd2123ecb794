"""A peer that knows the secret and sends whatever a test wants."""

import asyncio
import socket

from frames_by_hand import HEADER_BYTES, check_frame, decode_header, encode_header, make_checks

from meeting_stores import DictStore
from syncline.fabric import FabricOptions, Rendezvous, connect_tcp
from syncline.fabric.dialling import connect_to, dial, read_exactly
from syncline.fabric.frames import FrameType
from syncline.fabric.handshake import Terms, derive_key, derive_offer_key
from syncline.fabric.rendezvous import Member
from syncline.fabric.shared_host import MemoryOffers


class HostilePeer:
    """Rank 1 of 2, by hand."""

    def __init__(self, options):
        self.options = options
        self.sockets = {}
        self.keys = {}
        self.checks = {}
        """Of each connection, those of what it sends and of what it receives."""

    async def connect(self, store):
        generation = await Rendezvous(store, job_id=self.options.job_id).meet(
            Member(rank=1, host="evil", address="127.0.0.1", port=9), world_size=2, timeout_s=10.0
        )
        terms = Terms(
            rank=1,
            world_size=2,
            job_id=self.options.job_id,
            epoch=generation.epoch,
            key=derive_key(self.options.secret or generation.job_nonce, job_id=self.options.job_id),
            num_classes=self.options.num_classes,
            authenticates_frames=bool(self.options.authenticate_frames),
        )
        self.offers = MemoryOffers(rank=1, key=derive_offer_key(terms.key, epoch=generation.epoch))
        address = (generation.members[0].address, generation.members[0].port)
        for connection_class in range(-1, self.options.num_classes):
            admission, self.sockets[connection_class] = await dial(
                terms,
                self.options,
                peer=0,
                peer_name="rank 0",
                address=address,
                connection_class=connection_class,
                open_socket=lambda _: connect_to(address, "127.0.0.1", self.options),
            )
            self.keys[connection_class] = admission.frame_keys
            self.checks[connection_class] = make_checks(admission.frame_keys)
        return self

    async def send(self, connection_class, *parts):
        await asyncio.get_running_loop().sock_sendall(self.sockets[connection_class], b"".join(parts))

    async def frame(self, connection_class, kind, *, payload=b"", **fields):
        await self.send(connection_class, *self.make_frame(connection_class, kind, payload=payload, **fields))

    def make_frame(self, connection_class, kind, *, payload=b"", **fields):
        """Return the header and the payload of the next frame."""
        sending, _ = self.checks[connection_class]
        return encode_header(kind, connection_class, payload=payload, checks=sending, **fields), payload

    async def read_frame(self, connection_class=-1):
        sock, (_, receiving) = self.sockets[connection_class], self.checks[connection_class]
        header = await read_exactly(sock, HEADER_BYTES)
        frame = decode_header(header)
        payload = await read_exactly(sock, frame.chunk_bytes)
        check_frame(header, payload, receiving)
        return frame, payload

    async def read_until(self, kind):
        """Read control frames until one of ``kind``, and return it."""
        async with asyncio.timeout(60):
            while True:
                header, payload = await self.read_frame()
                if header.type == kind:
                    return header, payload

    async def verdict(self):
        """Return what the victim says before it closes."""
        header, payload = await self.read_until(FrameType.LOST)
        assert header.tag == 1
        return payload.decode()

    def close(self):
        for sock in self.sockets.values():
            sock.close()


async def open_hostile(**settings):
    """Return a fabric (rank 0) and the hostile rank 1 that is connected to it."""
    options = FabricOptions(**settings)
    store = DictStore()
    fabric, peer = await asyncio.gather(
        connect_tcp(options, rank=0, world_size=2, rendezvous=Rendezvous(store, job_id=options.job_id)),
        HostilePeer(options).connect(store),
    )
    return fabric, peer


async def connect_raw(port):
    """Open a plain socket to a port of this machine."""
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    return sock
