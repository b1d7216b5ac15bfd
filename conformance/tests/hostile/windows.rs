//! Memory windows: keys that were taken back, that belong to another queue pair, domain or use, and windows
//! that are taken away under fire.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use uwarp_conformance::attacker::encode::{
    AtomicRequest, Codes, ReadRequest, SEND_INVALIDATE, Tagged, Untagged, fpdu, fpdus,
};
use uwarp_conformance::attacker::peer::{PATIENCE, Peer};
use uwarp_conformance::attacker::victim::{Region, Victim};
use uwarp_conformance::{Failure, Outcome, require};

use crate::{FLUSHED, Fate, meet, strike};

/// Where each window begins in the region `bind`, and how long it is.
const OFFSET: u64 = 1024;
const LENGTH: u64 = 512;

/// Rights of a window as verbs number them.
const REMOTE_WRITE: u32 = 2;
const REMOTE_READ: u32 = 4;
const REMOTE_ATOMIC: u32 = 8;
const ALL: u32 = REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC;
const ZERO_BASED: u32 = 32;

/// The program binds a window by its latest connection.
fn bind(victim: &mut Victim, name: &str, kind: u8, access: u32) -> Outcome<Region> {
    victim.tell(&format!("window {name} {kind} bind {OFFSET} {LENGTH} {access}"))?;
    Ok(victim.region(name))
}

/// An attempt to reach memory, and the Terminate if the key is invalid, another's, without the right, or
/// does not reach so far.
struct Attempt {
    what: &'static str,
    right: u32,
    ulpdu: fn(u32, u64) -> Vec<u8>,
    invalid: Codes,
    foreign: Codes,
    no_right: Codes,
    bounds: Codes,
}

const ATTEMPTS: [Attempt; 3] = [
    Attempt {
        what: "a Write",
        right: REMOTE_WRITE,
        ulpdu: |stag, to| Tagged::write(stag, to, 8).ulpdu(),
        invalid: (1, 1, 0),
        foreign: (1, 1, 2),
        no_right: (0, 1, 2),
        bounds: (1, 1, 1),
    },
    Attempt {
        what: "a Read",
        right: REMOTE_READ,
        ulpdu: |stag, to| Untagged::read(1, &ReadRequest::new(8, stag, to)).ulpdu(),
        invalid: (0, 1, 0),
        foreign: (0, 1, 3),
        no_right: (0, 1, 2),
        bounds: (0, 1, 1),
    },
    Attempt {
        what: "an atomic operation",
        right: REMOTE_ATOMIC,
        ulpdu: |stag, to| Untagged::atomic(1, &AtomicRequest::fetch_add(1, stag, to)).ulpdu(),
        invalid: (0, 1, 0),
        foreign: (0, 1, 3),
        no_right: (0, 1, 2),
        bounds: (0, 1, 1),
    },
];

/// A Write of eight bytes through the window arrives.
const WRITTEN: &str = "bind:1024-1031";

/// Ways in which the program takes a window away: its type and the command.
const WAYS: [(&str, u8, &str); 5] = [
    ("a bind of no bytes", 1, "window w 1 bind 0 0 0"),
    ("a bind of another part", 1, "window w 1 bind 4096 512 14"),
    ("dealloc of type 1", 1, "dealloc w"),
    ("local invalidation", 2, "invalidate w"),
    ("dealloc of type 2", 2, "dealloc w"),
];

/// The old key reaches nothing, whichever way the window went, on its stream and on a later one.
pub fn keys_of_windows_that_are_gone(victim: &mut Victim) -> Outcome {
    for (way, kind, command) in WAYS {
        for attempt in &ATTEMPTS {
            let what = format!("{} after {way}", attempt.what);
            let mut peer = Peer::established(victim.port)?;
            let old = bind(victim, "w", kind, ALL)?;
            peer.send(&Tagged::write(old.stag, old.at, 8).fpdu())?;
            peer.send(&Untagged::read(1, &ReadRequest::new(8, old.stag, old.at)).fpdu())?;
            require!(peer.message()?.payload() == [0xEE; 8], "{what}: not what was written");
            victim.tell(command)?;
            let ulpdu = match attempt.right {
                REMOTE_WRITE => (attempt.ulpdu)(old.stag, old.at),
                // The second request of this stream.
                _ => {
                    let mut ulpdu = (attempt.ulpdu)(old.stag, old.at);
                    ulpdu[10..14].copy_from_slice(&2u32.to_be_bytes());
                    ulpdu
                }
            };
            let fate = Fate::terminated(attempt.invalid);
            let written = Fate { codes: fate.codes, ..Fate::harmless() }.changed(WRITTEN);
            strike(victim, peer, &fpdu(&ulpdu), &what, &written)?;
            let peer = Peer::established(victim.port)?;
            strike(victim, peer, &fpdu(&(attempt.ulpdu)(old.stag, old.at)), &what, &fate)?;
        }
        // What the program keeps is not harmed.
        victim.tell("renew")?;
    }
    Ok(())
}

/// A window of type 2 is its queue pair's alone, one of type 1 its domain's, and neither is another domain's.
pub fn windows_of_others(victim: &mut Victim) -> Outcome {
    for attempt in &ATTEMPTS {
        let try_it = |victim: &mut Victim, window: Region, what: &str, fate: Fate| {
            let peer = Peer::established(victim.port)?;
            let bytes = fpdu(&(attempt.ulpdu)(window.stag, window.at));
            strike(victim, peer, &bytes, &format!("{} {what}", attempt.what), &fate)
        };
        let foreign = || Fate::terminated(attempt.foreign);
        let mut owner = Peer::established(victim.port)?;
        let two = bind(victim, "two", 2, ALL)?;
        let one = bind(victim, "one", 1, ALL)?;
        try_it(victim, two, "through another queue pair's window", foreign())?;
        let allowed = match attempt.right {
            REMOTE_READ => Fate::harmless(),
            _ => Fate::harmless().changed(if attempt.right == REMOTE_WRITE { WRITTEN } else { ADDED }),
        };
        let mut peer = Peer::established(victim.port)?;
        peer.send(&fpdu(&(attempt.ulpdu)(one.stag, one.at)))?;
        if attempt.right != REMOTE_WRITE {
            peer.message()?;
        }
        meet(victim, peer, &format!("{} through the domain's window", attempt.what), &allowed)?;
        victim.tell("profile stranger=1")?;
        try_it(victim, two, "through a window of another domain, type 2", foreign())?;
        try_it(victim, one, "through a window of another domain, type 1", foreign())?;
        victim.tell("profile")?;
        // Its own queue pair goes on, until it ends; then its window ends, too.
        owner.send(&Tagged::write(two.stag, two.at, 8).fpdu())?;
        meet(victim, owner, "the owner", &Fate::harmless().changed(WRITTEN))?;
        let gone = Fate::terminated(attempt.invalid);
        try_it(victim, two, "through a window whose queue pair is gone", gone)?;
        victim.tell("renew")?;
    }
    Ok(())
}

/// One was added to 0xa5a5a5a5a5a5a5a5, lowest byte first.
const ADDED: &str = "bind:1024-1024";

/// The window's bounds count, not those of the region around it.
pub fn bounds_of_windows(victim: &mut Victim) -> Outcome {
    for kind in [1, 2] {
        for attempt in &ATTEMPTS {
            for (offset, outside) in [
                (0, false),
                (LENGTH - 8, false),
                (-8i64 as u64, true),
                (LENGTH, true),
                (-(OFFSET as i64) as u64, true),
                (1 << 32, true),
                (1 << 63, true),
                // A part inside and a part outside. Atomic operations never have that.
                (LENGTH - 4, true),
                (-4i64 as u64, true),
            ] {
                let mut peer = Peer::established(victim.port)?;
                let window = bind(victim, "w", kind, ALL)?;
                let what = format!("{} at {offset:#x} of a type {kind} window", attempt.what);
                peer.send(&fpdu(&(attempt.ulpdu)(window.stag, window.at.wrapping_add(offset))))?;
                let fate = if outside {
                    Fate::terminated(attempt.bounds)
                } else {
                    if attempt.right != REMOTE_WRITE {
                        peer.message()?;
                    }
                    Fate::harmless().changed(match (attempt.right, offset) {
                        (REMOTE_READ, _) => "",
                        (REMOTE_WRITE, 0) => WRITTEN,
                        (REMOTE_WRITE, _) => "bind:1528-1535",
                        (_, 0) => ADDED,
                        _ => "bind:1528-1528",
                    })
                };
                meet(victim, peer, &what, &fate)?;
                victim.tell("dealloc w")?;
            }
        }
    }
    Ok(())
}

/// Zero-based: offsets count from the window's start, and addresses mean nothing.
pub fn zero_based_windows(victim: &mut Victim) -> Outcome {
    let at = victim.region("bind").at;
    for kind in [1, 2] {
        for attempt in &ATTEMPTS {
            for (to, outside) in [
                (0, false),
                (LENGTH - 8, false),
                (LENGTH, true),
                (LENGTH - 4, true),
                (OFFSET, true),
                (at, true),
                (at + OFFSET, true),
                (-8i64 as u64 - 8, true),
            ] {
                let mut peer = Peer::established(victim.port)?;
                let window = bind(victim, "w", kind, ALL | ZERO_BASED)?;
                require!(window.at == 0, "not zero-based");
                let what = format!("{} at {to:#x} of a zero-based type {kind} window", attempt.what);
                peer.send(&fpdu(&(attempt.ulpdu)(window.stag, to)))?;
                let fate = if outside {
                    Fate::terminated(attempt.bounds)
                } else {
                    if attempt.right != REMOTE_WRITE {
                        peer.message()?;
                    }
                    Fate::harmless().changed(match (attempt.right, to) {
                        (REMOTE_READ, _) => "",
                        (REMOTE_WRITE, 0) => WRITTEN,
                        (REMOTE_WRITE, _) => "bind:1528-1535",
                        (_, 0) => ADDED,
                        _ => "bind:1528-1528",
                    })
                };
                meet(victim, peer, &what, &fate)?;
                victim.tell("dealloc w")?;
            }
        }
    }
    Ok(())
}

/// A window has the rights that it was given, and no others of its region or queue pair.
pub fn rights_of_windows(victim: &mut Victim) -> Outcome {
    for kind in [1, 2] {
        for access in (0..8).map(|n| n << 1) {
            for attempt in ATTEMPTS.iter().filter(|attempt| access & attempt.right == 0) {
                let peer = Peer::established(victim.port)?;
                let window = bind(victim, "w", kind, access)?;
                let what = format!("{} of a type {kind} window with rights {access}", attempt.what);
                let bytes = fpdu(&(attempt.ulpdu)(window.stag, window.at));
                strike(victim, peer, &bytes, &what, &Fate::terminated(attempt.no_right))?;
                victim.tell("dealloc w")?;
            }
        }
    }
    // The window grants everything, and the queue pair nothing.
    victim.tell("profile access=1")?;
    for attempt in &ATTEMPTS {
        let peer = Peer::established(victim.port)?;
        let window = bind(victim, "w", 2, ALL)?;
        let bytes = fpdu(&(attempt.ulpdu)(window.stag, window.at));
        let what = format!("{} through a queue pair without the right", attempt.what);
        strike(victim, peer, &bytes, &what, &Fate::terminated((0, 1, 2)))?;
        victim.tell("dealloc w")?;
    }
    victim.tell("profile")
}

/// Send with Invalidate takes away a window of type 2 of its own queue pair, and nothing else. Keys that
/// differ from a window's in the last byte only are no keys.
pub fn invalidations_of_windows(victim: &mut Victim) -> Outcome {
    victim.tell("profile recvs=1")?;
    let invalidate = |stag, len| {
        Untagged { rdmap: 0x40 | SEND_INVALIDATE, invalidate: stag, ..Untagged::send(1, len) }.ulpdu()
    };
    let cannot = || Fate::terminated((0, 1, 9)).recvs("e5");
    let owner = Peer::established(victim.port)?;
    let two = bind(victim, "two", 2, ALL)?;
    let one = bind(victim, "one", 1, ALL)?;
    for (key, what) in [
        (two.stag, "another queue pair's window"),
        (one.stag, "a window of type 1"),
        (two.stag ^ 1, "a key beside a window's"),
        (victim.region("bind").stag, "the windows' region"),
    ] {
        let peer = Peer::established(victim.port)?;
        strike(victim, peer, &fpdu(&invalidate(key, 0)), &format!("an invalidation of {what}"), &cannot())?;
    }
    for low in 0..=255u32 {
        let stag = two.stag & !0xFF | low;
        if stag != two.stag {
            let peer = Peer::established(victim.port)?;
            let fate = Fate::terminated((1, 1, 0)).recvs("e5");
            strike(
                victim,
                peer,
                &Tagged::write(stag, two.at, 8).fpdu(),
                "a key beside the right one",
                &fate,
            )?;
        }
    }
    let put = Tagged::write(two.stag, two.at, 8).ulpdu();
    let fate = Fate::terminated((1, 1, 0)).recvs("ok0").changed(WRITTEN);
    let bytes = fpdus([put.clone(), invalidate(two.stag, 0), put]);
    strike(victim, owner, &bytes, "a Write after the own invalidation", &fate)?;
    victim.tell("profile")?;
    victim.tell("renew")
}

/// The program takes a window away while Writes through it pour in, and then the region and its memory.
/// Whoever were late would touch memory that has no access any more.
pub fn windows_taken_away_under_fire(victim: &mut Victim) -> Outcome {
    for round in 0..4 * WAYS.len() {
        let (way, kind, command) = WAYS[round % WAYS.len()];
        for pose in [Peer::established, Peer::uwarp] {
            let what = format!("round {round}, {way}");
            let mut peer = pose(victim.port)?;
            victim.tell(&format!("window w {kind} bind 0 {} {ALL}", 1 << 20))?;
            let window = victim.region("w");
            let size = [100, 4000, 30_000, 60_000][round % 4];
            let count = (1 << 20) / size;
            let message = fpdus((0..count).map(|n| {
                let segment = Tagged::write(window.stag, window.at + (n * size) as u64, size);
                if n + 1 < count { segment.more().ulpdu() } else { segment.ulpdu() }
            }));
            let over = Arc::new(AtomicBool::new(false));
            let ended = over.clone();
            let fire = std::thread::spawn(move || -> Outcome<Peer> {
                while !ended.load(Ordering::Relaxed) {
                    peer.send(&message)?;
                }
                Ok(peer)
            });
            std::thread::sleep(Duration::from_micros(500 * (round as u64 % 7)));
            // No window is left in the end, so the region can be deregistered.
            match command {
                "dealloc w" => victim.tell_at_once(&[command, "retire bind"])?,
                _ => victim.tell_at_once(&[command, "dealloc w", "retire bind"])?,
            }
            let report = victim.report()?;
            over.store(true, Ordering::Relaxed);
            require!(
                report.events == "3"
                    && report.recvs == FLUSHED
                    && report.sends.is_empty()
                    && report.changed.is_empty(),
                "{what}: {report:?}"
            );
            let mut peer = fire.join().map_err(|_| Failure("panicked".into()))??;
            peer.finish();
            peer.read_to_end(PATIENCE)?;
            victim.tell("renew")?;
            victim.innocent(1)?;
        }
    }
    Ok(())
}

pub fn windows_taken_away_by_a_program_that_polls(victim: &mut Victim) -> Outcome {
    windows_taken_away_under_fire(victim)
}
