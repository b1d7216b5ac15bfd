"""Makes sockets where it runs, as whoever it runs, and hands them to its parent, which says every byte.

A socket belongs to the user and the network namespace of the process that made it, whoever uses it later.
Standard input is a Unix socket: a line comes, and one byte with a descriptor goes back, or an error in words.

    bind ADDRESS PORT       a UDP socket there, and a listening TCP socket (two descriptors)
    connect ADDRESS PORT    a TCP connection to there
"""

import array
import socket
import sys
import time

parent = socket.socket(fileno=0)


def family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def bind(address, port):
    udp = socket.socket(family(address), socket.SOCK_DGRAM)
    tcp = socket.socket(family(address), socket.SOCK_STREAM)
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    udp.bind((address, port))
    tcp.bind((address, udp.getsockname()[1]))
    tcp.listen(128)
    return [udp, tcp]


def connect(address, port):
    return [socket.create_connection((address, port), 60)]


def answer(line):
    call, address, port = line.split()
    deadline = time.monotonic() + 60
    while True:
        try:
            return {"bind": bind, "connect": connect}[call](address, int(port))
        except OSError as error:
            # The port's last owner may have connections that the system still closes.
            if time.monotonic() > deadline or call != "bind":
                parent.sendall(f"{error}\n".encode())
                return None
            time.sleep(0.02)


def main():
    for line in parent.makefile("r"):
        sockets = answer(line)
        if sockets:
            for made in sockets:
                made.setblocking(True)
            descriptors = array.array("i", [made.fileno() for made in sockets])
            parent.sendmsg([b"+"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
            for made in sockets:
                made.close()


if __name__ == "__main__":
    sys.exit(main())
