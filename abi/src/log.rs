//! Where our log lines go: stderr, filtered by `UWARP_LOG`.

use std::io::IsTerminal;
use std::sync::Once;

use tracing_subscriber::EnvFilter;

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

#[cold]
fn start() {
    let wanted = std::env::var("UWARP_LOG").unwrap_or_default();
    let filter = match wanted.trim() {
        "" => EnvFilter::new("warn"),
        text => EnvFilter::try_new(text).unwrap_or_else(|error| {
            eprintln!("uwarp: UWARP_LOG={text}: {error}; showing warnings");
            EnvFilter::new("warn")
        }),
    };
    // Someone who links us statically may have a subscriber already; theirs stays.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .try_init();
}
