"""The virtual machine of conformance/siw for scripts/peers: its image, its life, and measurements in it."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
SIW = f"{ROOT}/conformance/siw"
GUEST, HOST = "10.77.0.2", "10.77.0.1"
NAMESPACE = f"peers{os.getpid()}"
# Of the machine; it is ended with the measurements.
LIFE = 6 * 3600
# What the guest needs of uwarp.
LIBRARIES = ("libuwarp.so", "libibverbs.so", "libibverbs.so.1", "librdmacm.so", "librdmacm.so.1")
PARTS = ("bin/uwarp", *(f"lib/uwarp/{name}" for name in LIBRARIES))
IN_GUEST = "/root/dist"
FIRST_PORT, LAST_PORT = 21000, 29000
TOOLS = ("ib_send_lat", "ib_atomic_lat", "ib_write_bw", "qperf", "sockperf", "cmtime", "rping", "rdma", "ss")


class Trouble(Exception):
    """What the user has to know, as one sentence."""


class Failed(Exception):
    """Why one measurement has no figure."""


def work_directory():
    return os.environ.get("SIWLAB_WORK") or os.path.expanduser("~/.cache/siwlab")


def build_image(say):
    """Builds the guest's image unless the script that would do so has made it."""
    script, built = f"{SIW}/build-initramfs.sh", f"{work_directory()}/built-by"
    with open(script, "rb") as one:
        wanted = one.read()
    if os.path.exists(built):
        with open(built, "rb") as other:
            if other.read() == wanted:
                return
    say(f"building the guest in {work_directory()}; once, about a minute")
    done = subprocess.run([script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800)
    if done.returncode:
        raise Trouble(f"{script} failed:\n{done.stdout[-3000:]}")


def last_words(text):
    """The line of a failed program's output that says most."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" -\t")]
    # perftest's warning about the processor's frequency comes with every run in an emulated machine.
    of_perftest = ("Correlation coefficient", "Conflicting CPU", "CPU freq")
    lines = [line for line in lines if not line.startswith(of_perftest)]
    own = [line for line in lines if line.startswith("uwarp:")]
    errors = [line for line in lines
              if re.search(r"rror|ail|nable|annot|efused|ejected|too|nexpected|not ", line)]
    found = (own or errors or lines)[-1:]
    # Without the number, so that two runs say the same.
    return re.sub(r"\bqp 0x[0-9a-f]+: ", "", found[0])[:240] if found else ""


class Lab:
    """A booted guest, with uwarp in it and both kernel drivers loaded."""

    def __init__(self, dist, processors):
        self.dist, self.processors = dist, processors
        self.port = FIRST_PORT
        self.device = None
        self.work = f"{work_directory()}/vm-{NAMESPACE}"
        self.at_host = f"{self.work}/cell"

    def __enter__(self):
        try:
            self.boot()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def script(self, *words, limit, check=True):
        """run-vm.sh in our namespace."""
        try:
            done = finished([f"{SIW}/run-vm.sh", "--ns", NAMESPACE, *words], limit)
        except subprocess.TimeoutExpired:
            raise Trouble(f"run-vm.sh {words[0]} took more than {limit} s") from None
        if check and done.returncode:
            raise Trouble(f"run-vm.sh {' '.join(words)[:200]} failed with status {done.returncode}:\n"
                          f"{(done.stdout + done.stderr)[-2000:]}")
        return done

    def boot(self):
        self.script("-c", str(self.processors), "-t", str(LIFE), "--start", limit=400)
        self.device = "siw"
        lacks = self.guest(f"for t in {' '.join(TOOLS)}; do command -v $t >/dev/null || echo $t; done")
        lacks = lacks.split()
        if lacks:
            raise Trouble(f"the guest's image lacks {', '.join(lacks)}: install the package, remove "
                          f"{work_directory()}/built-by and try again")
        self.guest("modprobe crc32_generic && modprobe rdma_rxe")
        self.put(["-C", self.dist, *PARTS], IN_GUEST)
        self.put(["-C", SIW, "cell.sh"], "/root")

    def close(self):
        # A server that an interruption has left on the host.
        with contextlib.suppress(OSError, ValueError):
            with open(f"{self.at_host}/server.pid", encoding="utf-8") as file:
                server = int(file.read())
            if not os.path.exists(f"{self.at_host}/server.rc"):
                os.kill(server, signal.SIGTERM)
        self.script("--down", limit=60, check=False)
        shutil.rmtree(self.work, ignore_errors=True)

    def guest(self, command, limit=60):
        return self.script("-t", str(limit), "--exec", f"({command})", limit=limit + 20).stdout

    def put(self, words, to):
        """Copies what tar packs into a directory of the guest."""
        port = self.next_port()
        receive = f"nc -l -p {port} | tar -C {to} -xf -; echo $? >/tmp/put.rc"
        self.guest(f"mkdir -p {to}; rm -f /tmp/put.rc; sh -c '{receive}' </dev/null >/dev/null 2>&1 &")
        pack = subprocess.Popen(["tar", "-cf", "-", *words], stdout=subprocess.PIPE)
        send = "for n in $(seq 50); do exec 3<>/dev/tcp/$0/$1 && break; sleep 0.1; done 2>/dev/null; cat >&3"
        sent = subprocess.run(["ip", "netns", "exec", NAMESPACE, "bash", "-c", send, GUEST, str(port)],
                              stdin=pack.stdout, timeout=120)
        pack.stdout.close()
        if pack.wait() or sent.returncode:
            raise Trouble(f"cannot copy {' '.join(words)} into the guest")
        self.guest("n=0; until [ -e /tmp/put.rc ] || [ $n = 600 ]; do sleep 0.1; n=$((n+1)); done; "
                   "[ \"$(cat /tmp/put.rc)\" = 0 ]", limit=90)

    def next_port(self):
        """Not the one of a moment ago, which a connection may still hold."""
        self.port = self.port + 7 if self.port + 7 < LAST_PORT else FIRST_PORT
        return self.port

    def use(self, device):
        """Only one of the two drivers has a device: rdma_cm chooses it by address."""
        if device in ("siw", "rxe") and device != self.device:
            old = f"rdma link del {self.device}0 && " if self.device else ""
            self.device = None
            self.guest(f"{old} rdma link add {device}0 type {device} netdev eth0 && {{ n=0; "
                       "until rdma link | grep -q ACTIVE || [ $n = 50 ]; do sleep 0.1; n=$((n+1)); done; }")
            self.device = device

    def both_in_guest(self, cell, limit):
        return self.steps("guest", "serve connect end" if cell["SERVER"] else "connect", cell, limit)

    def between(self, client_at, cell, limit):
        """The server at one side of the wire, the client at the other, a check at the server's if wanted."""
        server_at = "host" if client_at == "guest" else "guest"
        parts = self.steps(server_at, "serve", cell, limit)
        if ("server", "mute") not in parts:
            check = None
            if watch := cell.get("SERVER_CHECK"):
                check = subprocess.Popen(["ip", "netns", "exec", NAMESPACE, *watch.split()], text=True,
                                         stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            try:
                parts.update(self.steps(client_at, "connect", cell, limit))
            finally:
                if check:
                    check.terminate()
                    parts["link", "out"] = check.communicate()[0]
            parts.update(self.steps(server_at, "end", cell, limit))
        return parts

    def steps(self, where, steps, cell, limit):
        """Runs steps of cell.sh; their output by name and part."""
        words = {"LIMIT": str(limit), **cell}
        # A server that does not listen takes the limit, then its end; the client the limit again.
        patience = 3 * limit + 40
        if where == "guest":
            given = " ".join(f"{name}={quoted(value)}" for name, value in words.items())
            out = self.script("-t", str(patience), "--exec", f"({given} sh /root/cell.sh {steps})",
                              limit=patience + 20, check=False).stdout
        else:
            try:
                out = finished(["ip", "netns", "exec", NAMESPACE, "env", f"CELL_DIR={self.at_host}",
                                *(f"{name}={value}" for name, value in words.items()),
                                "sh", f"{SIW}/cell.sh", *steps.split()], patience).stdout
            except subprocess.TimeoutExpired:
                raise Failed("the host's end did not end") from None
        return parsed(out)


def finished(words, limit):
    """Runs a command to its end, and ends all of its processes if it takes too long or we are interrupted."""
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, errors="replace", start_new_session=True) as child:
        try:
            out, err = child.communicate(timeout=limit)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            raise
    return subprocess.CompletedProcess(words, child.returncode, out, err)


def quoted(text):
    return "'" + text.replace("'", "'\\''") + "'"


def parsed(out):
    parts, at = {}, None
    for line in out.splitlines(keepends=True):
        if match := re.match(r"@@ (\w+) (\w+)$", line):
            at = match.groups()
            parts[at] = ""
        elif at:
            parts[at] += line
    return parts


class Moment:
    """What a step of cell.sh printed by `now`."""

    def __init__(self, text):
        lines = [*text.split("\n"), "", ""]
        self.uptime = float(lines[0].split()[0])
        # user, nice, system, idle, iowait, irq, softirq, steal: hundredths of a second
        ticks = [int(word) for word in lines[1].split()[1:9]]
        self.busy = (sum(ticks[:3]) + sum(ticks[5:7])) / 100
        # After the name in brackets: user and system time are fields 14 and 15 of all.
        fields = lines[2].rsplit(") ", 1)[-1].split()
        self.check = sum(map(int, fields[11:13])) / 100 if ") " in lines[2] else 0


def reason(parts, limit):
    """Why a client or its server has failed, or None."""
    if ("server", "mute") in parts:
        said = last_words(parts.get(("server", "err"), "") + parts.get(("server", "out"), ""))
        return "the server does not listen" + (f": {said}" if said else "")
    if ("client", "rc") not in parts:
        return "the machine did not answer"
    status = parts["client", "rc"].strip()
    if status == "0":
        return None
    said = last_words(parts["client", "out"] + "\n" + parts["client", "err"])
    server = last_words(parts.get(("server", "err"), ""))
    # The server's own word, where it has one: "uwarp: posted work waits for the peer's first message".
    said = server if server.startswith("uwarp:") and not said.startswith("uwarp:") else said or server
    # 124 is coreutils' timeout, 143 busybox's.
    what = f"not done in {limit} s" if status in ("124", "143") else f"exit status {status}"
    return what + (f": {said}" if said else "")


def link_of(parts, row, wanted):
    """Asserts by what `uwarp stat --json --watch` printed that this row ran on the wanted link."""
    used, pairs_seen, unused = 0, {}, {}
    for line in parts.get(("link", "out"), "").splitlines():
        try:
            report = json.loads(line)
        except ValueError:
            # The last one is cut off where the check was ended.
            continue
        for process in report["processes"]:
            # The kernel keeps fifteen characters of a name.
            if process.get("command", "")[:15] == row.program[:15]:
                # Without a link: it has ended, and the line before this one had it.
                pairs = [pair for pair in process.get("queue_pairs", [])
                         if messages(pair) and (pair.get("link") or pair["service"] == "UD")]
                used = max(used, len(pairs))
                # Its last word: the first datagrams go by UDP, until the other end has memory, too.
                pairs_seen.update(((process["pid"], pair["qpn"]), carrier(pair)) for pair in pairs)
                unused.update(carrier(pair) for pair in process.get("queue_pairs", []) if pair.get("link"))
    links = dict(pairs_seen.values())
    if not row.pairs:
        # It makes connections and sends nothing. The passive end has its link with the first byte.
        used, links = 0, {wanted: None} if wanted in unused and wanted != "tcp" else unused
    if used < row.pairs or not links:
        raise Failed(f"uwarp stat did not see {row.program}'s connection in use")
    allowed = {wanted, "udp"} if row.udp and wanted == "tcp" else {wanted}
    if not set(links) <= allowed:
        why = next((why for why in links.values() if why), None)
        raise Failed(f"ran over {' and '.join(sorted(links))}, not {wanted}" + (f": {why}" if why else ""))
    return "udp" if row.udp and wanted == "tcp" else wanted


def carrier(pair):
    """The link of a queue pair, and why it is TCP."""
    if pair["service"] != "UD":
        return pair["link"], pair.get("why_tcp")
    by_memory = [peer for peer in pair.get("peers", []) if peer["link"] == "memory"]
    # Both directions of this port; nearly all of them, where memory carries it.
    carried = sum(peer["sent"] + peer["received"] for peer in by_memory)
    return "memory" if carried > messages(pair) / 2 else "udp", None


def messages(pair):
    return sum(kind["messages"] for way in ("sent", "received") for kind in pair.get(way, {}).values())


def versions(lab):
    """What it was run on."""
    def first(*words):
        try:
            done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                                  timeout=30)
        except OSError:
            return ""
        return done.stdout.split("\n", 1)[0].strip()
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "uwarp": first(f"{lab.dist}/bin/uwarp", "--version").removeprefix("uwarp "),
        "processor": (models or ["unknown"])[0], "processors": os.cpu_count(), "kernel": os.uname().release,
        "qemu": re.sub(r".*version (\S+).*", r"\1", first("qemu-system-x86_64", "--version")),
        "guest_kernel": lab.guest("uname -r").strip(),
        **{name: first("dpkg-query", "-W", "-f", "${Version}", name)
           for name in ("perftest", "qperf", "sockperf")},
        "date": time.strftime("%Y-%m-%d"),
    }
