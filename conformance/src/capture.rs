//! Recording traffic and having tshark read it: an independent opinion on every frame we send.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::netns::NetNs;
use crate::process::{Cmd, Output, Running};
use crate::{Outcome, fail};

/// dumpcap at work on one interface.
pub struct Capture {
    running: Running,
    file: PathBuf,
}

impl Capture {
    /// Starts recording TCP on `interface` into `file` and returns once packets are seen.
    pub fn start(ns: Option<&NetNs>, interface: &str, file: &Path) -> Outcome<Capture> {
        let _ = std::fs::remove_file(file);
        let running = Cmd::line(&format!("dumpcap -i {interface} -s 0 -B 64 -f tcp -w"))
            .arg(file)
            .in_ns(ns)
            .limit(Duration::from_secs(60))
            .spawn()?;
        // dumpcap names its file once the interface is open.
        running.until(Duration::from_secs(15), "recording", |r| r.so_far().contains("File:"))?;
        Ok(Capture { running, file: file.to_owned() })
    }

    /// Ends the recording; fails when packets were lost, as nothing could be said about such a file.
    pub fn finish(self) -> Outcome<PathBuf> {
        // The kernel hands packets over in blocks; give the last one time to fill or expire.
        std::thread::sleep(Duration::from_millis(500));
        let out = self.running.stop();
        let dropped =
            out.stderr.lines().find_map(|l| l.rsplit_once("received/dropped on interface")).map(|(_, r)| r);
        match dropped.and_then(|r| r.rsplit_once(": ")?.1.split_once(' ')?.0.split_once('/')) {
            Some((_, "0")) => Ok(self.file),
            _ => out.failure("dumpcap lost packets, or did not say that it lost none"),
        }
    }
}

/// What tshark makes of a recording.
#[derive(Debug, Default)]
pub struct Decoded {
    /// MPA Request and Reply frames.
    pub mpa_setup: usize,
    /// FPDUs whose CRC32c tshark computed and found right.
    pub crc_good: usize,
    /// FPDUs by RDMAP opcode, as tshark names them: "Send", "Write", "Read Request" …
    pub opcodes: BTreeMap<String, usize>,
    /// Lines of tshark that say "malformed", "bad" or the like.
    pub complaints: Vec<String>,
}

/// Has tshark read `file` whole.
pub fn decode(file: &Path) -> Outcome<Decoded> {
    // Heuristics first: MPA has no port of its own, and other protocols claim some of the ports we use.
    let out = Cmd::line("tshark -o tcp.try_heuristic_first:TRUE -O iwarp_mpa,iwarp_ddp_rdmap -r")
        .arg(file)
        .limit(Duration::from_secs(120))
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
            *decoded.opcodes.entry(name.to_owned()).or_default() += 1;
        } else if !revision_2 && ["malformed", "bad ", "error", "(bad"].iter().any(|c| lower.contains(c)) {
            decoded.complaints.push(line.to_owned());
        }
    }
    decoded
}
