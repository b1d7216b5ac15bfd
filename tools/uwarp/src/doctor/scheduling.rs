//! How are programs scheduled that are started here: can they keep the library's thread from running?

use std::fs;

use rustix::process::{Resource, getrlimit};

use super::Check;

/// `None`: where there is no /proc, another check says so.
pub fn check() -> Option<Check> {
    let scheduled = Scheduled::of(&fs::read_to_string("/proc/self/stat").ok()?)?;
    let may_raise = fs::read_to_string("/proc/self/status").is_ok_and(|status| has_sys_nice(&status));
    let limit = getrlimit(Resource::Rtprio).current.unwrap_or(u64::MAX);
    Some(scheduled.check(may_raise || limit > scheduled.priority))
}

/// From sched(7); children have it, too.
#[derive(Debug, PartialEq, Eq)]
struct Scheduled {
    nice: i64,
    /// 0: no real-time policy.
    priority: u64,
    policy: u64,
}

impl Scheduled {
    /// Fields 19, 40 and 41 of proc_pid_stat(5), counted from 1; the name may have blanks.
    fn of(stat: &str) -> Option<Self> {
        let (_, rest) = stat.rsplit_once(')')?;
        let fields: Vec<_> = rest.split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3);
        Some(Self {
            nice: field(19)?.parse().ok()?,
            priority: field(40)?.parse().ok()?,
            policy: field(41)?.parse().ok()?,
        })
    }

    /// `higher`: the library's thread may have a higher priority than the program.
    fn check(&self, higher: bool) -> Check {
        const NAME: &str = "scheduling";
        let &Self { nice, priority, policy } = self;
        let policy = match policy {
            1 => "SCHED_FIFO",
            2 => "SCHED_RR",
            _ if nice < 0 => {
                return Check::ok(
                    NAME,
                    format!(
                        "nice {nice}: the library's thread has that, too, unless the program takes it later"
                    ),
                );
            }
            _ => return Check::ok(NAME, "as usual: no program keeps the library's thread from running"),
        };
        let found = format!("{policy}, priority {priority}");
        if higher {
            let above = priority + 1;
            return Check::ok(
                NAME,
                format!(
                    "{found}: the library's thread gets {above}, so no program started so keeps it from \
                     running; one that takes its priority later may"
                ),
            );
        }
        Check::warn(
            NAME,
            format!(
                "{found}, and the library's thread may not have a higher one: a program that spins on its \
                 memory on all processors keeps it from running, and its peers wait"
            ),
            format!(
                "raise RLIMIT_RTPRIO to {} (LimitRTPRIO= of a systemd unit), leave a processor free, or poll \
                 a completion queue while waiting",
                priority + 1
            ),
        )
    }
}

/// Whether the process has CAP_SYS_NICE.
fn has_sys_nice(status: &str) -> bool {
    const CAP_SYS_NICE: u32 = 23;
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    bits >> CAP_SYS_NICE & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    #[test]
    fn who_may_keep_the_thread_from_running_is_told() {
        let stat = "7 (a) (b) S 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 -51 0 1 0 1 1 1 18446744073709551615 1 1 \
                    1 1 1 0 0 0 0 0 0 0 17 1 50 1 0 0 0 1 1 1 1 1 1 1 0";
        let scheduled = Scheduled::of(stat).unwrap();
        assert_eq!(scheduled, Scheduled { nice: 0, priority: 50, policy: 1 });
        let check = scheduled.check(false);
        assert_eq!(check.status, Status::Warn);
        assert!(check.found.starts_with("SCHED_FIFO, priority 50"), "{}", check.found);
        assert!(check.remedy.unwrap().starts_with("raise RLIMIT_RTPRIO to 51"));
        assert_eq!(scheduled.check(true).status, Status::Ok);
        let nice = Scheduled { nice: -20, priority: 0, policy: 0 };
        assert!(nice.check(false).found.starts_with("nice -20"));
    }

    #[test]
    fn the_right_is_read_from_the_status() {
        assert!(has_sys_nice("Name:\tx\nCapEff:\t000001ffffffffff\n"));
        assert!(!has_sys_nice("CapEff:\t0000000000000000\n"));
    }
}
