"""Collectives on tensors of any type, memory order and device: the one face of fleets and process groups alike.

What the runtime moves are bytes of host memory; which, of a tensor, is decided here and nowhere else.
"""
