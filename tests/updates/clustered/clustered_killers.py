"""Who dies, and when, in the worlds of the clustered update's protocol."""

from __future__ import annotations

import random
from collections import Counter

from cluster_world import World

from syncline.updates.clustered.messages import Agreed, Supply
from syncline.updates.clustered.server import ServerState


class ServerKiller:
    """Kills the first rank that is a server in ``state``."""

    def __init__(self, world: World, state: ServerState, choose: random.Random) -> None:
        self.victims: list[int] = []
        self._world, self._state, self._choose = world, state, choose

    def __call__(self) -> None:
        found = [
            rank
            for rank in self._world.live()
            if any(server.state is self._state for server in self._world.players[rank].node.servers.values())
        ]
        if found and not self.victims and len(self._world.live()) > 2:
            self.victims.append(self._choose.choice(found))
            self._world.kill(self.victims[0], self._choose)


def kill_one_who_hands_out(world: World, choose: random.Random) -> None:
    """Let a server die whose cluster, or whose fellow servers, have heard a record from it but in part."""
    while choices := world.choices():
        world.happen(choose.choice(choices))
        senders = Counter(
            sender
            for (sender, _), mail in world.mail.items()
            for message, _ in mail
            if isinstance(message, Agreed) and world.players[sender].is_alive
        )
        done = [rank for rank, number in senders.items() if number == 1 and len(world.players[rank].node.servers)]
        if done:
            world.kill(done[0])
            return


class AskedKiller:
    """Kills each rank that a new server asks for a record, before it reads that."""

    def __init__(self, world: World, choose: random.Random) -> None:
        self.victims: list[int] = []
        self._world, self._choose = world, choose

    def __call__(self) -> None:
        asked = [
            receiver
            for (_, receiver), mail in self._world.mail.items()
            if receiver in self._world.live() and any(isinstance(message, Supply) for message, _ in mail)
        ]
        if asked and len(self._world.live()) > 1:
            self.victims.append(asked[0])
            self._world.kill(asked[0], self._choose)
