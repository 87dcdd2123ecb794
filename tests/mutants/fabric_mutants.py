"""Mutants of connections: handshakes, frames, heartbeats, grants, and who is believed to be lost."""

from mutant_types import Change, Mutant, NamedTest, Simulation

_HANDSHAKES = "tests/fabric/test_handshake.py"

FABRIC_MUTANTS = (
    Mutant(
        name="silence is not judged",
        breaks="a machine that lost power is never given up",
        changes=(
            Change(
                file="fabric/liveness.py",
                before="        if silence_s >= self._dead_s:\n",
                after="        if silence_s >= 1000 * self._dead_s:\n",
            ),
        ),
        found_by=Simulation(scenario="partition", num_seeds=20),
        is_quick=False,
    ),
    Mutant(
        name="own absence counts against others",
        breaks="a process that was stopped accuses all others when it goes on",
        changes=(
            Change(
                file="fabric/liveness.py",
                before="counted_s = min(passed_s, self.interval_s) if gap_s else passed_s",
                after="counted_s = passed_s",
            ),
        ),
        found_by=NamedTest(
            file="tests/fabric/test_liveness.py", name="test_a_loop_that_stood_still_does_not_blame_the_others"
        ),
    ),
    Mutant(
        name="epoch is not checked",
        breaks="a process of an earlier start of the job is let in",
        changes=(
            Change(
                file="fabric/handshake.py",
                before="elif epoch != terms.epoch:",
                after="elif epoch == terms.epoch + 1 << 70:",
            ),
        ),
        found_by=NamedTest(file=_HANDSHAKES, name="test_what_does_not_fit_is_refused_and_the_dialer_learns_why"),
    ),
    Mutant(
        name="nonce is not checked",
        breaks="who recorded a handshake can play it again",
        changes=(
            Change(
                file="fabric/handshake.py",
                before='self._reply = body + _mac(terms.key, b"S", hello, body)',
                after='self._reply = body + _mac(terms.key, b"S", hello, body)\n        self._hello = b""',
            ),
            Change(
                file="fabric/handshake.py",
                before='_mac(terms.key, b"C", transcript, message[:-_MAC_BYTES])',
                after='_mac(terms.key, b"C", message[:-_MAC_BYTES])',
            ),
            Change(
                file="fabric/handshake.py",
                before='_mac(key, b"C", transcript, body)',
                after='_mac(key, b"C", body)',
            ),
        ),
        found_by=NamedTest(file=_HANDSHAKES, name="test_replayed_messages_are_refused"),
    ),
    Mutant(
        name="secret is not checked",
        breaks="anyone is let in",
        changes=(
            Change(
                file="fabric/handshake.py",
                before="if not hmac.compare_digest(message[-_MAC_BYTES:], ",
                after="if not message and hmac.compare_digest(message, ",
            ),
        ),
        found_by=NamedTest(file=_HANDSHAKES, name="test_a_dialer_that_lies_about_the_secret_is_refused"),
    ),
    Mutant(
        name="handshake has no deadline",
        breaks="a stranger who says nothing keeps a place for ever",
        changes=(
            Change(
                file="fabric/acceptor.py",
                before="async with asyncio.timeout(self._handshake_s):",
                after="async with asyncio.timeout(None):",
            ),
        ),
        found_by=Simulation(scenario="job", num_seeds=20, fault="stranger"),
    ),
    Mutant(
        name="news of a loss are not passed on",
        breaks="a rank that the finder cannot reach goes on with one whom the others lost",
        changes=(
            Change(
                file="fabric/tcp.py",
                before="        self.lose(outcast, error, news=[(tag, reason)] if self._overlay is None else ())\n",
                after="        self.lose(outcast, error)\n",
            ),
        ),
        found_by=NamedTest(
            file="tests/simulation/test_simulation.py",
            name="test_news_of_a_loss_reach_those_whom_the_finder_cannot_reach",
        ),
        is_quick=False,
    ),
    Mutant(
        name="nobody says whose word it took",
        breaks="a rank keeps two that have lost each other, as who accused one of them is lost itself",
        changes=(
            Change(
                file="fabric/tcp.py",
                before="        tag = lost if is_believed(self.rank, lost) else on_word_of(accuser, lost)\n",
                after="        tag = lost\n",
            ),
        ),
        found_by=NamedTest(
            file="tests/simulation/test_simulation.py",
            name="test_who_was_believed_before_it_was_lost_itself_is_believed_by_all",
        ),
        is_quick=False,
    ),
    Mutant(
        name="a lost rank is believed later",
        breaks="when a rank dies, those who are left lose another on the word of one that they have lost long before",
        changes=(
            Change(
                file="members/membership.py",
                before="if known.isdisjoint(told)}\n",
                after="}\n",
            ),
        ),
        found_by=NamedTest(
            file="tests/members/test_belief.py",
            name="test_what_a_rank_told_that_is_lost_itself_is_forgotten",
        ),
    ),
    Mutant(
        name="anyone is believed",
        breaks="of two ranks that lose each other, all others lose both",
        changes=(
            Change(
                file="members/membership.py",
                before="    return accuser <= lost and all(",
                after="    return all(",
            ),
        ),
        found_by=NamedTest(
            file="tests/simulation/test_simulation.py",
            name="test_of_two_ranks_that_lose_each_other_all_lose_the_higher_one",
        ),
        is_quick=False,
    ),
    Mutant(
        name="who asked and has sent something since closes all the same",
        breaks="a message stays where it is, between two ranks that both hold their connections for idle",
        changes=(
            Change(
                file="fabric/resting.py",
                before="if self._asked.pop(peer.rank, None) == peer.num_exchanged and is_idle:",
                after="if self._asked.pop(peer.rank, None) is not None:",
            ),
        ),
        found_by=NamedTest(
            file="tests/fabric/test_resting.py",
            name="test_the_higher_asks_when_it_was_long_enough_and_closes_if_nothing_came_between",
        ),
    ),
    Mutant(
        name="what is not acknowledged may rest",
        breaks="the same, where a connection breaks while a message is with the kernel",
        changes=(
            Change(
                file="fabric/peer_transport.py",
                before="return self.is_drained and not (native.num_unacknowledged(peer) or native.num_pending(peer))",
                after="return self.is_drained and not native.num_pending(peer)",
            ),
        ),
        found_by=NamedTest(
            file="tests/fabric/test_resting.py", name="test_what_the_peer_is_not_known_to_have_keeps_connections_open"
        ),
    ),
    Mutant(
        name="who rests is given up as soon as who broke a connection",
        breaks="a rank that is held up for seconds is lost to who wakes it, though others see that it lives",
        changes=(
            Change(
                file="fabric/reopening.py",
                before="            self._lines[peer.rank, connection_class].on_answer = on_answer\n",
                after="",
            ),
        ),
        found_by=NamedTest(
            file="tests/simulation/test_simulation.py", name="test_jobs_that_failed_once_where_connections_rest"
        ),
        is_quick=False,
    ),
)
