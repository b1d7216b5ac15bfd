"""Records the frames of one interface that carry TCP or UDP as pcap, until a datagram to UDP port 9 passes.

    capture.py INTERFACE tcp|udp FILE

A plain packet socket: libpcap's ring hands packets over in blocks whose time limit cannot be relied upon. Prints
"recording" when it does, and at the end how many frames were lost."""
import socket, struct, sys, time

ETH_P_ALL, SOL_PACKET, PACKET_STATISTICS, SO_RCVBUFFORCE, PACKET_OUTGOING = 3, 263, 6, 33, 4
interface, wanted, path = sys.argv[1:]
wanted = {"tcp": socket.IPPROTO_TCP, "udp": socket.IPPROTO_UDP}[wanted]


def transport(frame):
    """Protocol and destination port of an IPv4 or IPv6 frame without extension headers."""
    kind = frame[12:14]
    if kind == b"\x08\x00":
        protocol, at = frame[23], 14 + (frame[14] & 15) * 4
    elif kind == b"\x86\xdd":
        protocol, at = frame[20], 54
    else:
        return None, None
    return protocol, int.from_bytes(frame[at + 2 : at + 4], "big")


packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(ETH_P_ALL))
packets.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 256 << 20)
packets.bind((interface, ETH_P_ALL))
with open(path, "wb") as file:
    file.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 1 << 18, 1))
    print("recording", flush=True)
    while True:
        frame, address = packets.recvfrom(1 << 18)
        # Within one host each frame passes twice, out and in.
        if interface == "lo" and address[2] == PACKET_OUTGOING:
            continue
        protocol, port = transport(frame)
        if protocol == socket.IPPROTO_UDP and port == 9:
            break
        if protocol == wanted:
            now = time.time()
            file.write(struct.pack("<IIII", int(now), int(now % 1 * 1e6), len(frame), len(frame)) + frame)
_, dropped = struct.unpack("II", packets.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
print("lost", dropped)
