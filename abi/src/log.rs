//! Log lines go to stderr, filtered by `UWARP_LOG`. With `UWARP_LOG_FILE` they go to that file, and
//! warnings and errors to stderr, too.
//!
//! Up to `info`, they are for the person who runs the program: `uwarp: qp 0xa07f00: the peer ended the
//! connection: invalid remote key`. From `debug` on they are for whoever looks into the library, with the
//! time, the level, the module and all fields.

use std::cell::Cell;
use std::fmt::{self, Write as _};
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use tracing::field::{Field, Visit};
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber, span};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, Registry};
use uwarp_driver::{Uncancelled, config};
use uwarp_process::{Once, log_file};

use crate::failure::{errno, set_errno};

static STARTED: Once = Once::new();

/// Sets up logging at the first call. A fork waits until this is done: half done it would stay so in the
/// child, with locks held that are not ours.
///
/// `UWARP_LOG` is a level (`error`, `warn`, `info`, `debug`, `trace`, `off`) or a list such as
/// `warn,uwarp_cm=debug`. Without it, warnings and errors are shown. A value that is not valid is reported
/// once and otherwise ignored: a typing mistake must not stop a program.
#[inline]
pub fn init() {
    STARTED.call(|| {
        // A call that succeeds must leave errno as it was; the check for a terminal changes it.
        let errno = errno();
        start();
        set_errno(errno);
    });
}

/// Log lines may be written by a thread that was cancelled while it is in our frames. Not by the standard
/// library, which locks standard error: a child that was forked meanwhile would wait for ever.
struct Lines {
    to_stderr: bool,
    to_file: bool,
    _uncancelled: Uncancelled,
}

impl Lines {
    /// For a line of this level.
    fn of(level: Level) -> Self {
        let to_file = log_file::is_wanted();
        let to_stderr = !to_file || level <= Level::WARN;
        Self { to_stderr, to_file, _uncancelled: Uncancelled::begin() }
    }
}

/// A file that cannot be written was reported.
static REPORTED: AtomicBool = AtomicBool::new(false);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let stderr = rustix::stdio::stderr;
        if self.to_file
            && let Err((name, error)) = log_file::append(bytes)
        {
            self.to_stderr = true;
            if !REPORTED.swap(true, Ordering::Relaxed) {
                let why = io::Error::from(error).to_string();
                let why = config::without_error_numbers(&format!("cannot write {}: {why}", name.display()));
                rustix::io::write(stderr(), format!("uwarp: log lines go to stderr: {why}\n").as_bytes())?;
            }
        }
        if !self.to_stderr {
            return Ok(bytes.len());
        }
        Ok(rustix::io::write(stderr(), bytes)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Makes [`Lines`].
struct Places;

impl<'a> MakeWriter<'a> for Places {
    type Writer = Lines;

    fn make_writer(&'a self) -> Lines {
        Lines::of(Level::WARN)
    }

    fn make_writer_for(&'a self, event: &Metadata<'_>) -> Lines {
        Lines::of(*event.level())
    }
}

/// By parts of the program alone: nothing here has spans, and a filter by their fields needs regular
/// expressions, which take as long to compile as the largest of our own crates.
fn filter(text: &str) -> Result<Targets, String> {
    config::check_log_filter(text)?;
    let parts: Vec<_> = text.split(',').map(str::trim).filter(|part| !part.is_empty()).collect();
    parts.join(",").parse::<Targets>().map_err(|error| error.to_string())
}

/// The most detailed level that it lets through.
fn most(filter: &Targets) -> Option<LevelFilter> {
    Layer::<Registry>::max_level_hint(filter)
}

#[cold]
fn start() {
    let requested = std::env::var("UWARP_LOG").unwrap_or_default();
    let filter = match requested.trim() {
        "" => Targets::new().with_default(LevelFilter::WARN),
        text => filter(text).unwrap_or_else(|error| {
            eprintln!("uwarp: UWARP_LOG={text}: {error}; warnings and errors are shown");
            Targets::new().with_default(LevelFilter::WARN)
        }),
    };
    let detailed = most(&filter).is_none_or(|level| level >= LevelFilter::DEBUG);
    let lines = tracing_subscriber::fmt().with_max_level(LevelFilter::TRACE);
    let lines = lines.with_writer(Places);
    // A program that links us statically may have a subscriber already; that one stays.
    let _ = match detailed {
        true => {
            let lines = lines.with_ansi(std::io::stderr().is_terminal() && !log_file::is_wanted()).finish();
            tracing::subscriber::set_global_default(ToTheEnd { lines, filter, detailed })
        }
        false => {
            let lines = lines.event_format(ForPeople).finish();
            tracing::subscriber::set_global_default(ToTheEnd { lines, filter, detailed })
        }
    };
}

/// A line that says what, and of which queue pair, as programs print its number.
struct ForPeople;

impl<S, N> FormatEvent<S, N> for ForPeople
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut to: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        writeln!(to, "{}", Sentence::of(event))
    }
}

/// The parts of an event in the order in which a person reads them.
#[derive(Default)]
struct Sentence {
    whose: String,
    message: String,
    rest: String,
}

impl Sentence {
    fn of(event: &Event<'_>) -> Self {
        let mut sentence = Self::default();
        event.record(&mut sentence);
        sentence
    }
}

impl Visit for Sentence {
    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "qpn" => self.record_debug(field, &format_args!("{value:#x}")),
            _ => self.record_debug(field, &value),
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string cannot fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            "qpn" => write!(self.whose, "qp {value:?}: "),
            "id" => write!(self.whose, "id {value:?}: "),
            "error" => write!(self.rest, ": {value:?}"),
            name => write!(self.rest, " ({name} {value:?})"),
        };
    }
}

impl fmt::Display for Sentence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sentence = format!("{}{}", self.message, self.rest);
        write!(f, "uwarp: {}{}", self.whose, config::without_error_numbers(&sentence))
    }
}

/// Logs what the filter lets through as `S` does, which keeps a buffer for each thread. Handlers of atexit(3)
/// and destructors run when the main thread's is gone, and programs call verbs there: `S` would panic. So
/// from then on a line is written without it.
struct ToTheEnd<S> {
    lines: S,
    filter: Targets,
    detailed: bool,
}

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
        if self.enabled(metadata) { self.lines.register_callsite(metadata) } else { Interest::never() }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.filter.would_enable(metadata.target(), metadata.level())
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        most(&self.filter)
    }

    fn event(&self, event: &Event<'_>) {
        match THREAD.get() {
            Thread::Alive => self.lines.event(event),
            Thread::Ending => write_plainly(event, self.detailed),
            Thread::New => {
                self.lines.event(event);
                // Behind what `S` has just made: thread-local values go in the reverse order.
                if ENDS.try_with(|_| ()).is_ok() {
                    THREAD.set(Thread::Alive);
                }
            }
        }
    }

    fn new_span(&self, attributes: &span::Attributes<'_>) -> span::Id {
        self.lines.new_span(attributes)
    }

    fn record(&self, span: &span::Id, values: &span::Record<'_>) {
        self.lines.record(span, values);
    }

    fn record_follows_from(&self, span: &span::Id, follows: &span::Id) {
        self.lines.record_follows_from(span, follows);
    }

    fn enter(&self, span: &span::Id) {
        self.lines.enter(span);
    }

    fn exit(&self, span: &span::Id) {
        self.lines.exit(span);
    }
}

/// Without a time and without colours.
fn write_plainly(event: &Event<'_>, detailed: bool) {
    let sentence = Sentence::of(event);
    let line = match detailed {
        true => format!("{} {}: {sentence}\n", event.metadata().level(), event.metadata().target()),
        false => format!("{sentence}\n"),
    };
    let _ = Lines::of(*event.metadata().level()).write_all(line.as_bytes());
}

#[cfg(test)]
mod tests {
    use tracing::Level;
    use tracing_subscriber::filter::LevelFilter;

    use super::filter;

    /// Two parsers disagreed: the command refused what the library took.
    #[test]
    fn what_the_settings_allow_is_a_filter_of_the_subscriber_too() {
        for good in ["warn", "DEBUG", "off", "3", "warn,uwarp_cm=debug", "uwarp_cm", "uwarp_cm=trace,"] {
            assert!(filter(good).is_ok(), "{good}");
        }
        for bad in ["loud", "debgu", "warn,debgu", "uwarp_cm=loud", "[=debug", "uwarp_cm[{qpn}]=debug"] {
            assert!(filter(bad).is_err(), "{bad}");
        }
        // The most detailed part decides what is worth a look, the longest name what is shown.
        let filter = filter(" warn, uwarp_cm=debug,uwarp_cm::pairing=error,").unwrap();
        assert_eq!(super::most(&filter), Some(LevelFilter::DEBUG));
        for (target, level, shown) in [
            ("uwarp_rnic::qp", Level::WARN, true),
            ("uwarp_rnic::qp", Level::INFO, false),
            ("uwarp_cm::machine", Level::DEBUG, true),
            ("uwarp_cm::machine", Level::TRACE, false),
            ("uwarp_cm::pairing", Level::WARN, false),
            ("uwarp_cm::pairing", Level::ERROR, true),
        ] {
            assert_eq!(filter.would_enable(target, &level), shown, "{target} {level}");
        }
    }
}
