"""The backend for ``torch.distributed``: ``init_process_group("syncline")``, and all that runs on process groups.

Its collectives run on a communicator of the runtime, so they are planned on the topology as those of a fleet are.
"""

NAME = "syncline"
"""By which ``torch.distributed`` knows the backend."""
