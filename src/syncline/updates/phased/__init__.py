"""Phased execution by two ranks: a pair trains a model of which neither could hold the parameters at once.

Mechanisms part 6. While one rank computes a stage, the other stores what it is done with and loads a later one.
"""
