//! Peers that vanish, break off, or stay and do nothing.

use std::time::Duration;

use uwarp_conformance::attacker::encode::{ReadRequest, Tagged, Untagged, fpdus};
use uwarp_conformance::attacker::peer::{End, PATIENCE, Peer};
use uwarp_conformance::attacker::victim::Victim;
use uwarp_conformance::{Outcome, require};

use crate::FLUSHED;

/// Brings a connection to a certain point.
type Phase = (&'static str, &'static str, fn(&mut Victim) -> Outcome<Peer>);

const PHASES: [Phase; 8] = [
    ("established", "profile", |v| Peer::established(v.port)),
    ("within a length field", "profile", |v| {
        let mut peer = Peer::established(v.port)?;
        peer.send(&[0])?;
        Ok(peer)
    }),
    ("within a Write", "profile", |v| {
        let mut peer = Peer::established(v.port)?;
        let write = v.region("write");
        peer.send(&Tagged::write(write.stag, write.at, 1000).fpdu()[..500])?;
        Ok(peer)
    }),
    ("within a Write that is received in place", "profile", |v| {
        let mut peer = Peer::uwarp(v.port)?;
        let both = v.region("both");
        let bytes = fpdus([
            Tagged::write(both.stag, both.at, 0).more().ulpdu(),
            Tagged::write(both.stag, both.at, 60_000).ulpdu(),
        ]);
        peer.send(&bytes[..20_000])?;
        std::thread::sleep(Duration::from_millis(5));
        peer.send(&bytes[20_000..30_000])?;
        Ok(peer)
    }),
    ("between two segments of a Send", "profile", |v| {
        let mut peer = Peer::established(v.port)?;
        peer.send(&Untagged::send(1, 8).more().fpdu())?;
        Ok(peer)
    }),
    ("with a Send that waits for its receive", "profile recvs=0", |v| {
        let mut peer = Peer::established(v.port)?;
        peer.send(&Untagged::send(1, 8).fpdu())?;
        Ok(peer)
    }),
    ("with Reads of the victim's outstanding", "profile reads=2", |v| {
        let mut peer = Peer::established(v.port)?;
        peer.sinks(2)?;
        Ok(peer)
    }),
    ("with responses that it does not take", "profile", |v| {
        let mut peer = Peer::established(v.port)?;
        let both = v.region("both");
        for msn in 1..=4 {
            peer.send(&Untagged::read(msn, &ReadRequest::new(1 << 20, both.stag, both.at)).fpdu())?;
        }
        peer.arrived(1)?;
        Ok(peer)
    }),
];

pub fn reset_at_every_phase(victim: &mut Victim) -> Outcome {
    for (what, profile, reach) in PHASES {
        victim.tell(profile)?;
        let peer = reach(victim)?;
        std::thread::sleep(Duration::from_millis(20));
        peer.reset();
        let report = victim.report()?;
        let recvs = if profile.ends_with("recvs=0") { "" } else { FLUSHED };
        let sends = if profile.ends_with("reads=2") { "e5,e5" } else { "" };
        let inside = report.changed.is_empty()
            || report.changed == "recv:0-7"
            || report
                .changed
                .strip_prefix("both:0-")
                .is_some_and(|n| n.parse::<u32>().is_ok_and(|n| n < 60_000));
        require!(
            report.how == "DISCONNECTED"
                && report.state == "ERR"
                && report.events.is_empty()
                && report.recvs == recvs
                && report.sends == sends
                && inside,
            "{what}: {report:?}"
        );
        victim.innocent(1)?;
    }
    victim.tell("profile")
}

/// The attacker stays and says nothing more. The victim's program may leave whenever it likes.
pub fn silence_at_every_phase(victim: &mut Victim) -> Outcome {
    for (what, profile, reach) in PHASES {
        victim.tell(profile)?;
        let mut peer = reach(victim)?;
        victim.innocent(2)?;
        std::thread::sleep(Duration::from_millis(20));
        victim.tell("disconnect")?;
        let report = victim.report()?;
        require!(report.state == "ERR" && report.how == "DISCONNECTED", "{what}: {report:?}");
        let answer = peer.read_to_end(PATIENCE)?;
        require!(answer.end != End::Open, "{what}: still open");
    }
    victim.tell("profile")?;
    victim.recovers()
}

/// After its mistake the attacker neither reads nor closes: the descriptor comes back all the same.
pub fn never_reads_never_closes(victim: &mut Victim) -> Outcome {
    let both = victim.region("both");
    let mut kept = Vec::new();
    for n in 0..30 {
        let mut peer = Peer::established(victim.port)?;
        if n % 2 == 0 {
            for msn in 1..=4 {
                peer.send(&Untagged::read(msn, &ReadRequest::new(1 << 20, both.stag, both.at)).fpdu())?;
            }
        }
        peer.send(&Untagged::send(7, 8).fpdu())?;
        let report = victim.report()?;
        require!(report.events == "2" && report.recvs == FLUSHED, "{report:?}");
        kept.push(peer);
    }
    victim.recovers()
}
