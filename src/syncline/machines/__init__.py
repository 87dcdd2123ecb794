"""What kind of machine each host is, read from the system or from the topology, and which of them are alike.

``syncline cluster`` and ``Clustered()`` use it; nothing here is public.
"""

__all__: list[str] = []
