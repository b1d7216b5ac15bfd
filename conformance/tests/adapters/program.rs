//! `c/adapter_peer.c` over the built library: the end of a connection that is uwarp's.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use uwarp_conformance::attacker::peer::PATIENCE;
use uwarp_conformance::dist::Dist;
use uwarp_conformance::process::{Cmd, Running};
use uwarp_conformance::{Failure, Outcome, cc, fail, require};

/// The library and the program, which is compiled once.
pub struct World {
    pub dist: Outcome<Dist>,
    pub program: Mutex<Option<Outcome<PathBuf>>>,
}

impl World {
    pub fn start(&self, arguments: &str, env: &[(&str, &str)]) -> Outcome<Program> {
        let dist = self.dist.as_ref().map_err(Failure::clone)?;
        let program = {
            let mut built = self.program.lock().unwrap_or_else(|e| e.into_inner());
            let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("adapters");
            built.get_or_insert_with(|| cc::build("adapter_peer", &dir)).clone()?
        };
        let mut cmd = Cmd::new(program).args(arguments).env("LD_LIBRARY_PATH", dist.lib()).envs(env);
        if std::env::var_os("UWARP_LOG").is_none() {
            // Warnings about bad peers are expected here.
            cmd = cmd.env("UWARP_LOG", "error");
        }
        Ok(Program { running: cmd.spawn()? })
    }
}

/// The program while it runs.
pub struct Program {
    running: Running,
}

impl Program {
    /// Where it listens.
    pub fn port(&self) -> Outcome<u16> {
        self.says("port ")?;
        let text = self.running.so_far();
        let port = text.lines().find_map(|line| line.strip_prefix("port ")?.parse().ok());
        let Some(port) = port else { fail!("no port: {text}") };
        Ok(port)
    }

    /// Waits until it has printed this.
    pub fn says(&self, what: &str) -> Outcome {
        self.running.until(PATIENCE, what, |running| running.so_far().contains(what))
    }

    pub fn is_running(&self) -> bool {
        self.running.is_running()
    }

    /// All that it has printed.
    pub fn text(&self) -> String {
        self.running.so_far()
    }

    /// What it saw, from the request to the end.
    pub fn saw(self) -> Outcome<String> {
        let output = self.running.wait()?;
        output.exited_ok()?;
        Ok(in_words(&output.stdout))
    }

    /// The same of a program that waits for what will not come.
    pub fn saw_so_far(self) -> Outcome<String> {
        std::thread::sleep(QUIET);
        require!(self.is_running(), "the program has ended: {}", self.running.so_far());
        Ok(in_words(&self.running.stop().stdout))
    }
}

/// How long nothing must happen where nothing may happen.
pub const QUIET: Duration = Duration::from_millis(150);

/// The lines as a sentence: `CONNECT_REQUEST 4/4 "text", ESTABLISHED 1/4, data good, DISCONNECTED, ERR`.
fn in_words(lines: &str) -> String {
    let words: Vec<_> = lines.lines().filter_map(line_in_words).collect();
    if words.is_empty() { "nothing".into() } else { words.join(", ") }
}

fn line_in_words(line: &str) -> Option<String> {
    let field = |name: &str| {
        let value = line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        value.unwrap_or("").to_owned()
    };
    if let Some(event) = line.strip_prefix("event ") {
        let name = event.split(' ').next().unwrap_or("");
        let mut out = name.to_owned();
        if field("status") != "0" {
            out += &format!(" (status {})", field("status"));
        }
        if matches!(name, "CONNECT_REQUEST" | "ESTABLISHED") {
            out += &format!(" {}/{}", field("ird"), field("ord"));
        }
        match field("data").as_str() {
            "" => {}
            data => out += &format!(" \"{}\"", shortened(&text_of(data))),
        }
        return Some(out);
    }
    if line.starts_with("end ") {
        let left = if field("other") == "0" { String::new() } else { format!(", {} more", field("other")) };
        return Some(format!("{}, {} flushed{left}", field("state"), field("flushed")));
    }
    (line == "data good" || line.starts_with("FAIL")).then(|| line.to_owned())
}

/// Long text by its length.
fn shortened(text: &str) -> String {
    if text.len() > 40 { format!("{} bytes", text.len()) } else { text.to_owned() }
}

/// Hexadecimal digits as the bytes' characters; zeros as dots.
fn text_of(digits: &str) -> String {
    let byte = |at: usize| u8::from_str_radix(digits.get(at..at + 2).unwrap_or("3f"), 16).unwrap_or(b'?');
    let bytes = (0..digits.len() / 2).map(|n| byte(2 * n));
    bytes.map(|b| if b.is_ascii_graphic() || b == b' ' { char::from(b) } else { '.' }).collect()
}
