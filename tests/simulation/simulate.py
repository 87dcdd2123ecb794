r"""Play many seeds of jobs on virtual time, and say which of them end as they should not.

    python tests/simulation/simulate.py --seeds 500 --processes 2
    python tests/simulation/simulate.py --replay 4711 --log
    python tests/simulation/simulate.py --ranks 1000 --only agreement

The code is the library's own; only time, sockets and the network are virtual (see the scenarios). Which scenario a seed
plays follows from its number. A seed that is played again gives the same log, to the last bit of its hash. Ends with 1
if a seed failed, and prints what plays it again.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import multiprocessing
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1] / "runtime"))
sys.path.append(str(Path(__file__).parents[1] / "updates/clustered"))
sys.path.append(str(Path(__file__).parents[1] / "updates/overlapped"))

import scenario_agreement
import scenario_clusters
import scenario_engine
import scenario_grants
import scenario_job
import scenario_overlapped
import scenario_partition
from scenario_agreement import AgreementScenario
from scenario_clusters import ClusterScenario
from scenario_grants import GrantScenario
from scenario_many import RACK, ManyRanks
from scenario_overlapped import OverlappedScenario
from scenario_start import StartScenario
from virtual_time import VirtualTime

SCENARIOS: dict[str, tuple[Callable[[int], VirtualTime], int]] = {
    "job": (scenario_job.play, 3),
    "partition": (scenario_partition.play, 1),
    "engine": (scenario_engine.play, 3),
    "agreement": (scenario_agreement.play, 4),
    "clusters": (scenario_clusters.play, 3),
    "overlapped": (scenario_overlapped.play, 3),
    "grants": (scenario_grants.play, 3),
}
"""Each scenario, and how many of twenty seeds play it."""
MANY_SEED = 2
MANY: dict[str, Callable[[int], VirtualTime]] = {
    "engine": lambda ranks: ManyRanks(MANY_SEED, num_ranks=ranks).run(),
    "start": lambda ranks: StartScenario(MANY_SEED, num_ranks=ranks).run(),
    "rack": lambda ranks: ManyRanks(MANY_SEED, num_ranks=ranks, num_dead=RACK).run(),
    "agreement": lambda ranks: AgreementScenario(MANY_SEED, num_ranks=ranks, fault="deaths", num_steps=1).run(),
    "clusters": lambda ranks: ClusterScenario(MANY_SEED, num_ranks=ranks).run(),
    "overlapped": lambda ranks: OverlappedScenario(MANY_SEED, num_ranks=ranks).run(),
    "grants": lambda ranks: GrantScenario(MANY_SEED, num_ranks=ranks).run(),
}
"""Each scenario that can have a thousand ranks; ``start`` is on virtual sockets, with connections to neighbours."""
_ORDER = tuple(name for name, (_, share) in SCENARIOS.items() for _ in range(share))


class Outcome(NamedTuple):
    """What became of a seed."""

    seed: int
    scenario: str
    digest: str
    num_events: int
    virtual_s: float
    error: str


def scenario_of(seed: int) -> str:
    """Return which scenario a seed plays."""
    return _ORDER[seed % len(_ORDER)]


def play(seed: int) -> Outcome:
    """Play a seed."""
    name = scenario_of(seed)
    try:
        played = SCENARIOS[name][0](seed)
    except Exception:  # whatever it is, the seed is what matters
        return Outcome(seed, name, "", 0, 0.0, traceback.format_exc())
    return Outcome(seed, name, played.digest, played.num_events, played.now_s, "")


def play_all(seeds: range, num_processes: int) -> Iterator[Outcome]:
    """Play seeds, in some order."""
    if num_processes == 1:
        yield from map(play, seeds)
        return
    gc.freeze()
    with multiprocessing.get_context("fork").Pool(num_processes) as pool:
        yield from pool.imap_unordered(play, seeds, chunksize=20)


def replay_command(seed: int) -> str:
    """Return what plays a seed again."""
    return f"python tests/simulation/simulate.py --replay {seed} --log"


def summarize(outcomes: list[Outcome], took_s: float) -> str:
    """Describe what was played."""
    played, events, hours = Counter[str](), Counter[str](), Counter[str]()
    for outcome in outcomes:
        played[outcome.scenario] += 1
        events[outcome.scenario] += outcome.num_events
        hours[outcome.scenario] += outcome.virtual_s / 3600  # type: ignore[assignment]
    digests = "".join(outcome.digest for outcome in sorted(outcomes))
    lines = [f"{'scenario':<12}{'seeds':>9}{'events':>13}{'virtual hours':>15}"]
    lines += [f"{name:<12}{played[name]:>9}{events[name]:>13}{hours[name]:>15.1f}" for name in SCENARIOS]
    failed = sum(bool(outcome.error) for outcome in outcomes)
    lines.append(f"{len(outcomes)} seeds in {took_s:.0f} s, {failed} failed")
    lines.append(f"hash of all logs: {hashlib.blake2b(digests.encode(), digest_size=16).hexdigest()}")
    return "\n".join(lines)


def simulate(seeds: range, num_processes: int) -> int:
    """Play seeds and tell how they ended."""
    begun_s = time.monotonic()
    outcomes = []
    for outcome in play_all(seeds, num_processes):
        outcomes.append(outcome)
        if outcome.error:
            print(f"seed {outcome.seed} ({outcome.scenario}) failed:\n{outcome.error}")
            print(f"again: {replay_command(outcome.seed)}", flush=True)
    print(summarize(outcomes, time.monotonic() - begun_s))
    return int(any(outcome.error for outcome in outcomes))


def replay(seed: int, *, shows_log: bool) -> int:
    """Play one seed again, and show the log if that is wanted."""
    if shows_log:
        note = VirtualTime.note

        def tell(self: VirtualTime, what: str) -> None:
            print(f"{self.now_s:12.6f} {what}")
            note(self, what)

        VirtualTime.note = tell  # type: ignore[method-assign]
    outcome = play(seed)
    print(outcome.error or f"seed {seed} ({outcome.scenario}): {outcome.num_events} events, hash {outcome.digest}")
    return int(bool(outcome.error))


def play_many(name: str, num_ranks: int) -> int:
    """Play a scenario with so many ranks, and tell what that takes."""
    begun_s = time.process_time()
    played = MANY[name](num_ranks)
    mebibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    took_s = time.process_time() - begun_s
    print(
        f"{name} with {num_ranks} ranks in one process: {took_s:.0f} s of processor time, {mebibytes} MiB, "
        f"{played.num_events} events, hash {played.digest}",
        flush=True,
    )
    return 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=500, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--replay", type=int, metavar="SEED", help="play this one only")
    parser.add_argument("--log", action="store_true", help="with --replay: show what happens")
    parser.add_argument("--ranks", type=int, metavar="NUMBER", help="play a scenario with so many ranks instead")
    parser.add_argument("--only", choices=MANY, help="with --ranks: which one, of all that can have many")
    options = parser.parse_args()
    if options.replay is not None:
        return replay(options.replay, shows_log=options.log)
    if options.ranks is not None:
        return max(play_many(name, options.ranks) for name in ([options.only] if options.only else MANY))
    return simulate(range(options.first, options.first + options.seeds), options.processes)


if __name__ == "__main__":
    sys.exit(main())
