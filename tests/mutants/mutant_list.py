"""The mutants: one fault each that others' systems had, or ours might have, and what must find it.

A mutant is a change of the library's own text. What finds it is a scenario of `tests/simulation` with the seeds that it
is given, or a test by its name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of one file of the library: ``before`` stands in it exactly once."""

    file: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Seeds of a scenario, one of which must fail; ``scenario`` is the module's name without `scenario_`."""

    scenario: str
    num_seeds: int
    first: int = 0

    def __str__(self) -> str:
        return f"simulation `{self.scenario}`"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTest:
    """A test that must fail."""

    file: str
    name: str

    def __str__(self) -> str:
        return f"`{self.file}::{self.name}`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One mutant; with ``is_quick``, every run of the tests tries it."""

    name: str
    breaks: str
    changes: tuple[Change, ...]
    found_by: Simulation | NamedTest
    is_quick: bool = True


_HANDSHAKES = "tests/fabric/test_handshake.py"

MUTANTS = (
    Mutant(
        name="EOF is ignored",
        breaks="a rank that dies is waited for until a deadline, and its sockets keep the loop busy",
        changes=(
            Change(
                file="fabric/control_connection.py",
                before="        if not num_bytes:\n            raise EOFError\n",
                after="        if not num_bytes:\n            return\n",
            ),
            Change(
                file="fabric/data_connection.py",
                before="            if not num_bytes:\n                raise EOFError\n",
                after="            if not num_bytes:\n                return\n",
            ),
        ),
        found_by=Simulation(scenario="job", num_seeds=60),
    ),
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
        name="CRC is not checked",
        breaks="a bit that flips on the way is added to the gradient",
        changes=(
            Change(
                file="fabric/frames.py",
                before="    if checks.payload_field(rest) != frame.payload_crc:\n",
                after="    if checks.payload_field(rest) < 0:\n",
            ),
        ),
        found_by=Simulation(scenario="job", num_seeds=400),
    ),
    Mutant(
        name="epoch is not checked",
        breaks="a process of an earlier start of the job is let in",
        changes=(
            Change(
                file="fabric/handshake.py", before="elif epoch != terms.epoch:", after="elif epoch == terms.epoch + 1 << 70:"
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
                before="self._reply = body + _mac(terms.key, b\"S\", hello, body)",
                after="self._reply = body + _mac(terms.key, b\"S\", hello, body)\n        self._hello = b\"\"",
            ),
            Change(
                file="fabric/handshake.py",
                before="_mac(self._terms.key, b\"C\", self._hello, self._reply)):",
                after="_mac(self._terms.key, b\"C\")):",
            ),
            Change(
                file="fabric/handshake.py",
                before="_mac(self._terms.key, b\"C\", self._hello, reply))\n",
                after="_mac(self._terms.key, b\"C\"))\n",
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
                before="        if not hmac.compare_digest(mac, _mac(self._terms.key, b\"C\", self._hello, self._reply)):\n",
                after="        if not mac:\n",
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
        found_by=Simulation(scenario="job", num_seeds=120),
    ),
    Mutant(
        name="call has no deadline",
        breaks="a rank that never makes a call is waited for without end",
        changes=(
            Change(
                file="runtime/engine.py",
                before="active.timer = self._clock.call_later(active.call.timeout_s / 2, self._time_over, active, due_s)",
                after="active.timer = None",
            ),
        ),
        found_by=Simulation(scenario="engine", num_seeds=40),
    ),
    Mutant(
        name="failure is not told",
        breaks="who does not need the lost rank itself waits for those who gave up",
        changes=(
            Change(
                file="runtime/engine.py",
                before="            self._tell_all(control.encode_failure(failure))\n",
                after="            pass\n",
            ),
        ),
        found_by=Simulation(scenario="engine", num_seeds=100),
    ),
    Mutant(
        name="calls are not compared",
        breaks="ranks that call different things go on, or wait for each other",
        changes=(
            Change(
                file="runtime/engine.py",
                before="        if disagreement is not None:\n            self._disagree(key, disagreement)\n        elif",
                after="        if",
            ),
        ),
        found_by=Simulation(scenario="job", num_seeds=100),
    ),
    Mutant(
        name="additions in order of arrival",
        breaks="the sum has other bits in each run, and on each rank",
        changes=(
            Change(
                file="runtime/slicerun.py",
                before="self._arrived: set[int] = set()",
                after="self._arrived: dict[int, None] = {}",
            ),
            Change(
                file="runtime/slicerun.py",
                before="            self._arrived.add(number)\n",
                after="            self._arrived[number] = None\n",
            ),
            Change(
                file="runtime/slicerun.py",
                before="        num_before = len(operation.before)\n"
                "        used = self._apply_before(operation, self._used.get(number, 0))\n",
                after="        num_before = 0\n        used = self._used.get(number, 0)\n",
            ),
            Change(
                file="runtime/slicerun.py",
                before="if used == num_before + 1 + len(operation.after):",
                after="if used == 1 + len(operation.before) + len(operation.after):",
            ),
            Change(
                file="runtime/slicerun.py",
                before="        before, after = operation.before, operation.after\n",
                after="        theirs = operation.before + operation.after\n"
                "        before, after = (), tuple(landing for landing in self._arrived if landing in theirs)\n",
            ),
        ),
        found_by=Simulation(scenario="job", num_seeds=100),
    ),
    Mutant(
        name="a slice twice",
        breaks="one contribution counts double",
        changes=(
            Change(
                file="runtime/slicerun.py",
                before="            self._call.reduction.add(own, part)\n",
                after="            self._call.reduction.add(own, part)\n            self._call.reduction.add(own, part)\n",
            ),
        ),
        found_by=Simulation(scenario="job", num_seeds=40),
    ),
    Mutant(
        name="a send does not wait for what it sends",
        breaks="a range leaves before the sum in it is complete",
        changes=(
            Change(
                file="runtime/dataflow.py",
                before="self._writers(send.first, send.last), kind=Kind.SEND",
                after="set(), kind=Kind.SEND",
            ),
        ),
        found_by=Simulation(scenario="engine", num_seeds=40),
    ),
    Mutant(
        name="credit leaks",
        breaks="after a while every small message must ask first, and one day none may go",
        changes=(
            Change(
                file="fabric/inbox.py",
                before="            self._links.send_control(FrameType.CREDIT, message_bytes=returned)\n",
                after="            self._links.send_control(FrameType.CREDIT, message_bytes=returned - 1)\n",
            ),
        ),
        found_by=Simulation(scenario="job", num_seeds=60),
    ),
    Mutant(
        name="grants of a lost sender stay under way",
        breaks="the window shrinks with each loss until nobody is granted anything",
        changes=(
            Change(
                file="fabric/grants.py",
                before="        self.underway_bytes -= sender.underway_bytes\n",
                after="",
            ),
        ),
        found_by=Simulation(scenario="grants", num_seeds=200),
    ),
    Mutant(
        name="the window is not held to",
        breaks="receivers are sent more than their links drain",
        changes=(
            Change(
                file="fabric/grants.py",
                before="            if not self._is_its_turn(wish.urgency):\n"
                "                self._offer(peer, sender)\n                break\n",
                after="",
            ),
            Change(
                file="fabric/grants.py",
                before="        while self.underway_bytes < 2 * self.window_bytes:\n"
                "            chosen = self._pop(self._ready, needs_idle=False)\n",
                after="        while True:\n            chosen = self._pop(self._ready, needs_idle=False)\n",
            ),
        ),
        found_by=Simulation(scenario="grants", num_seeds=100),
    ),
    Mutant(
        name="news of a loss are not passed on",
        breaks="a rank that the finder cannot reach goes on with one whom the others lost",
        changes=(
            Change(
                file="fabric/tcp.py",
                before="            for hearer in self._living():  # whom the peer may not reach\n"
                "                hearer.send_frame(FrameType.LOST, tag=lost, payload=_cut(reason))\n",
                after="",
            ),
        ),
        found_by=NamedTest(
            file="tests/simulation/test_simulation.py",
            name="test_news_of_a_loss_reach_those_whom_the_finder_cannot_reach",
        ),
    ),
    Mutant(
        name="anyone is believed",
        breaks="of two ranks that lose each other, all others lose both",
        changes=(
            Change(file="fabric/tcp.py", before="        elif peer.rank > lost:\n", after="        elif peer.rank == lost:\n"),
        ),
        found_by=Simulation(scenario="partition", num_seeds=60),
    ),
    Mutant(
        name="a minority goes on",
        breaks="both sides of a cut train on, and the model splits",
        changes=(
            Change(
                file="updates/membership.py",
                before="        if len(living) >= quorum.part * len(base) and (",
                after="        if len(living) >= 0 * len(base) and (",
            ),
        ),
        found_by=Simulation(scenario="agreement", num_seeds=100),
    ),
    Mutant(
        name="quorum off by one",
        breaks="both halves of a cut go on",
        changes=(
            Change(
                file="updates/membership.py",
                before="        is_tie = quorum.part >= HALF and 2 * len(living) == len(base)\n",
                after="        is_tie = quorum.part >= HALF and 2 * len(living) < len(base)\n",
            ),
        ),
        found_by=Simulation(scenario="clusters", num_seeds=200),
    ),
    Mutant(
        name="membership forgets a loss",
        breaks="survivors never agree on who is left, or enter different epochs",
        changes=(
            Change(
                file="elastic/agreement.py",
                before="            self.losses[rank] = loss\n            self.heard.pop(rank, None)\n            return True\n",
                after="            self.losses[rank] = loss\n            self.losses.pop(min(self.losses))\n            return True\n",
            ),
        ),
        found_by=Simulation(scenario="agreement", num_seeds=60),
    ),
    Mutant(
        name="who says nothing agrees",
        breaks="a rank enters an epoch that the others do not know of",
        changes=(
            Change(
                file="elastic/agreement.py",
                before="            report is not None and report.base.number == self.base.number and",
                after="            report is None or report.base.number == self.base.number and",
            ),
        ),
        found_by=Simulation(scenario="agreement", num_seeds=60),
    ),
    Mutant(
        name="a report does not interrupt",
        breaks="a rank that saw no loss itself waits in a call of the old epoch",
        changes=(
            Change(
                file="elastic/agreement.py",
                before="        if not self.is_resting and not self.is_over and is_new:\n",
                after="        if not self.is_resting and not self.is_over and not is_new:\n",
            ),
        ),
        found_by=Simulation(scenario="agreement", num_seeds=200),
    ),
    Mutant(
        name="two servers in a term",
        breaks="a record has two values: members of one cluster hold different means",
        changes=(
            Change(
                file="updates/clustered/server.py",
                before="        if any(rank not in self._positions for rank in live):\n"
                "            self.state = ServerState.OPENING\n            return\n",
                after="        if not self._positions:\n            return\n        for rank in live:\n"
                "            self._positions.setdefault(rank, -1)\n",
            ),
        ),
        found_by=Simulation(scenario="clusters", num_seeds=200),
    ),
    Mutant(
        name="messages of old terms are applied",
        breaks="a server whose time is over takes contributions",
        changes=(
            Change(
                file="updates/clustered/node.py",
                before="        if not self.member.oldest_term <= term <= self.term + 1 or",
                after="        if not term <= self.term + 1 or",
            ),
        ),
        found_by=NamedTest(
            file="tests/updates/clustered/test_protocol.py", name="test_messages_of_old_terms_are_refused"
        ),
    ),
    Mutant(
        name="a late gradient counts",
        breaks="a gradient that comes after its round was closed enters another one",
        changes=(
            Change(
                file="updates/overlapped/server.py",
                before="        if push.round_number <= self.closed:\n            self._late[push.worker] += 1\n"
                "            return dropped\n"
                "        contribution = Contribution(worker=push.worker, weight=push.weight, "
                "iteration=push.iteration, place=push.place)\n"
                "        self._held.setdefault(push.round_number, {})[push.worker] = contribution\n",
                after="        contribution = Contribution(worker=push.worker, weight=push.weight, "
                "iteration=push.iteration, place=push.place)\n"
                "        self._held.setdefault(max(push.round_number, self.closed + 1), {})[push.worker] = contribution\n",
            ),
        ),
        found_by=Simulation(scenario="overlapped", num_seeds=200),
    ),
    Mutant(
        name="a gradient twice",
        breaks="a push that arrives again is counted again",
        changes=(
            Change(
                file="updates/overlapped/server.py",
                before="        if push.period != self.period or not account.may_push(push.round_number):\n",
                after="        if push.period != self.period:\n",
            ),
        ),
        found_by=Simulation(scenario="overlapped", num_seeds=200),
    ),
    Mutant(
        name="a period ends without some",
        breaks="the average of the parameters leaves out who is slow",
        changes=(
            Change(
                file="updates/overlapped/server.py",
                before="        if not ended or any(worker not in ended for worker in self.alive):\n",
                after="        if len(ended) < self.quorum:\n",
            ),
        ),
        found_by=Simulation(scenario="overlapped", num_seeds=100),
    ),
    Mutant(
        name="fsync is left out",
        breaks="after a loss of power a stage that was said to be stored is not",
        changes=(
            Change(
                file="updates/phased/storage.py",
                before="                    os.fsync(descriptor)\n",
                after="                    os.fstat(descriptor)\n",
            ),
        ),
        found_by=NamedTest(
            file="tests/updates/phased/test_phased_storage.py",
            name="test_what_is_removed_is_gone_and_what_is_forced_to_the_disk_must_be_there",
        ),
    ),
)
