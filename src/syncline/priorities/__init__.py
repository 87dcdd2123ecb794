"""Connection classes: what a user may say of them, what a step shows of them, and which bucket goes on which.

Terms (``Priorities``), the model of a forward pass that waits for parameters, the search in it, and the measurement of
steps. Who moves buckets has the tuner that joins them (:mod:`syncline.updates.class_tuner`).
"""
