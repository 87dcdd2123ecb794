"""Mutants of the compiled transport and executor: each is compiled in a copy, which takes seconds to a minute."""

from mutant_types import Change, Mutant, NamedTest, Simulation

_NATIVE = "fabric/native"

NATIVE_MUTANTS = (
    Mutant(
        name="EOF is ignored",
        breaks="a rank that dies is waited for until a deadline, and its sockets keep the loop busy",
        changes=(
            Change(
                file=f"{_NATIVE}/peer_transport.cpp",
                before="        break_off(connection, broken.error);\n    } catch (const FrameError& error) {\n",
                after="        if (broken.error) break_off(connection, broken.error);\n"
                "    } catch (const FrameError& error) {\n",
            ),
        ),
        found_by=Simulation(scenario="job", num_seeds=20, fault="kill"),
        is_quick=False,
    ),
    Mutant(
        is_quick=False,
        name="checksum is ignored",
        breaks="a bit that flips on the way is added to the gradient",
        changes=(
            Change(
                file=f"{_NATIVE}/frames.hpp",
                before="    if (checks.payload_field() != header.payload_crc)\n",
                after="    if (checks.payload_field() != header.payload_crc && false)\n",
            ),
        ),
        found_by=Simulation(scenario="job", num_seeds=60, fault="flip"),
    ),
    Mutant(
        name="credit leaks",
        breaks="after a while every small message must ask first, and one day none may go",
        changes=(
            Change(
                file=f"{_NATIVE}/receiver.cpp",
                before="    header.message_bytes = static_cast<uint64_t>(returned);\n",
                after="    header.message_bytes = static_cast<uint64_t>(returned - 1);\n",
            ),
        ),
        found_by=Simulation(scenario="job", num_seeds=60),
        is_quick=False,
    ),
    Mutant(
        name="grants of a lost sender stay under way",
        breaks="the window shrinks with each loss until nobody is granted anything",
        changes=(
            Change(
                file=f"{_NATIVE}/grants.hpp",
                before="        underway_bytes -= sender.underway_bytes;\n",
                after="",
            ),
        ),
        found_by=Simulation(scenario="grants", num_seeds=200),
        is_quick=False,
    ),
    Mutant(
        name="the window is not held to",
        breaks="receivers are sent more than their links drain",
        changes=(
            Change(
                file=f"{_NATIVE}/grants.hpp",
                before="        while (underway_bytes < 2 * window_bytes()) {\n"
                "            const Choice chosen = pop(ready_, /*needs_idle=*/false);\n"
                "            if (!chosen.wish) return found;\n"
                "            if (!is_its_turn(chosen.wish->urgency)) {\n",
                after="        while (true) {\n"
                "            const Choice chosen = pop(ready_, /*needs_idle=*/false);\n"
                "            if (!chosen.wish) return found;\n"
                "            if (false) {\n",
            ),
        ),
        found_by=Simulation(scenario="grants", num_seeds=100),
        is_quick=False,
    ),
    Mutant(
        name="a grant counts twice",
        breaks="the window fills with bytes that nobody was granted, until nothing more is",
        changes=(
            Change(
                file=f"{_NATIVE}/grants.hpp",
                before="        sender.underway_bytes += amount;\n        underway_bytes += amount;\n",
                after="        sender.underway_bytes += amount;\n        underway_bytes += 2 * amount;\n",
            ),
        ),
        found_by=Simulation(scenario="grants", num_seeds=20),
        is_quick=False,
    ),
    Mutant(
        name="what arrives is counted twice",
        breaks="the window grows with each message, and more is granted than the link drains",
        changes=(
            Change(
                file=f"{_NATIVE}/receiver.cpp",
                before="    if (state_.scheduler->has_wishes()) state_.must_grant = true;\n",
                after="    state_.scheduler->arrived(peer_, frame.chunk_bytes, receive.urgency, 0.0);\n"
                "    if (state_.scheduler->has_wishes()) state_.must_grant = true;\n",
            ),
        ),
        found_by=Simulation(scenario="job", num_seeds=40, fault="none"),
        is_quick=False,
    ),
    Mutant(
        name="a chunk lands twice",
        breaks="what a broken connection brings again is written behind the end of a buffer, or refused",
        changes=(
            Change(
                file=f"{_NATIVE}/data_connection.cpp",
                before="        interrupted_ = frame_;\n",
                after="",
            ),
        ),
        found_by=Simulation(scenario="job", num_seeds=60, fault="storm"),
        is_quick=False,
    ),
    Mutant(
        name="nothing is sent again",
        breaks="a connection that was opened again goes on behind a hole",
        changes=(
            Change(
                file=f"{_NATIVE}/send_stream.cpp",
                before="    sent_ = position;\n",
                after="",
            ),
        ),
        found_by=Simulation(scenario="job", num_seeds=60, fault="reset"),
        is_quick=False,
    ),
    Mutant(
        name="what is not acknowledged is thrown away",
        breaks="a connection that breaks cannot go on: what the peer lacks is gone",
        changes=(
            Change(
                file=f"{_NATIVE}/send_stream.cpp",
                before="    start_ = std::max(start_, position);\n",
                after="    start_ = sent_;\n",
            ),
        ),
        found_by=Simulation(scenario="job", num_seeds=60, fault="storm"),
        is_quick=False,
    ),
    Mutant(
        name="half a frame is kept for the next socket",
        breaks="the first bytes of a new socket are taken for the rest of what the old one brought",
        changes=(
            Change(
                file=f"{_NATIVE}/data_connection.cpp",
                before="    num_header_bytes_ = chunk_size_ = num_chunk_bytes_ = 0;\n",
                after="    chunk_size_ = num_chunk_bytes_ = 0;\n",
            ),
        ),
        found_by=Simulation(scenario="job", num_seeds=100, fault="storm"),
        is_quick=False,
    ),
    Mutant(
        name="a short write is taken for a whole one",
        breaks="the rest of a frame is never sent",
        changes=(
            Change(
                file=f"{_NATIVE}/control_connection.cpp",
                before="        sent(static_cast<size_t>(num_bytes));\n",
                after="        sent(gathered.num_bytes);\n",
            ),
        ),
        found_by=Simulation(scenario="job", num_seeds=20, fault="crumbs"),
        is_quick=False,
    ),
    Mutant(
        name="nobody beats while the interpreter is held",
        breaks="a rank whose user's code holds the interpreter for some seconds is given up",
        changes=(
            Change(
                file=f"{_NATIVE}/heartbeat.cpp",
                before="    if (late_s >= LATE * interval_s_ && late_s <= limit_s_) beat();\n",
                after="    if (late_s >= 100 * interval_s_ && late_s <= limit_s_) beat();\n",
            ),
        ),
        found_by=Simulation(scenario="job", num_seeds=40, fault="held"),
        is_quick=False,
    ),
    Mutant(
        name="a heartbeat without progress",
        breaks="a rank that trains is taken for one that hangs",
        changes=(
            Change(
                file=f"{_NATIVE}/peer_transport.cpp",
                before="            progress = frame.tag;\n",
                after="",
            ),
        ),
        found_by=NamedTest(
            file="tests/fabric/test_heartbeat.py",
            name="test_the_last_heartbeat_is_repeated_while_nobody_serves_the_exchange",
        ),
        is_quick=False,
    ),
    Mutant(
        name="additions in another order",
        breaks="the sum has other bits than in Python, and than the schedule says",
        changes=(
            Change(
                file=f"{_NATIVE}/slice_run.cpp",
                before="used - before.size() - 1) < after.size() && states_[after[place]].has_arrived; ++used)\n"
                "        add(own, after[place], sum);\n",
                after="before.size() + after.size() - used) < after.size() &&"
                " states_[after[place]].has_arrived; ++used)\n"
                "        add(own, after[place], sum);\n",
            ),
        ),
        found_by=Simulation(scenario="job", num_seeds=200),
        is_quick=False,
    ),
    Mutant(
        name="a contribution is added twice",
        breaks="one rank's gradient counts double",
        changes=(
            Change(
                file=f"{_NATIVE}/slice_run.cpp",
                before="    release(landing);\n}\n",
                after="    if (!apply.replaces) slice_->addition(own, values, size_of(apply));\n"
                "    release(landing);\n}\n",
            ),
        ),
        found_by=Simulation(scenario="job", num_seeds=40, fault="none"),
        is_quick=False,
    ),
    Mutant(
        name="an operation does not wait for those before it",
        breaks="a range leaves before the sum in it is complete",
        changes=(
            Change(
                file=f"{_NATIVE}/slice_run.cpp",
                before="        if (!--states_[waiting].num_waits) begin(waiting);\n",
                after="        if (states_[waiting].num_waits) states_[waiting].num_waits = 0, begin(waiting);\n",
            ),
        ),
        found_by=Simulation(scenario="job", num_seeds=60, fault="none"),
        is_quick=False,
    ),
    Mutant(
        name="no slice begins when one ends",
        breaks="calls that are larger than what may be under way are never finished",
        changes=(
            Change(
                file=f"{_NATIVE}/slice_executor.cpp",
                before="    order_.ended(call, num_bytes);\n    fill();\n",
                after="    order_.ended(call, num_bytes);\n",
            ),
        ),
        found_by=Simulation(scenario="job", num_seeds=100, fault="none"),
        is_quick=False,
    ),
)
