"""What the rules that talk past the collectives have in common: messages, drivers of state machines, and threads.

A rule of this kind decides in a pure state machine. :mod:`.mailbox` moves its messages, :mod:`.driver` tells it what
happens and does what it says, :mod:`.worker_thread` keeps what is slow off both other threads.
"""
