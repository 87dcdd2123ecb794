"""A rank that joins its job without a topology, and says what it found."""

import sys

import syncline

with syncline.init(sys.argv[1], insecure=True) as fleet:
    print(repr(fleet.topology.to_yaml()), flush=True)
