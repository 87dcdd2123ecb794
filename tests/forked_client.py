"""Stands for `python`: lets the nursery whose folder this file is in fork what is to run, and ends as that ends.

It is copied there, with a first line that names an interpreter, and loads little, so that a start takes milliseconds.
Under the name FORKING what runs forks the Python programs that it starts, too.
"""

# ruff: noqa: PTH100, PTH109, PTH118, PTH119, PTH120 - pathlib takes longer to load than all the rest

import array
import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
NAMESPACES = ("net", "mnt")
FORKING = "forking-python"


def send(connection, program, files):
    """Send a program with the files that are to be its standard streams, and its namespaces, if they are others."""
    text = json.dumps(program).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
    connection.sendmsg([len(text).to_bytes(4, "big")], rights)
    connection.sendall(text)


def main():
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "socket"))
    program = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "forks": os.path.basename(sys.argv[0]) == FORKING,
        "finalizes": False,
        "has_namespaces": True,
    }
    own = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    for number in FORWARDED:
        signal.signal(number, lambda number, _: connection.send(bytes([number])))
    send(connection, program, [0, 1, 2, *own])
    status = int(connection.recv(16) or b"1")
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
