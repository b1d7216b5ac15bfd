"""What scripts/peers measures: the rows, the columns, and for each pair of them the commands."""

import json
import re
from dataclasses import dataclass, field

from peers_lab import GUEST, HOST, IN_GUEST, Failed, last_words

MIB = 1 << 20
WATCH = "bin/uwarp stat --json --watch 0.3"


@dataclass
class Figure:
    """What one run has measured."""
    median: float
    p99: float | None = None
    # Messages, round trips or connections, and seconds for each of them.
    operations: float | None = None
    each: float | None = None


@dataclass
class Column:
    name: str
    title: str
    # siw, rxe, uwarp, spins, blocks
    kind: str
    # Before the program: `uwarp run ...`, or nothing.
    run: str = ""
    link: str = ""
    # Between host and guest: where the client runs, and who is its server.
    client_at: str = ""
    server_kind: str = ""


def uwarp_column(name, title, options, link):
    return Column(name, title, "uwarp", f"{IN_GUEST}/bin/uwarp run {options} --", link)


IN_ONE_GUEST = [
    Column("spins", "raw, spins", "spins"),
    Column("blocks", "raw, blocks", "blocks"),
    Column("siw", "siw", "siw"),
    Column("rxe", "rxe", "rxe"),
    uwarp_column("tcp-crc", "uwarp, TCP with CRC", "--link tcp", "tcp"),
    uwarp_column("tcp", "uwarp, TCP", "--link tcp --crc off", "tcp"),
    uwarp_column("rd", "uwarp, rd", "--link rd --crc off", "rd"),
    uwarp_column("memory", "uwarp, memory", "--link memory", "memory"),
]


def across(dist):
    """Between host and guest. perftest at uwarp's end must take it for iWARP, as it does siw."""
    def run(at, options):
        return f"{dist if at == 'host' else IN_GUEST}/bin/uwarp run --as iwarp {options} --"

    def column(name, title, client_at, client, server, options):
        return Column(name, title, client, run(client_at, options), "tcp", client_at, server)
    return [
        Column("spins", "raw, spins", "spins", client_at="host", server_kind="spins"),
        Column("blocks", "raw, blocks", "blocks", client_at="host", server_kind="blocks"),
        column("to-siw-crc", "uwarp to siw, CRC", "host", "uwarp", "siw", ""),
        column("to-siw", "uwarp to siw", "host", "uwarp", "siw", "--crc off"),
        column("from-siw-crc", "siw to uwarp, CRC", "guest", "siw", "uwarp", ""),
        column("from-siw", "siw to uwarp", "guest", "siw", "uwarp", "--crc off"),
        column("to-uwarp-crc", "uwarp to uwarp, CRC", "host", "uwarp", "uwarp", ""),
        column("to-uwarp", "uwarp to uwarp", "host", "uwarp", "uwarp", "--crc off"),
    ]


@dataclass
class Row:
    name: str
    title: str
    unit: str
    # The commands of both ends: "{p}" port, "{a}" the server's address, "{n}" number.
    server: str
    client: str
    read: callable = field(repr=False)
    # For a first short run, and at most.
    first: int = 100
    least: int = 0
    most: int = 200_000
    step: int = 1
    # By kind of column: (server, client, how to read) of raw sockets.
    raw: dict = field(default_factory=dict)
    # Kinds that cannot, and why.
    cannot: dict = field(default_factory=dict)
    udp: bool = False
    # Of each end, in use: perftest with -R has one connection more.
    pairs: int = 1

    @property
    def program(self):
        return self.client.split()[0]

    @property
    def less_is_better(self):
        return self.unit == "µs"


# perftest

def numbers(out):
    """The one line of figures."""
    lines = [line.split() for line in out.splitlines() if re.match(r"\s*\d+\s+\d+\s+[\d.]+\s", line)]
    if not lines:
        raise Failed(f"no line of figures in its output: {last_words(out)}")
    return [float(word) for word in lines[-1]]


def latency(trips):
    """t_typical and the 99th percentile; a message takes `trips` of them until the next one."""
    def read(out, _n, _seconds):
        _, count, _, _, typical, _, _, p99, *_ = numbers(out)
        return Figure(typical, p99, count, typical * trips / 1e6)
    return read


def bandwidth(out, _n, _seconds):
    size, count, _, average, millions, *_ = numbers(out)
    # Each has its decimals where the other has none.
    rate = average * MIB if average >= 1 else millions * 1e6 * size
    if not rate:
        raise Failed("perftest says 0 MB/s")
    return Figure(rate / 1e6, None, count, size / rate)


def perftest(name, title, unit, program, words, read, raw=None, **more):
    line = f"{program} -R -F -p {{p}} {words} -n {{n}}"
    return Row(name, title, unit, line, f"{line} {{a}}", read, raw=raw or {}, pairs=2, **more)


# Raw sockets. sockperf's ends spin with --nonblocked.

def percentiles(trips):
    def read(out, _n, _seconds):
        def percentile(which):
            found = re.search(rf"percentile {which} = *([\d.]+)", out)
            if not found:
                raise Failed("no percentiles in sockperf's output")
            return float(found[1])
        median = percentile(r"50\.000")
        return Figure(median, percentile(r"99\.000"), None, median * trips / 1e6)
    return read


def sockperf(tcp, whole_trip=False):
    words = ("--tcp " if tcp else "") + "-i {a} -p {p}"
    client = f"sockperf ping-pong {words} -m 64 -t {{t}}" + (" --full-rtt" if whole_trip else "")
    read = percentiles(1 if whole_trip else 2)
    return {kind: (f"sockperf server {words}{spin}", client + spin, read)
            for kind, spin in (("spins", " --nonblocked"), ("blocks", ""))}


# With -uu qperf always writes these.
QPERF_UNITS = {"ns": 1e-3, "us": 1.0, "bytes/sec": 1.0}


def value(name, out):
    found = re.search(rf"^\s*{name}\s*=\s*([\d.,e+]+) (\S+)", out, re.M)
    if not found or found[2] not in QPERF_UNITS:
        raise Failed(f"no {name} in qperf's output, or in another unit")
    return float(found[1].replace(",", "")) * QPERF_UNITS[found[2]]


def qperf_latency(out, _n, _seconds):
    half = value("latency", out)
    return Figure(half, None, None, 2 * half / 1e6)


def qperf_rate(size):
    def read(out, _n, _seconds):
        rate = value("bw", out)
        return Figure(rate / 1e6, None, None, size / rate if rate else None)
    return read


def qperf(test, words, read):
    return ("qperf -lp {p}", f"qperf -lp {{p}} -uu -t {{t}} {words} {{a}} {test}", read)


def stream(size):
    return {"blocks": qperf("tcp_bw", f"-m {size}", qperf_rate(size))}


def of_bench(out, _n, _seconds):
    """The raw side of uwarp bench connections: in whichever way is best for it."""
    return Figure(json.loads(out)["figures"][0]["raw"]["median"])


RAW_CONNECTIONS = {"blocks": ("", f"{IN_GUEST}/bin/uwarp bench connections --json --quick --seconds 0.2 "
                                  "--rounds 1 --only connect-one", of_bench)}


def steps_of_cmtime(out, n, _seconds):
    """From rdma_create_id to RDMA_CM_EVENT_ESTABLISHED: all connections take each step at once."""
    steps = dict(re.findall(r"^([a-z ]+?) *: +([\d.]+)", out, re.M))
    wanted = ("create id", "resolve addr", "resolve route", "create qp", "connect")
    if any(step not in steps for step in wanted):
        raise Failed("cmtime did not print all of its steps")
    total = sum(float(steps[step]) for step in wanted) / 1e3
    return Figure(n / total, None, n, total / n)


def by_the_clock(_out, n, seconds):
    return Figure(seconds / n * 1e6, None, n, seconds / n)


NO_UD = {"siw": "no UD"}
NO_ATOMICS = {"siw": "no atomics"}

ROWS = [
    perftest("send", "64 B Send", "µs", "ib_send_lat", "-s 64", latency(2), sockperf(True)),
    perftest("write", "64 B Write", "µs", "ib_write_lat", "-s 64", latency(2), sockperf(True)),
    perftest("read", "64 B Read", "µs", "ib_read_lat", "-s 64", latency(1), sockperf(True, whole_trip=True)),
    perftest("atomic", "fetch-and-add", "µs", "ib_atomic_lat", "-A FETCH_AND_ADD", latency(1),
             sockperf(True, whole_trip=True), cannot=NO_ATOMICS),
    perftest("ud", "64 B UD Send", "µs", "ib_send_lat", "-c UD -s 64", latency(2), sockperf(False),
             cannot=NO_UD, udp=True),
    perftest("events", "64 B Send, events (`-e`)", "µs", "ib_send_lat", "-s 64 -e", latency(2),
             {"blocks": sockperf(True)["blocks"]}),
    perftest("write-4k", "4 KiB Writes", "MB/s", "ib_write_bw", "-s 4096", bandwidth, stream(4096),
             first=200),
    perftest("write-64k", "64 KiB Writes", "MB/s", "ib_write_bw", "-s 65536", bandwidth, stream(65536),
             first=20),
    perftest("write-1m", "1 MiB Writes", "MB/s", "ib_write_bw", "-s 1048576", bandwidth, stream(1048576),
             first=5),
    perftest("read-64k", "64 KiB Reads", "MB/s", "ib_read_bw", "-s 65536", bandwidth, stream(65536),
             first=20),
    perftest("small", "64 B Writes of `ib_write_bw`", "MB/s", "ib_write_bw", "-s 64", bandwidth, stream(64),
             first=1000),
    perftest("lists", "64 B Writes in lists of 64 (`-l 64`)", "MB/s", "ib_write_bw", "-s 64 -l 64 -Q 64",
             bandwidth, first=1280, step=64),
    Row("qperf", "64 B, `qperf rc_lat`", "µs", "qperf -lp {p}",
        "qperf -lp {p} -cm 1 -uu -t {t} -m 64 {a} rc_lat", qperf_latency,
        raw={"blocks": qperf("tcp_lat", "-m 64", qperf_latency)}, first=0),
    Row("qperf-bw", "64 KiB, `qperf rc_bw`", "MB/s", "qperf -lp {p}",
        "qperf -lp {p} -cm 1 -uu -t {t} -m 65536 {a} rc_bw", qperf_rate(65536), raw=stream(65536), first=0),
    Row("rping", "a round of `rping`", "µs", "rping -s -a {a} -p {p} -C {n} -S 64",
        "rping -c -a {a} -p {p} -C {n} -S 64", by_the_clock, first=100, least=1000, most=20_000),
    Row("connections", "connections (`cmtime`)", "a second", "cmtime -p {p} -c {n}",
        "cmtime -s {a} -p {p} -c {n}", steps_of_cmtime, raw=RAW_CONNECTIONS, first=0, least=200, most=200,
        pairs=0),
]


def cell(row, column, between, port, n, seconds, dist, check=True):
    """The commands of one measurement, for Lab."""
    address = HOST if between and column.client_at == "guest" else GUEST
    server, client = row.server, row.client
    ready = f"rdma res show cm_id | grep -qE ':{port}( |$)'"
    raw = column.kind in ("spins", "blocks")
    seen = "ss -lun" if raw and row.udp else "ss -ltn"
    server_kind = column.server_kind or column.kind
    looks = ""
    if raw:
        server, client, _ = row.raw[column.kind]
    if raw or server_kind == "uwarp" or server.startswith("qperf"):
        ready = f"{seen} | grep -q ':{port} '"
    if server_kind == "uwarp":
        server = f"{end(column, server_kind, False, dist)} {server}"
    if column.kind == "uwarp":
        client = f"{end(column, column.kind, True, dist)} {client}"
    more = {}
    # uwarp's own view, where an end is it; the kernel's otherwise.
    if check and not raw:
        if column.kind == "uwarp":
            looks = f"exec {dist if column.client_at == 'host' else IN_GUEST}/{WATCH}"
        elif server_kind == "uwarp":
            more = {"SERVER_CHECK": f"{dist}/{WATCH}"}
        else:
            looks = f"until rdma res show qp | grep '{device_line(column, row)}'; do sleep 0.1; done"
    words = {"p": port, "a": address, "n": n, "t": max(1, round(seconds))}
    return {"SERVER": server.format(**words), "CLIENT": client.format(**words), "READY": ready,
            "CHECK": looks, **more}


def device_line(column, row):
    """What `rdma res show qp` has of this program's queue pairs: fifteen characters of its name."""
    return f"link {column.kind}0.* comm {row.program[:15]}"


def end(column, kind, client, dist):
    """`uwarp run ...` for one end of this column."""
    if not column.client_at:
        return column.run
    at = column.client_at if client else ("guest" if column.client_at == "host" else "host")
    options = column.run.split(" run ", 1)[1]
    return f"{dist if at == 'host' else IN_GUEST}/bin/uwarp run {options}"
