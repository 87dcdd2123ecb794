"""Starts the ranks of one machine, watches them, and ends them together.

``job`` says what to start, ``environment`` what each rank is told, ``supervisor`` decides (no I/O), ``failure`` words
what went wrong; ``process`` and ``session`` do what the others decided, in a ``scratch`` folder of their own.
``function`` is ``syncline.launch``, the door for a notebook, and ``called`` what it starts.
"""
