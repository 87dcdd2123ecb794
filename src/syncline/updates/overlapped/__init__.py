"""The overlapped update: step on the own gradient at once, fold in the global one when it comes.

`docs/mechanisms.md`, Overlapped update.

A bucket has one *server shard*. N workers push gradients to it; the first M for a round make a global gradient, which
all workers pull. Buckets know nothing of each other; what follows is the life of one of them within a period.

**Rounds.** Global gradients are numbered 1, 2, ... within a period: G(1), G(2), ... A worker that pushes a gradient
says for which round; its rounds only rise. Where the network keeps up with the workers, round j *is* iteration j. Where
it does not, a worker never waits and never queues: while a push is still on its way, the gradients of further
iterations are added together and make up the next push, so a push is the sum over a *run* of iterations, most often a
run of one. A worker that is behind skips the rounds that it knows to be closed: its next push is for the first round
that may still be open, so that its data counts. This cannot starve a round: whoever pushes for round j either pushed
for j - 1 or knows that j - 1 is closed, so wherever M workers pushed for j, j - 1 closes too.

**What the server sends** is cumulative: C(j) = G(1) + ... + G(j), with j = ``closed``, where

    G(k) = sum over the M workers in k of  weight * push  /  sum of their weights     (weight: samples of an iteration)

and, to each worker, which of *its own* pushes are in (``accepted``: the latest round in which it was among the M). It
needs no list of everybody: a worker subtracts nothing but its own. A round that can no longer find M workers (some are
dead, have ended their period, or wait) is *abandoned*: it counts as closed, and nobody is in. So ``closed`` never
skips, and one number says what C holds.

**Who waits** for ``max_staleness`` in one bucket pushes nothing in any, and with M < N two workers can wait for each
other: each has a push out in one bucket for a round in which only the other is missing, whose push for the round before
came late, or who has left it out. Servers hear who waits from the questions that are asked in a long wait, and do not
count on them, until they push again. With M = N there is no such pair: the later of the two to make its last step had
been told of all that the other had pushed before.

**What a worker does** with C(j), when it last used C(i), i < j: its own pushes for rounds i < k <= j are now *settled*,
and the others are not touched.

    rule "swap":      C(j) - C(i)  -  sum of its settled pushes that are in     is added to the gradient of this step

A settled push that is not in was late or abandoned: its worker stepped on it, nobody else did, and nothing is
subtracted. Thus at every moment, whatever was skipped, dropped or overtaken,

    all that a worker has fed to its optimizer  =  C(used)  +  its own gradients that are not in C(used)

and every gradient enters once. That line is the invariant which the tests check in every reachable state.

Several rounds that come at once are fed as one gradient. A round that stands for a run of r iterations is fed in r
equal parts: the sum is the same, but Adam sees gradients of the size it is used to. (On scikit-learn's digits sorted by
label, simulated, 8 workers, 256 iterations of which a round takes 8 or 32, one seed: loss .81 and 1.32 in parts, 1.16
and 1.66 at once, 1.91 without any exchange but the averages.)

**What is bounded.** A worker has one push out until it is settled; meanwhile the next run grows. So the server holds at
most one push of each worker, for the one round that is open. C is one buffer, and one reply for each worker is under
way. Late pushes are dropped on arrival.

**The clock.** Each push carries its worker's iteration, each reply the lowest iteration of the M that closed its round.
A worker's iteration number never lags behind that clock: one that is slow leaves numbers out. So a worker uses G(j)
only when j <= i, all reach the period's last iteration together, each having done as many iterations as it could, and
the average at the end is weighted by the samples that each really used. With M = N no number is ever left out.

**A period ends** when each worker that lives has sent its parameters. The server adds them in rank order in float64
and sends everyone the same bytes. Then rounds and sums begin anew, and what still arrives for the old period is
dropped. Where every rank is a worker and every global gradient needs all of them, the parameters do not pass through
servers but are summed on the planner's tree (:mod:`.server_client`); a worker then only tells the servers
that it *stops*, and the first message of a new period begins that. Towards the end a worker makes no pushes that could
not come back in time.

**Sites.** A *site* is what the first switch that divides the network parts from the rest. Where every global gradient
needs all workers that live, and periods end on the tree, a site of several ranks that does not hold a bucket's server
has a *relay*: one of its ranks, to which its workers push in place of the server. When all of them have pushed for the
open round, the relay sends the server one push: their weighted mean, the sum of their weights, the lowest of their
iterations. Its answer comes once, and the relay hands it on. So the link between sites carries a global gradient once
in each direction, however many ranks are on its sides. All of a site were in a round, or none, so ``accepted`` is the
same for all; sums are grouped by sites, and a mean travels in the bucket's own number type, rounded once more. What a
relay cannot complete, since one of its workers has stopped before that round, it abandons at once: nobody can close
that round without this site. It tells the server that the site stops when the last round that it can bring is closed;
until then others of the site wait for the server's answers. A worker's pushes that are dropped count where they lay: at
the relay, or at the server for all who are in the mean. With M < N a relay could not know which of its late workers a
round will not wait for, so each pushes by itself.

**Losses.** A worker that dies is not waited for. If it was a server too, the next living rank in a circle takes over
its shards. What lay at the dead server is forgotten, so own gradients that were out stay steps of their workers; until
the period ends they may differ by what only some of them had pulled. The first loss of a fleet whose periods end on the
tree lets all buckets begin anew, and ends its relays: from then on all push to servers. The successor first hears from
every worker which period it is in, and with which parameters that began, since one may have received the last average
and another not.

Modules, from decisions to threads: :mod:`.server`, :mod:`.relay`, :mod:`.worker` (no I/O, no torch);
:mod:`.placement`; :mod:`.link` (both ends of a bucket at work), :mod:`.server_client` (one rank, a driver as
:mod:`syncline.updates.messaging` has them, and a period's end on the tree); :mod:`.rebase`; :mod:`.rule` (what the
user writes).
"""
