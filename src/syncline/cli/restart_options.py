"""The options of `syncline run` that say what becomes of a job when ranks are lost, and how others join it.

Annotations are evaluated here, not kept as text: classes in other modules inherit these fields.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import typer

from syncline.cli.launcher.elasticity import Elasticity
from syncline.cli.launcher.restarts import RestartLimits
from syncline.cli.launcher.supervisor import Limits
from syncline.errors import ConfigurationError

PERIOD_S = RestartLimits().period_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartOptions:
    """What was said of losses."""

    keep_going: Annotated[
        bool,
        typer.Option("--keep-going", help="If a rank fails, let the others go on, as Clustered and Overlapped can."),
    ] = False
    restarts: Annotated[
        int, typer.Option("--restarts", metavar="N", help="Start again what died, this often in the period.")
    ] = 0
    restart_period: Annotated[
        float, typer.Option("--restart-period", metavar="S", help="After so many seconds a restart is forgotten.")
    ] = PERIOD_S
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Let the job go on without lost ranks; a restarted one joins it again.")
    ] = False
    min_ranks: Annotated[
        int | None,
        typer.Option("--min-ranks", metavar="N", help="With --elastic: stop with fewer.", show_default=False),
    ] = None
    join: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Join a running elastic job, at any of its ranks.", show_default=False),
    ] = None
    join_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT", help="With --elastic: where a machine's first rank lets others in.", show_default=False
        ),
    ] = None

    def limits(self) -> Limits:
        """Return how long survivors of a failure may go on, as long as the job is not elastic."""
        return Limits(grace_s=math.inf) if self.keep_going else Limits()

    def restart_limits(self) -> RestartLimits:
        """Return how often what died is started again."""
        return RestartLimits(count=self.restarts, period_s=self.restart_period)

    def elasticity(self) -> Elasticity | None:
        """Return what was said of an elastic job; None if it is none."""
        is_elastic = self.elastic or self.join is not None
        for name, value in (("--min-ranks", self.min_ranks), ("--join-port", self.join_port)):
            if value is not None and not is_elastic:
                raise ConfigurationError(f"{name} {value} is said of an elastic job; add --elastic")
        if not is_elastic:
            return None
        min_ranks = 1 if self.min_ranks is None else self.min_ranks
        return Elasticity(min_ranks=min_ranks, join=self.join, join_port=self.join_port)
