//! Which link the streams of a row had: each says so in the library's log (`UWARP_LOG=info`), which goes to
//! files of ours (`UWARP_LOG_FILE`). A row that is meant for memory must not pass because its streams fell
//! back to TCP.

use std::collections::BTreeMap;
use std::fmt;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::Mutex;

use crate::{Context, Outcome, process};

/// Lines of each process that a row which failed shows.
const LAST_LINES: usize = 40;

/// Where the programs of this process log to.
pub struct Log(PathBuf);

/// The streams of both ends, by link; those over TCP by the reason that they gave.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Links {
    /// By memory of the host.
    pub memory: usize,
    /// By reliable datagrams.
    pub rd: usize,
    /// By TCP; why, and how many.
    pub tcp: BTreeMap<String, usize>,
}

impl Log {
    /// From now on all programs log there, but those that are asked for log lines on standard error.
    pub fn start() -> Outcome<Self> {
        let dir = std::env::temp_dir().join(format!("uwarp-conformance-log-{}", std::process::id()));
        std::fs::create_dir_all(&dir).context(dir.display())?;
        // Some rows are run as other users.
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o1777)).context(dir.display())?;
        let file = dir.join("%p");
        process::set_by_default(&[("UWARP_LOG", "info".into()), ("UWARP_LOG_FILE", file.into())]);
        Ok(Self(dir))
    }

    /// What was logged since the last call: the links, and the last lines of each process.
    pub fn take(&self) -> Outcome<(Links, String)> {
        // Rows run one after the other; two readers would share the lines.
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
        let (mut links, mut last) = (Links::default(), String::new());
        for entry in std::fs::read_dir(&self.0).context(self.0.display())?.flatten() {
            let text = std::fs::read_to_string(entry.path()).context(entry.path().display())?;
            let lines: Vec<_> = text.lines().inspect(|line| links.count(line)).collect();
            let from = lines.len().saturating_sub(LAST_LINES);
            last += &format!("--- log of process {}\n", entry.file_name().display());
            lines[from..].iter().for_each(|line| last.extend([line, "\n"]));
            _ = std::fs::remove_file(entry.path());
        }
        Ok((links, last))
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Links {
    fn count(&mut self, line: &str) {
        let Some((_, link)) = line.split_once(": the stream uses ") else { return };
        // Lines for developers have fields at their end.
        let link = link.split_once(" qpn=").map_or(link, |(link, _)| link);
        match link.split_once(": ").unwrap_or((link, "no memory was to be had there")) {
            ("memory", _) => self.memory += 1,
            ("TCP", why) => *self.tcp.entry(why.to_owned()).or_default() += 1,
            ("reliable datagrams", _) => self.rd += 1,
            _ => {}
        }
    }

    /// With these, too.
    pub fn add(&mut self, other: &Links) {
        self.memory += other.memory;
        self.rd += other.rd;
        for (why, count) in &other.tcp {
            *self.tcp.entry(why.clone()).or_default() += count;
        }
    }

    /// Streams over TCP.
    pub fn over_tcp(&self) -> usize {
        self.tcp.values().sum()
    }

    /// Those of them that lead to another queue pair.
    pub fn fell_back(&self) -> usize {
        let to_itself = self.tcp.get("it leads from the queue pair to itself");
        self.over_tcp() - to_itself.copied().unwrap_or_default()
    }
}

impl fmt::Display for Links {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} by memory, {} by reliable datagrams, {} by TCP",
            self.memory,
            self.rd,
            self.over_tcp()
        )?;
        self.tcp.iter().try_for_each(|(why, count)| write!(f, "\n  {count:6} by TCP: {why}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_counted() {
        let mut links = Links::default();
        for line in [
            "uwarp: qp 0xa1: the stream uses memory",
            "uwarp: qp 0xa2: the stream uses TCP",
            "uwarp: qp 0xa3: the stream uses TCP: the peer's process belongs to another user",
            "uwarp: qp 0xa4: the stream uses reliable datagrams",
            "2026-11-30T15:36:31.390621Z  INFO uwarp_driver::qp::settle: the stream uses TCP qpn=12393732",
            "uwarp: qp 0xa4: the peer ended the connection",
        ] {
            links.count(line);
        }
        assert_eq!((links.memory, links.rd, links.over_tcp()), (1, 1, 3));
        assert!(links.to_string().contains("1 by TCP: the peer's process belongs to another user"));
    }
}
