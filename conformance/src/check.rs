//! What programs must have printed. An exit status of 0 is not enough: `rping -c` may exit with 0 after an
//! early disconnect, and perftest prints some of its complaints and goes on.

use crate::process::Output;
use crate::{Outcome, require};

/// Text that no good run of a program prints, in lower case.
const COMPLAINTS: [&str; 10] = [
    "error",
    "fail",
    "couldn't",
    "unable",
    "mismatch",
    "bogus",
    "unhandled",
    "did not detect",
    "assert",
    "backtrace",
];

/// Lines that hold such text and mean nothing: perftest's remarks on the processor's clock.
const HARMLESS: [&str; 2] = ["correlation coefficient", "conflicting cpu frequency"];

/// Fails when a line of either stream complains.
pub fn no_complaints(out: &Output) -> Outcome {
    for line in out.stdout.lines().chain(out.stderr.lines()) {
        let lower = line.to_lowercase();
        let bad = COMPLAINTS.iter().any(|c| lower.contains(c)) && !HARMLESS.iter().any(|h| lower.contains(h));
        if bad {
            return out.failure(format_args!("complains: {line}"));
        }
    }
    Ok(())
}

/// What rping puts into round `round` of a ping of `size` bytes, as `-v` prints it (without the final NUL).
pub fn rping_text(round: u32, size: usize) -> String {
    let mut text = format!("rdma-ping-{round}: ");
    // Every round starts one letter later; letters run from 'A' to 'z' and over again.
    let first = u32::from(b'A') + round % 58;
    let letters = (first..=u32::from(b'z')).chain((u32::from(b'A')..=u32::from(b'z')).cycle());
    let rest = size - 1 - text.len();
    text.extend(letters.take(rest).filter_map(char::from_u32));
    text
}

/// Checks what `rping -v` printed, as client (`prefix` is "ping data: ") or server ("server ping data: "):
/// one line per round, with exactly the bytes the client made, and nothing on standard error but the end of
/// the connection.
pub fn rping(out: &Output, prefix: &str, rounds: u32, size: usize) -> Outcome {
    let lines: Vec<&str> = out.stdout.lines().filter_map(|l| l.strip_prefix(prefix)).collect();
    if lines.len() != rounds as usize {
        return out.failure(format_args!("{} lines of \"{prefix}\", {rounds} wanted", lines.len()));
    }
    for (round, line) in (0..rounds).zip(&lines) {
        if *line != rping_text(round, size) {
            return out.failure(format_args!("round {round}: the data is not what the client sent"));
        }
    }
    rping_quiet(out)
}

/// Fails when an rping printed anything on standard error that is not the normal end of a connection (10 is
/// its state DISCONNECTED). An rping that takes more than two seconds from there to its end, on a busy
/// machine, also gets the event that follows a disconnect by then, which it does not know.
pub fn rping_quiet(out: &Output) -> Outcome {
    for line in out.stderr.lines().map(str::trim).filter(|l| !l.is_empty()) {
        let normal = line.ends_with("DISCONNECT EVENT...")
            || line == "wait for RDMA_READ_ADV state 10"
            || line == "unhandled event: RDMA_CM_EVENT_TIMEWAIT_EXIT, ignoring";
        if !normal {
            return out.failure(format_args!("unexpected on standard error: {line}"));
        }
    }
    Ok(())
}

/// One line of perftest's table of results.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Message size in bytes.
    pub bytes: u64,
    /// How many messages were counted, of all queue pairs together.
    pub iterations: u64,
    /// The columns after these: MB/s peak, MB/s average and Mpps, or microseconds from minimum to 99.9 %.
    pub figures: Vec<f64>,
}

/// What a perftest client's table must say.
#[derive(Debug, Clone)]
pub struct Expected {
    /// One row for each of these sizes, in this order.
    pub sizes: Vec<u64>,
    /// Iterations in each row; `None` in duration mode, where any positive number will do.
    pub iterations: Option<u64>,
}

impl Expected {
    /// One size.
    pub fn one(size: u64, iterations: u64) -> Expected {
        Expected { sizes: vec![size], iterations: Some(iterations) }
    }

    /// `-a`: 2 B to 8 MiB, doubling.
    pub fn all(iterations: u64) -> Expected {
        Expected { sizes: (1..=23).map(|n| 1 << n).collect(), iterations: Some(iterations) }
    }

    /// `-D`.
    pub fn lasting(size: u64) -> Expected {
        Expected { sizes: vec![size], iterations: None }
    }
}

/// The rows of perftest's table.
pub fn perftest_rows(text: &str) -> Vec<Row> {
    let row = |line: &str| {
        let mut words = line.split_whitespace();
        let bytes = words.next()?.parse().ok()?;
        let iterations = words.next()?.parse().ok()?;
        let figures: Vec<f64> = words.map(|w| w.parse().ok()).collect::<Option<_>>()?;
        // Bandwidth has three figures, latency seven, latency in duration mode two.
        (figures.len() >= 2).then_some(Row { bytes, iterations, figures })
    };
    text.lines().filter_map(row).collect()
}

/// Checks a perftest client's output against what was asked of it, and that it did not complain.
pub fn perftest(out: &Output, expected: &Expected) -> Outcome {
    no_complaints(out)?;
    perftest_table(out, expected)
}

/// Checks perftest's table: all sizes, all iterations, and figures.
pub fn perftest_table(out: &Output, expected: &Expected) -> Outcome {
    let rows = perftest_rows(&out.stdout);
    let sizes: Vec<u64> = rows.iter().map(|r| r.bytes).collect();
    if sizes != expected.sizes {
        return out.failure(format_args!("rows for sizes {sizes:?}, wanted {:?}", expected.sizes));
    }
    // On a busy machine perftest may fail to measure the processor's clock; it says so, and its times are
    // infinite.
    let no_clock = out.stderr.contains("Correlation coefficient");
    for row in &rows {
        let enough = match expected.iterations {
            Some(n) => row.iterations == n,
            None => row.iterations > 0,
        };
        if !enough {
            return out.failure(format_args!(
                "{} iterations of {} bytes, wanted {:?}",
                row.iterations, row.bytes, expected.iterations
            ));
        }
        // Small sizes at few iterations may round to 0.00 MB/s, never all columns at once. A standard
        // deviation may be NaN, as perftest takes the root of a difference.
        let numbers = row.figures[0].is_finite() && row.figures.iter().all(|f| f.is_nan() || *f >= 0.0);
        if !no_clock && (!numbers || row.figures.iter().all(|f| *f == 0.0)) {
            return out.failure(format_args!("{} bytes: figures {:?}", row.bytes, row.figures));
        }
    }
    Ok(())
}

/// Judges one of our own C programs (`c/`): at least one statement was checked, none failed, and the exit
/// status is 0.
pub fn statements(out: &Output) -> Outcome {
    let failed: Vec<&str> = out.stdout.lines().filter(|l| l.starts_with("FAIL")).collect();
    let held = out.stdout.lines().filter(|l| l.starts_with("ok ")).count();
    if !failed.is_empty() {
        let (count, all) = (failed.len(), failed.len() + held);
        return out.failure(format_args!("{count} of {all} statements do not hold:\n{}", failed.join("\n")));
    }
    if held == 0 {
        return out.failure("no statement was checked");
    }
    out.exited_ok()
}

/// Fails unless the output holds `text`.
pub fn has(out: &Output, text: &str) -> Outcome {
    require!(out.stdout.contains(text), "no \"{text}\" in the output\n{}", out.text());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(stdout: &str, stderr: &str) -> Output {
        let (stdout, stderr) = (stdout.to_owned(), stderr.to_owned());
        Output { shown: "x".into(), status: None, stdout, stderr, took: Default::default() }
    }

    #[test]
    fn statements_must_be_there() {
        let ok = std::os::unix::process::ExitStatusExt::from_raw(0);
        let said = |stdout| Output { status: Some(ok), ..output(stdout, "") };
        statements(&said("ok one\nok two\n")).unwrap();
        assert!(statements(&said("")).is_err(), "a program that printed nothing");
        assert!(statements(&said("ok one\nFAIL two\n")).is_err());
        assert!(statements(&output("ok one\n", "")).is_err(), "no exit status");
    }

    #[test]
    fn rping_text_is_what_debians_rping_prints() {
        // Taken from `rping -c -C 5 -v` against siw.
        assert_eq!(rping_text(0, 64), "rdma-ping-0: ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqr");
        assert_eq!(rping_text(4, 64), "rdma-ping-4: EFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrstuv");
        assert_eq!(rping_text(57, 20), "rdma-ping-57: zABCD");
        assert_eq!(rping_text(58, 20), "rdma-ping-58: ABCDE");
    }

    #[test]
    fn rping_wants_every_round_with_its_bytes() {
        let good = format!("ping data: {}\nping data: {}\n", rping_text(0, 32), rping_text(1, 32));
        rping(&output(&good, "client DISCONNECT EVENT...\n"), "ping data: ", 2, 32).unwrap();
        assert!(rping(&output(&good, ""), "ping data: ", 3, 32).is_err());
        assert!(rping(&output(&good.replace("1: B", "1: C"), ""), "ping data: ", 2, 32).is_err());
        assert!(rping(&output(&good, "data mismatch!"), "ping data: ", 2, 32).is_err());
    }

    // Printed by Debian's perftest 4.5 over siw.
    const BANDWIDTH: &str = "\
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 4096       1600             37.30              14.18  \t\t   0.003630
---------------------------------------------------------------------------------------
";
    const LATENCY: &str = "\
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   \
99% percentile[usec]
 64      100          1859.95        5782.41      3786.96  \t       3745.64     \t494.48 \t\t5782.41 \
\t\t5782.41
";

    #[test]
    fn perftest_tables_are_read() {
        let rows = perftest_rows(BANDWIDTH);
        assert_eq!(rows, [Row { bytes: 4096, iterations: 1600, figures: vec![37.30, 14.18, 0.003630] }]);
        assert_eq!(perftest_rows(LATENCY)[0].figures.len(), 7);
    }

    #[test]
    fn perftest_rows_must_be_complete() {
        perftest(&output(BANDWIDTH, ""), &Expected::one(4096, 1600)).unwrap();
        perftest(&output(BANDWIDTH, "Correlation coefficient r^2: 0.89 < 0.9"), &Expected::lasting(4096))
            .unwrap();
        assert!(perftest(&output(BANDWIDTH, ""), &Expected::one(4096, 1000)).is_err());
        assert!(perftest(&output(BANDWIDTH, ""), &Expected::all(1600)).is_err());
        assert!(
            perftest(&output(BANDWIDTH, " Completion with error at client"), &Expected::lasting(4096))
                .is_err()
        );
    }
}
