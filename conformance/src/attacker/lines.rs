//! A program that is told what to do in lines, and answers in lines.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::{Context, Outcome, fail};

/// A process with lines in and lines out. Dropping it kills it.
#[derive(Debug)]
pub struct LineProcess {
    name: &'static str,
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
    /// Lines that were read before they were expected.
    pub(super) early: VecDeque<String>,
}

impl LineProcess {
    /// Starts it. It logs errors only, unless the caller's environment says otherwise.
    pub fn start(name: &'static str, mut command: Command) -> Outcome<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        if std::env::var_os("UWARP_LOG").is_none() {
            // Warnings about bad peers are expected here.
            command.env("UWARP_LOG", "error");
        }
        let mut child = command.spawn().context(command.get_program().display())?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            fail!("no pipes")
        };
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self { name, child, stdin, lines, early: VecDeque::new() })
    }

    /// One line to it.
    pub fn send_line(&mut self, line: &str) -> Outcome {
        // In one piece, so that the process reads several lines together.
        match self.stdin.write_all(format!("{line}\n").as_bytes()) {
            Ok(()) => Ok(()),
            Err(_) => fail!("{}", self.exit_report()),
        }
    }

    fn next(&mut self, start: &str, limit: Duration) -> Outcome<String> {
        match self.lines.recv_timeout(limit) {
            Ok(line) if line.starts_with("FAIL") || line.starts_with("stray") => {
                fail!("{} says: {line}", self.name)
            }
            Ok(line) => Ok(line),
            Err(RecvTimeoutError::Timeout) => {
                fail!("{} did not print \"{start}\" within its time", self.name)
            }
            Err(RecvTimeoutError::Disconnected) => fail!("{}", self.exit_report()),
        }
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills it, and waits until it is gone.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Forgets what it has said so far.
    pub fn forget(&mut self) {
        self.early.clear();
        while self.lines.try_recv().is_ok() {}
    }

    fn exit_report(&mut self) -> String {
        // Its output has ended, so it is about to end itself, or has.
        for _ in 0..100 {
            match self.child.try_wait() {
                Ok(Some(status)) => return format!("{} has ended: {status}", self.name),
                _ => std::thread::sleep(Duration::from_millis(10)),
            }
        }
        format!("{} closed its output and still runs", self.name)
    }

    /// Whether it says this within this time. Other lines that come until then are dropped.
    pub fn says(&mut self, wanted: &str, time: Duration) -> Outcome<bool> {
        let deadline = Instant::now() + time;
        if self.early.drain(..).any(|line| line == wanted) {
            return Ok(true);
        }
        while let Ok(line) = self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            if line.starts_with("FAIL") {
                fail!("{} says: {line}", self.name);
            }
            if line == wanted {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The next line that begins with `start`; others are kept.
    pub fn expect(&mut self, start: &str, limit: Duration) -> Outcome<String> {
        if let Some(at) = self.early.iter().position(|line| line.starts_with(start)) {
            return Ok(self.early.remove(at).unwrap_or_default());
        }
        let deadline = Instant::now() + limit;
        loop {
            let line = self.next(start, deadline.saturating_duration_since(Instant::now()))?;
            if line.starts_with(start) {
                return Ok(line);
            }
            self.early.push_back(line);
        }
    }
}

impl Drop for LineProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
