"""Rounds: what parties have changed by themselves becomes what all have, once every so many steps.

A *party* is a rank, or ranks that average their gradients in every step. In a round each brings how far its parameters
have moved since the last one, weighted by its samples. All moves are summed on the planner's tree, so that a link
between sites carries them once in each direction, and each party gets the sum. Whole numbers are summed,
so any order, tree or replay gives the same bits.

:mod:`.moves` (one round under way), :mod:`.outer` (what the sum does to the parameters), :mod:`.local_steps` (the rule
that is made of them). The period's end of the overlapped update is such a round, too.
"""
