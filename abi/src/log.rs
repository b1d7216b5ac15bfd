//! Where our log lines go: stderr, filtered by `UWARP_LOG`.

use std::io::{self, IsTerminal, Stderr, Write};
use std::sync::Once;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::entry;

static STARTED: Once = Once::new();

/// Sets logging up on the first call; nothing else is done before a program calls us, least of all in a constructor.
///
/// `UWARP_LOG` is a level (`error`, `warn`, `info`, `debug`, `trace`, `off`) or a list such as
/// `warn,uwarp_cm=debug`. Without it, warnings and errors are shown. What cannot be understood is said once and
/// otherwise ignored: a typing mistake must not stop a program.
#[inline]
pub fn init() {
    STARTED.call_once(|| {
        // Asking whether stderr is a terminal must not show in a call that succeeds.
        let errno = entry::errno();
        start();
        entry::set_errno(errno);
    });
}

/// Lines may be written by a thread that was cancelled and is in the middle of our frames.
struct Lines(Stderr, #[allow(dead_code, reason = "held, not used")] entry::Uncancelled);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// A bare word that is no level would be taken for a part of the program, and everything else would fall silent.
fn understood(text: &str) -> Result<EnvFilter, String> {
    let bare = text.split(',').map(str::trim).filter(|part| !part.is_empty() && !part.contains(['=', '[']));
    for part in bare.filter(|part| !part.starts_with("uwarp")) {
        part.parse::<LevelFilter>().map_err(|_| format!("{part} names no level"))?;
    }
    EnvFilter::try_new(text).map_err(|error| error.to_string())
}

#[cold]
fn start() {
    let wanted = std::env::var("UWARP_LOG").unwrap_or_default();
    let filter = match wanted.trim() {
        "" => EnvFilter::new("warn"),
        text => understood(text).unwrap_or_else(|error| {
            eprintln!("uwarp: UWARP_LOG={text}: {error}; showing warnings");
            EnvFilter::new("warn")
        }),
    };
    // Someone who links us statically may have a subscriber already; theirs stays.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| Lines(std::io::stderr(), entry::Uncancelled::begin()))
        .with_ansi(std::io::stderr().is_terminal())
        .try_init();
}

#[cfg(test)]
mod tests {
    use super::understood;

    #[test]
    fn a_misspelt_level_is_told_and_does_not_silence_warnings() {
        for good in ["warn", "DEBUG", "off", "warn,uwarp_cm=debug", "uwarp_cm", "uwarp_cm=trace,"] {
            assert!(understood(good).is_ok(), "{good}");
        }
        for bad in ["loud", "debgu", "warn,debgu", "uwarp_cm=loud"] {
            assert!(understood(bad).is_err(), "{bad}");
        }
    }
}
