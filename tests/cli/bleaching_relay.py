"""A hop that clears DSCP marks: hands datagrams on to HOST PORT, and the answers back, with mark 0.

Prints the port on which it listens. It stands for a router that trusts nobody; few kernels rewrite marks by themselves.
"""

import select
import socket
import sys


def main(host, port):
    front, back = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    front.bind(("0.0.0.0", 0))
    back.connect((host, port))
    print(front.getsockname()[1], flush=True)
    client = None
    while True:
        for ready in select.select([front, back], [], [])[0]:
            if ready is front:
                packet, client = front.recvfrom(2048)
                back.send(packet)
            elif client is not None:
                front.sendto(back.recv(2048), client)


main(sys.argv[1], int(sys.argv[2]))
