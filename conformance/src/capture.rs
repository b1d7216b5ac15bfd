//! Records traffic and lets tshark decode it: an independent check of every frame that uwarp sends.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::netns::NetNs;
use crate::process::{Cmd, Output, Running};
use crate::{Context as _, Outcome, fail};

/// What is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// TCP only.
    Tcp,
    /// UDP only.
    Udp,
}

/// A recorder at work on one interface.
pub struct Capture {
    running: Running,
    file: PathBuf,
    marker: Cmd,
}

impl Capture {
    /// Starts recording on `interface` into `file` and returns once it does. Packets to `beyond`, an address
    /// at the other end (or on `lo`), must pass the interface.
    pub fn start(
        ns: Option<&NetNs>,
        interface: &str,
        transport: Transport,
        beyond: &str,
        file: &Path,
    ) -> Outcome<Capture> {
        let transport = match transport {
            Transport::Tcp => "tcp",
            Transport::Udp => "udp",
        };
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/capture.py");
        let recorder = Cmd::new("python3").arg(script).arg(interface).arg(transport).arg(file).in_ns(ns);
        let running = recorder.limit(Duration::from_secs(600)).spawn()?;
        running.until(Duration::from_secs(120), "recording", |r| r.so_far().contains("recording"))?;
        let marker = Cmd::new("bash").arg("-c").arg(format!("echo >/dev/udp/{beyond}/9")).in_ns(ns);
        Ok(Capture { running, file: file.to_owned(), marker })
    }

    /// Ends the recording; fails when packets were lost, because such a file proves nothing.
    pub fn finish(self) -> Outcome<PathBuf> {
        // The recording ends at this packet, so it has all packets before it.
        self.marker.run_ok()?;
        let out = self.running.wait()?;
        out.exited_ok()?;
        if out.stdout.contains("lost 0") { Ok(self.file) } else { out.failure("packets were lost") }
    }
}

/// tshark's decoding of a recording.
#[derive(Debug, Default)]
pub struct Decoded {
    /// MPA Request and Reply frames.
    pub mpa_setup: usize,
    /// FPDUs whose CRC32c tshark computed and found right.
    pub crc_good: usize,
    /// FPDUs by RDMAP opcode, as tshark names them: "Send", "Write", "Read Request" …
    pub opcodes: BTreeMap<String, usize>,
    /// Terminates by layer or kind of error, and code, as tshark names them: "RDMA layer: Invalid STag" …
    pub terminates: BTreeMap<String, usize>,
    /// Lines of tshark that say "malformed", "bad" or the like.
    pub complaints: Vec<String>,
}

/// Lets tshark decode all of `file`.
pub fn decode(file: &Path) -> Outcome<Decoded> {
    // Heuristics first: MPA has no port of its own, and other protocols claim some of the ports we use. But
    // no heuristics for the payload of a Send: perftest's memory is neither RPC nor SMB. A packet that a busy
    // machine loses is sent again, out of order.
    let out = Cmd::line("tshark -o tcp.try_heuristic_first:TRUE -o tcp.reassemble_out_of_order:TRUE")
        .args("--disable-protocol rpcordma --disable-protocol smb_direct -O iwarp_mpa,iwarp_ddp_rdmap -r")
        .arg(file)
        .limit(Duration::from_secs(300))
        .run_ok()?;
    let decoded = read_tshark(&out);
    if decoded.mpa_setup == 0 {
        fail!("tshark found no MPA frame in {}\n{}", file.display(), out.text());
    }
    Ok(decoded)
}

fn read_tshark(out: &Output) -> Decoded {
    let mut decoded = Decoded::default();
    for line in out.stdout.lines().map(str::trim) {
        let lower = line.to_lowercase();
        // These two expert notes stand for MPA revision 2: tshark's dissector knows revision 1 only.
        let revision_2 = line.contains("NOT set to zero as required by RFC 5044")
            || line.contains("NOT set to one as required by RFC 5044");
        if line.starts_with("Request frame header") || line.starts_with("Reply frame header") {
            decoded.mpa_setup += 1;
        } else if lower.contains("(good crc32)") {
            decoded.crc_good += 1;
        } else if let Some((_, name)) = line.split_once("OpCode: ") {
            let name = name.split(" (").next().unwrap_or(name);
            // The operation of an Atomic Request has the same name as the opcode of a segment.
            if ["FetchAdd", "CmpSwap"].contains(&name) {
                continue;
            }
            *decoded.opcodes.entry(name.to_owned()).or_default() += 1;
        } else if let Some(error) = line.strip_prefix("Error Code for ") {
            let error = error.split(" (").next().unwrap_or(error);
            *decoded.terminates.entry(error.to_owned()).or_default() += 1;
        } else if line.contains("= Error Types for ") {
            // Says less than the code does.
        } else if !revision_2 && ["malformed", "bad ", "error", "(bad"].iter().any(|c| lower.contains(c)) {
            decoded.complaints.push(line.to_owned());
        }
    }
    decoded
}

/// A UDP datagram between two ports of 127.0.0.1.
#[derive(Debug, Clone)]
pub struct Udp {
    /// Port of the sender.
    pub from: u16,
    /// Port of the receiver.
    pub to: u16,
    /// What it carries.
    pub payload: Vec<u8>,
}

/// Writes datagrams into a file as a recorder would have.
pub fn write_udp(file: &Path, datagrams: &[Udp]) -> Outcome {
    /// LINKTYPE_RAW: packets begin with their IP header.
    const RAW_IP: u32 = 101;
    const IPV4_LEN: usize = 20;
    const UDP_LEN: usize = 8;
    let mut bytes = Vec::new();
    for word in [0xA1B2_C3D4, 4 << 16 | 2, 0, 0, 65_535, RAW_IP] {
        bytes.extend(u32::to_le_bytes(word));
    }
    for udp in datagrams {
        let Ok(len) = u16::try_from(IPV4_LEN + UDP_LEN + udp.payload.len()) else {
            fail!("{} bytes do not fit into a UDP datagram", udp.payload.len())
        };
        for word in [0, 0, u32::from(len), u32::from(len)] {
            bytes.extend(u32::to_le_bytes(word));
        }
        // No checksums: tshark does not look at IPv4's, and UDP's may be 0.
        let [high, low] = len.to_be_bytes();
        bytes.extend([0x45, 0, high, low, 0, 0, 0x40, 0, 64, 17, 0, 0, 127, 0, 0, 1, 127, 0, 0, 1]);
        for half in [udp.from, udp.to, len - IPV4_LEN as u16, 0] {
            bytes.extend(half.to_be_bytes());
        }
        bytes.extend(&udp.payload);
    }
    std::fs::write(file, bytes).context(file.display())
}
