//! Peers over reliable datagrams that say nothing, because they are stopped or killed. Over TCP their systems
//! answer; here they are asked whether somebody has the port.

use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use uwarp_conformance::attacker::named::{Named, RETRIES_EXCEEDED};
use uwarp_conformance::attacker::victim::Victim;
use uwarp_conformance::dist::Dist;
use uwarp_conformance::{Context, Failure, Outcome, require};

use crate::by_number::{Hosts, Place};
use crate::over_rd::OVER_RD;

/// Longer than a peer may be silent that owes something (10 s) and of which nothing is heard for 5 s.
const STOPPED: Duration = Duration::from_secs(21);
/// A peer's system that answers nothing is given up after half a minute: what comes before was an answer.
const EARLY: Duration = Duration::from_secs(25);

fn send(pid: u32, signal: Signal) -> Outcome {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    kill_process(pid.ok_or_else(|| Failure("no process".into()))?, signal).context("a signal")
}

/// Stops a process for a while. Those that are stopped and killed are this test's own.
fn stop(pid: u32) -> Outcome {
    send(pid, Signal::STOP)?;
    std::thread::sleep(STOPPED);
    send(pid, Signal::CONT)
}

/// The client waits for it in the middle of its work.
pub fn a_server_that_is_stopped_goes_on(victim: &mut Victim) -> Outcome {
    victim.innocent_begins(300)?;
    stop(victim.pid())?;
    victim.innocent_done()?;
    let [_, ended, open] = victim.sync()?;
    require!((ended, open) == (0, 1), "{ended} connections have ended, {open} are open");
    Ok(())
}

/// Nobody waits for it; then it goes on, and has lost nothing.
pub fn a_client_that_is_stopped_goes_on(victim: &mut Victim) -> Outcome {
    stop(victim.innocent_pid())?;
    victim.innocent(20)?;
    let [_, ended, open] = victim.sync()?;
    require!((ended, open) == (0, 1), "{ended} connections have ended, {open} are open");
    Ok(())
}

/// Its system says so, and the program hears it as over TCP.
pub fn a_client_that_is_killed_is_noticed(victim: &mut Victim) -> Outcome {
    send(victim.innocent_pid(), Signal::KILL)?;
    let line = victim.expect_within("gone ", EARLY)?;
    require!(line.starts_with("gone how=DISCONNECTED est=1 "), "{line}");
    let [_, ended, open] = victim.sync()?;
    require!((ended, open) == (1, 0), "{ended} connections have ended, {open} are open");
    Ok(())
}

/// Two queue pairs that were brought up by number.
pub fn by_number(what: What, place: Place, dist: &Dist, program: &Path) -> Outcome {
    let hosts = Hosts::of(place)?;
    let start = |end: usize, port: u16| {
        let (address, ns) = hosts.ends()[end];
        Named::start_with(program, dist, ns, address, port, OVER_RD)
    };
    let (mut one, mut other) = (start(0, 20_000)?, start(1, 20_001)?);
    one.toward((other.qpn, &other.address), (1, 2), (0, 7))?;
    other.toward((one.qpn, &one.address), (2, 1), (0, 7))?;
    one.send("before")?;
    other.expect("received before")?;
    one.expect("sent 0")?;
    require!(one.knows_peer(dist, hosts.ends()[0].1)?, "strangers");
    match what {
        What::Stopped => {
            send(other.pid(), Signal::STOP)?;
            one.send("meanwhile")?;
            std::thread::sleep(STOPPED);
            send(other.pid(), Signal::CONT)?;
            other.expect("received meanwhile")?;
            one.expect("sent 0")?;
            other.send("after")?;
            one.expect("received after")?;
            other.expect("sent 0")
        }
        What::Killed => {
            other.kill();
            one.send("nobody")?;
            one.expect_within(RETRIES_EXCEEDED, EARLY)
        }
    }
}

/// What becomes of the other end.
#[derive(Debug, Clone, Copy)]
pub enum What {
    /// It goes on.
    Stopped,
    /// It does not.
    Killed,
}
