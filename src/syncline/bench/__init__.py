"""``syncline bench``: this library and its peers, measured in the same run on the same network.

``ranks`` is what runs on the ranks and imports torch; everything else is free of it: the task that the ranks are given,
the rows that they bring back with their tables, the run itself in each order of ranks, and the record folder; and what
a comparison by time to a loss tells, whose ranks are threads.
"""
