"""The clustered update: groups of like machines, each behind a temporary server that is drawn anew.

`docs/mechanisms.md`, Clusters.

What is here decides without I/O, from the features of machines to the protocol of members and servers; `rule` alone
knows torch. Read `messages` first, then `server`: they are the protocol.
"""
