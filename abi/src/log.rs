//! Log lines go to stderr, filtered by `UWARP_LOG`.

use std::io::{self, IsTerminal, Stderr, Write};
use std::sync::Once;

use tracing_subscriber::EnvFilter;
use uwarp_driver::{Uncancelled, config};

use crate::failure::{errno, set_errno};

static STARTED: Once = Once::new();

/// Sets up logging at the first call. Nothing is done before a program calls us, and nothing in a
/// constructor.
///
/// `UWARP_LOG` is a level (`error`, `warn`, `info`, `debug`, `trace`, `off`) or a list such as
/// `warn,uwarp_cm=debug`. Without it, warnings and errors are shown. A value that is not valid is reported
/// once and otherwise ignored: a typing mistake must not stop a program.
#[inline]
pub fn init() {
    STARTED.call_once(|| {
        // A call that succeeds must leave errno as it was; the check for a terminal changes it.
        let errno = errno();
        start();
        set_errno(errno);
    });
}

/// Log lines may be written by a thread that was cancelled while it is in our frames.
struct Lines(Stderr, #[allow(dead_code, reason = "held, not used")] Uncancelled);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

fn filter(text: &str) -> Result<EnvFilter, String> {
    config::check_log_filter(text)?;
    EnvFilter::try_new(text).map_err(|error| error.to_string())
}

#[cold]
fn start() {
    let requested = std::env::var("UWARP_LOG").unwrap_or_default();
    let filter = match requested.trim() {
        "" => EnvFilter::new("warn"),
        text => filter(text).unwrap_or_else(|error| {
            eprintln!("uwarp: UWARP_LOG={text}: {error}; warnings and errors are shown");
            EnvFilter::new("warn")
        }),
    };
    // A program that links us statically may have a subscriber already; that one stays.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| Lines(std::io::stderr(), Uncancelled::begin()))
        .with_ansi(std::io::stderr().is_terminal())
        .try_init();
}

#[cfg(test)]
mod tests {
    use super::filter;

    /// Two parsers disagreed: the command refused what the library took.
    #[test]
    fn what_the_settings_allow_is_a_filter_of_the_subscriber_too() {
        for good in ["warn", "DEBUG", "off", "3", "warn,uwarp_cm=debug", "uwarp_cm", "uwarp_cm=trace,"] {
            assert!(filter(good).is_ok(), "{good}");
        }
        for bad in ["loud", "debgu", "warn,debgu", "uwarp_cm=loud", "[=debug"] {
            assert!(filter(bad).is_err(), "{bad}");
        }
    }
}
