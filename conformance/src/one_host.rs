//! Two ends on one host: rping's, the link that `uwarp stat` shows, and the tree where other users can
//! read it.

use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::dist::Dist;
use crate::process::{Cmd, Running};
use crate::{Context, Outcome, fail};

/// Longest a test waits for what has to come; reached only when it fails.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A program over the library of this tree and over this link.
pub fn over(dist: &Dist, cmd: Cmd, link: &str) -> Cmd {
    cmd.env("LD_LIBRARY_PATH", dist.lib()).env("UWARP_LINK", link).limit(PATIENCE)
}

/// Serves for ever.
pub fn server(port: u16) -> Cmd {
    Cmd::line(&format!("rping -s -P -S 1000 -a 127.0.0.1 -p {port}"))
}

/// Sends and reads this often, and compares.
pub fn client(port: u16, count: u32) -> Cmd {
    Cmd::line(&format!("rping -c -v -V -S 1000 -C {count} -a 127.0.0.1 -p {port}"))
}

/// Sends and reads until it is stopped, and compares.
pub fn endless(port: u16) -> Cmd {
    Cmd::line(&format!("rping -c -V -S 1000 -a 127.0.0.1 -p {port}"))
}

/// The number of the program: of the processes that were started one by the other, the last one's.
pub fn last_of(process: &Running) -> String {
    let mut last = process.pid().as_raw_nonzero().to_string();
    while let Some(child) = std::fs::read_to_string(format!("/proc/{last}/task/{last}/children"))
        .ok()
        .and_then(|children| Some(children.split_whitespace().next()?.to_owned()))
    {
        last = child;
    }
    last
}

/// What `uwarp stat` says of a program's stream that moves bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// `memory` or `tcp`.
    pub kind: String,
    /// Why it is TCP; empty if it is not, or if TCP is what it should be.
    pub why: String,
    /// What it has sent by Sends.
    pub bytes: u64,
}

/// The link of a program's stream that has sent more than this, as this user's `uwarp stat` shows it. `None`:
/// the program has ended.
pub fn link_of(dist: &Dist, user: u32, process: &Running, more_than: u64) -> Outcome<Option<Link>> {
    let uwarp = dist.uwarp()?;
    let start = Instant::now();
    loop {
        let stat = Cmd::new(&uwarp).args("stat --json --pid").arg(last_of(process));
        let stat = if user == 0 { stat } else { stat.as_user(user) };
        let document: Value = serde_json::from_str(&stat.run()?.stdout).unwrap_or_default();
        let pairs = document["processes"][0]["queue_pairs"].as_array().cloned().unwrap_or_default();
        let sent = |pair: &Value| pair["sent"]["send"]["bytes"].as_u64().unwrap_or_default();
        let moves = |pair: &&Value| pair["link"].is_string() && sent(pair) > more_than;
        if let Some(pair) = pairs.iter().find(moves) {
            let text = |name: &str| pair[name].as_str().unwrap_or_default().to_owned();
            return Ok(Some(Link { kind: text("link"), why: text("why_tcp"), bytes: sent(pair) }));
        }
        if !process.is_running() {
            return Ok(None);
        }
        if start.elapsed() > PATIENCE {
            fail!("no stream of process {}\n{document}\n{}", last_of(process), process.so_far());
        }
        sleep(Duration::from_millis(10));
    }
}

/// A copy of a tree that every user can read; it is removed with this value.
pub struct Readable(PathBuf);

impl Readable {
    /// Of its library and its command.
    pub fn new(dist: &Dist, name: &str) -> Outcome<Self> {
        let to = Path::new("/tmp").join(format!("uwarp-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&to);
        let copy = Self(to);
        std::fs::create_dir(copy.root()).context(copy.root().display())?;
        let command = dist.uwarp()?;
        let Some(root) = command.ancestors().nth(2) else { fail!("nothing above {}", command.display()) };
        let from = [root.join("bin"), root.join("lib")];
        from.iter().fold(Cmd::line("cp -RP"), |cp, from| cp.arg(from)).arg(copy.root()).run_ok()?;
        Cmd::line("chmod -R a+rX").arg(copy.root()).run_ok()?;
        Ok(copy)
    }

    /// The directory.
    pub fn root(&self) -> &Path {
        &self.0
    }

    /// The copy as a tree.
    pub fn dist(&self) -> Outcome<Dist> {
        Dist::at(&self.0)
    }
}

impl Drop for Readable {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
