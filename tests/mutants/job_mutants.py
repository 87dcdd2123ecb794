"""Mutants of what ranks do together: calls, sums, membership, elections, rounds, and what is stored."""

from mutant_types import Change, Mutant, NamedTest, Simulation

JOB_MUTANTS = (
    Mutant(
        name="call has no deadline",
        breaks="a rank that never makes a call is waited for without end",
        changes=(
            Change(
                file="runtime/engine.py",
                before="= self._clock.call_later(active.call.timeout_s / 2, self._time_over, active, due_s)",
                after="= None",
            ),
        ),
        found_by=Simulation(scenario="engine", num_seeds=40),
    ),
    Mutant(
        name="who leaves has told what it completed",
        breaks="a group's call waits for a rank that left the job, until the deadline",
        changes=(
            Change(
                file="runtime/engine.py",
                before="isinstance(error, PeerLeftError) and peer in self._completed_by",
                after="isinstance(error, PeerLeftError)",
            ),
        ),
        found_by=NamedTest(
            file="tests/runtime/test_group.py",
            name="test_a_call_ends_where_a_member_leaves_the_job_that_never_opened_the_group",
        ),
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
                before="if disagreement is not None:\n            self._disagree(key, disagreement)\n        elif",
                after="if",
            ),
        ),
        found_by=Simulation(scenario="job", num_seeds=20, fault="other call"),
    ),
    Mutant(
        name="additions in order of arrival",
        breaks="the sum has other bits in each run, and on each rank",
        changes=(
            Change(
                file="runtime/python_slice_executor.py",
                before="self._arrived: set[int] = set()",
                after="self._arrived: dict[int, None] = {}",
            ),
            Change(
                file="runtime/python_slice_executor.py",
                before="            self._arrived.add(number)\n",
                after="            self._arrived[number] = None\n",
            ),
            Change(
                file="runtime/python_slice_executor.py",
                before="        num_before = len(operation.before)\n"
                "        used = self._apply_before(operation, self._used.get(number, 0))\n",
                after="        num_before = 0\n        used = self._used.get(number, 0)\n",
            ),
            Change(
                file="runtime/python_slice_executor.py",
                before="if used == num_before + 1 + len(operation.after):",
                after="if used == 1 + len(operation.before) + len(operation.after):",
            ),
            Change(
                file="runtime/python_slice_executor.py",
                before="        before, after = operation.before, operation.after\n",
                after="        theirs = operation.before + operation.after\n"
                "        before, after = (), tuple(landing for landing in self._arrived if landing in theirs)\n",
            ),
        ),
        found_by=Simulation(scenario="engine", num_seeds=100),
    ),
    Mutant(
        name="a slice twice",
        breaks="one contribution counts double",
        changes=(
            Change(
                file="runtime/python_slice_executor.py",
                before="            self._call.reduction.add(own, part)\n",
                after="            self._call.reduction.add(own, part)\n" * 2,
            ),
        ),
        found_by=Simulation(scenario="engine", num_seeds=40),
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
        name="a minority goes on",
        breaks="both sides of a cut train on, and the model splits",
        changes=(
            Change(
                file="members/membership.py",
                before="        if len(living) < quorum.part * len(base) or (",
                after="        if len(living) < 0 * len(base) or (",
            ),
        ),
        found_by=Simulation(scenario="agreement", num_seeds=100),
    ),
    Mutant(
        name="quorum off by one",
        breaks="both halves of a cut go on",
        changes=(
            Change(
                file="members/membership.py",
                before="        is_tie = quorum.part >= HALF and 2 * len(living) == len(base)\n",
                after="        is_tie = quorum.part >= HALF and 2 * len(living) < len(base)\n",
            ),
        ),
        found_by=Simulation(scenario="clusters", num_seeds=200),
        is_quick=False,
    ),
    Mutant(
        name="membership forgets a loss",
        breaks="survivors never agree on who is left, or enter different epochs",
        changes=(
            Change(
                file="members/agreement.py",
                before="        self.heard.pop(rank, None)\n        return True\n",
                after="        self.losses.pop(min(self.losses))\n        return True\n",
            ),
        ),
        found_by=Simulation(scenario="agreement", num_seeds=60),
    ),
    Mutant(
        name="who says nothing agrees",
        breaks="a rank enters an epoch that the others do not know of",
        changes=(
            Change(
                file="members/agreement.py",
                before="            report is not None and report.base.number == self.base.number and",
                after="            report is None or report.base.number == self.base.number and",
            ),
        ),
        found_by=Simulation(scenario="agreement", num_seeds=60),
        is_quick=False,
    ),
    Mutant(
        name="a report does not interrupt",
        breaks="a rank that saw no loss itself waits in a call of the old epoch",
        changes=(
            Change(
                file="members/agreement.py",
                before="default=None))] if is_new else []",
                after="default=None))] if is_new is None else []",
            ),
        ),
        found_by=Simulation(scenario="agreement", num_seeds=200),
        is_quick=False,
    ),
    Mutant(
        name="a commit is not waited for",
        breaks="a rank steps on the gradients of a pass that the others make again without the lost rank",
        changes=(
            Change(
                file="updates/elastic_calls.py",
                before="        if self._call is None or not self._call.is_complete:\n",
                after="        if self._call is None:\n",
            ),
            Change(
                file="updates/elastic_calls.py",
                before="        self._call.wait_in_epoch()\n",
                after="",
            ),
        ),
        found_by=NamedTest(
            file="tests/elastic/test_commits.py",
            name="test_a_pass_that_is_not_committed_is_made_again_without_the_lost_rank",
        ),
    ),
    Mutant(
        name="a spare is not stepped",
        breaks="who takes over from a lost rank goes on with the state that it had long ago",
        changes=(
            Change(
                file="updates/shard.py",
                before="        active = [view for view in self._views if present[view.segments[0].slot.position]]\n",
                after="        owned = [view for view in self._views if not view.segments[0].is_spare]\n"
                "        active = [view for view in owned if present[view.segments[0].slot.position]]\n",
            ),
        ),
        found_by=NamedTest(
            file="tests/updates/test_shard.py",
            name="test_what_a_rank_is_the_spare_of_is_stepped_like_what_it_owns",
        ),
    ),
    Mutant(
        name="who is lost itself is heard",
        breaks="members of `Clustered` take what a server hands out without one that it has lost, and that lives",
        changes=(Change(file="updates/clustered/node.py", before="if dead <= self.view.dead:", after="if True:"),),
        found_by=NamedTest(
            file="tests/updates/clustered/test_protocol.py",
            name="test_who_loses_a_rank_below_it_is_not_heard_until_one_of_the_two_is_lost_here",
        ),
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
        is_quick=False,
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
        is_quick=False,
    ),
    Mutant(
        name="a server brings its own part",
        breaks="of what a cluster of `Clustered(within=Sharded())` has added up, the others get what its server owns",
        changes=(
            Change(
                file="updates/clustered/gradients.py",
                before="            collectives.start(bucket, Collective.ALL_GATHER, None, values=part)\n"
                "            for bucket, part in zip(self._buckets, whole.parts, strict=False)\n",
                after="",
            ),
        ),
        found_by=NamedTest(
            file="tests/updates/clustered/test_clustered_within.py",
            name="test_ranks_and_clusters_without_data_take_part_with_no_weight",
        ),
        is_quick=False,
    ),
    Mutant(
        name="a late gradient counts",
        breaks="a gradient that comes after its round was closed enters another one",
        changes=(
            Change(
                file="updates/overlapped/server.py",
                before="        is_late = push.round_number <= self.closed or not account",
                after="        is_late = not account",
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
                before="        if not is_of_period or is_late or push.worker in self._held:\n",
                after="        if not is_of_period or is_late:\n",
            ),
        ),
        found_by=Simulation(scenario="overlapped", num_seeds=200),
        is_quick=False,
    ),
    Mutant(
        name="a period ends without some",
        breaks="the average of the parameters leaves out who is slow",
        changes=(
            Change(
                file="updates/overlapped/server.py",
                before="        if not self.alive or self._lacking():\n",
                after="        if len(self._ends) < self.quorum:\n",
            ),
        ),
        found_by=Simulation(scenario="overlapped", num_seeds=100),
        is_quick=False,
    ),
    Mutant(
        name="fsync is left out",
        breaks="after a loss of power a stage that was said to be stored is not",
        changes=(
            Change(
                file="updates/phased/storage.py",
                before="        os.fsync(descriptor)\n",
                after="        os.fstat(descriptor)\n",
            ),
        ),
        found_by=NamedTest(
            file="tests/updates/phased/test_phased_storage.py",
            name="test_what_is_removed_is_gone_and_what_is_forced_to_the_disk_must_be_there",
        ),
        is_quick=False,
    ),
)
