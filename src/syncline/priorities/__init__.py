"""Connection classes: what a user may say of them, what a step shows of them, and which bucket goes on which.

Terms (``Priorities``), the model of a forward pass that waits for parameters, the search in it, the measurement of
steps, and the tuner that joins them. Who moves buckets gives the tuner its :class:`~syncline.priorities.tuner.Model`.
"""
