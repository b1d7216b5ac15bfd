//! Log lines go to stderr, filtered by `UWARP_LOG`.

use std::cell::Cell;
use std::fmt::{self, Write as _};
use std::io::{self, IsTerminal, Write};
use std::sync::Once;

use tracing::field::{Field, Visit};
use tracing::subscriber::Interest;
use tracing::{Event, Metadata, Subscriber, span};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;
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

/// Log lines may be written by a thread that was cancelled while it is in our frames. Not by the standard
/// library, which locks standard error: a child that was forked meanwhile would wait for ever.
struct Lines(#[allow(dead_code, reason = "held, not used")] Uncancelled);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(rustix::stdio::stderr(), bytes)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
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
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| Lines(Uncancelled::begin()))
        .with_ansi(std::io::stderr().is_terminal())
        .finish();
    let _ = tracing::subscriber::set_global_default(ToTheEnd(lines));
}

/// Logs as `S` does, which keeps a buffer for each thread. Handlers of atexit(3) and destructors run when
/// the main thread's is gone, and programs call verbs there: `S` would panic. So from then on a line is
/// written without it.
struct ToTheEnd<S>(S);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Thread {
    /// It has logged nothing yet.
    New,
    Alive,
    /// Its buffers may be gone.
    Ending,
}

struct Ends;

impl Drop for Ends {
    fn drop(&mut self) {
        THREAD.set(Thread::Ending);
    }
}

thread_local! {
    static THREAD: Cell<Thread> = const { Cell::new(Thread::New) };
    static ENDS: Ends = const { Ends };
}

impl<S: Subscriber> Subscriber for ToTheEnd<S> {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        self.0.register_callsite(metadata)
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.0.enabled(metadata)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        self.0.max_level_hint()
    }

    fn event(&self, event: &Event<'_>) {
        match THREAD.get() {
            Thread::Alive => self.0.event(event),
            Thread::Ending => write_plainly(event),
            Thread::New => {
                self.0.event(event);
                // Behind what `S` has just made: thread-local values go in the reverse order.
                if ENDS.try_with(|_| ()).is_ok() {
                    THREAD.set(Thread::Alive);
                }
            }
        }
    }

    fn new_span(&self, attributes: &span::Attributes<'_>) -> span::Id {
        self.0.new_span(attributes)
    }

    fn record(&self, span: &span::Id, values: &span::Record<'_>) {
        self.0.record(span, values);
    }

    fn record_follows_from(&self, span: &span::Id, follows: &span::Id) {
        self.0.record_follows_from(span, follows);
    }

    fn enter(&self, span: &span::Id) {
        self.0.enter(span);
    }

    fn exit(&self, span: &span::Id) {
        self.0.exit(span);
    }
}

/// Without a time and without colours.
fn write_plainly(event: &Event<'_>) {
    struct Text(String);
    impl Visit for Text {
        fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
            // Writing to a string cannot fail.
            let _ = match field.name() {
                "message" => write!(self.0, " {value:?}"),
                name => write!(self.0, " {name}={value:?}"),
            };
        }
    }
    let mut text = Text(format!("{} {}:", event.metadata().level(), event.metadata().target()));
    event.record(&mut text);
    text.0.push('\n');
    let _ = Lines(Uncancelled::begin()).write_all(text.0.as_bytes());
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
