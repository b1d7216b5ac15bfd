//! Messages in parts, attacked by another user of the same host and from another host. The attacker knows
//! all addresses, numbers and the Q_Key. Whatever it sends, an honest message arrives whole or not at all,
//! another one gets through, nobody is answered with more bytes than it has sent, and memory is bounded.

use std::time::Duration;

use uwarp_conformance::attacker::parted::{Parted, joined};
use uwarp_conformance::attacker::parts::{Part, QKEY, answer, is_answer, question};
use uwarp_conformance::attacker::stranger::Port;
use uwarp_conformance::{Context, Outcome, require};

use crate::by_number::{PORTS, Stage};

/// All datagrams that have come back: the longest, and how many answers are among them.
fn came_back(own: &Port, token: u64) -> Outcome<(usize, usize)> {
    own.udp.set_read_timeout(Some(Duration::from_millis(200))).context("time limit")?;
    let (mut longest, mut answers, mut buffer) = (0, 0, [0; 2048]);
    while let Ok(len) = own.udp.recv(&mut buffer) {
        longest = len.max(longest);
        answers += usize::from(is_answer(&buffer[..len], token));
    }
    Ok((longest, answers))
}

/// Runs every attack, each beside honest messages.
pub fn parts_of_a_stranger(stage: &mut Stage<'_>) -> Outcome {
    let start = |end: usize| {
        let (address, ns) = stage.hosts.ends()[end];
        Parted::start(stage.program, stage.dist, ns, address, PORTS[end])
    };
    let (mut victim, mut honest) = (start(0)?, start(1)?);
    let victims_host = stage.hosts.ends()[0].1;
    // On one host, too, a message is longer than a packet.
    victims_host.ip("link set lo mtu 1500")?;
    honest.learns(&mut victim, victims_host)?;

    let at = stage.hosts.ends()[2].0.to_owned();
    // From another host even the honest one's port can be had.
    let port = if at == honest.address { PORTS[2] } else { PORTS[1] };
    let own = Attacker { own: stage.stranger.bind(&at, port)?, source: u32::from(port) << 8 | 9 };
    for round in 0..20 {
        own.nonsense(round, &victim, &honest)?;
        honest.reaches(&mut victim, 1010 + round)?;
    }
    require!(victim.dropped(stage.dist, victims_host, "incomplete")? > 0, "no beginning was dropped");
    require!(victim.dropped(stage.dist, victims_host, "spoofed")? > 0, "nothing was false");
    require!(came_back(&own.own, 0)? == (0, 0), "something came back for parts");

    own.questions(&victim)?;
    honest.reaches(&mut victim, 1100)?;
    // The same flood twice: memory has its bound.
    own.flood(&victim, 1 << 20)?;
    honest.reaches(&mut victim, 1101)?;
    let before = victim.resident()?;
    own.flood(&victim, 2 << 20)?;
    honest.reaches(&mut victim, 1102)?;
    let after = victim.resident()?;
    require!(after < before + 4096, "{before} KiB before the second flood, {after} after it");
    // The honest one is still known to take parts.
    let fragments = joined(victims_host)?;
    honest.reaches(&mut victim, 1103)?;
    require!(joined(victims_host)? == fragments, "the honest one has gone back to fragments");
    Ok(())
}

struct Attacker {
    own: Port,
    /// A number of its port.
    source: u32,
}

impl Attacker {
    fn say(&self, to: &Parted, datagram: &[u8]) -> Outcome {
        self.own.udp.send_to(datagram, (to.address.as_str(), to.port())).map(drop).context("sending")
    }

    /// The first part of a message of four.
    fn head(&self, to: &Parted, number: u32) -> Part {
        Part { source: self.source, destination: to.qpn, qkey: QKEY, length: 4096, offset: 0, number }
    }

    fn nonsense(&self, round: u32, victim: &Parted, honest: &Parted) -> Outcome {
        let bytes = [0xEE; 1024];
        for n in 0..50 {
            let head = self.head(victim, round * 1000 + n);
            // Beginnings without an end; in the honest one's name; in that of a port that it has not; with
            // fields that contradict each other; for others.
            let lies = [
                head,
                Part { source: honest.qpn, number: n, offset: 1024 * (n % 4) as u16, ..head },
                Part { source: self.source ^ 0x500, ..head },
                Part { offset: 4095, ..head },
                Part { length: 0, ..head },
                Part { qkey: QKEY ^ 1, ..head },
                Part { destination: victim.qpn ^ 5, ..head },
            ];
            lies.iter().try_for_each(|part| self.say(victim, &part.with(&bytes)))?;
            let many = Part { length: u16::MAX, number: head.number + 500, ..head };
            self.say(victim, &many.with(&bytes[..2]))?;
        }
        // Whole, and nothing: a part in parts, and bytes that are no datagram.
        let inner = self.head(victim, 7).with(&bytes[..500]);
        let nested = self.head(victim, round * 1000 + 900);
        self.say(victim, &Part { length: inner.len() as u16, ..nested }.with(&inner))?;
        self.say(victim, &Part { length: 1024, number: nested.number + 1, ..nested }.with(&bytes))?;
        // Answers that nobody has asked for: to the honest one, in the victim's name, too.
        for token in 0..50 {
            self.say(victim, &answer(self.source, victim.qpn, token))?;
            self.say(honest, &answer(victim.qpn, honest.qpn, token))?;
        }
        Ok(())
    }

    /// Whether parts are taken: an answer is no longer than the question.
    fn questions(&self, victim: &Parted) -> Outcome {
        let token = 0x5EED_0001_5EED_0002;
        const SHORTEST: usize = 24;
        for n in 0..2000 {
            let len = if n % 2 == 0 { SHORTEST } else { 1400 };
            self.say(victim, &question(self.source, victim.qpn, token, len))?;
        }
        let (longest, answers) = came_back(&self.own, token)?;
        require!(answers > 0 && longest <= SHORTEST, "{answers} answers, the longest of {longest} bytes");
        Ok(())
    }

    fn flood(&self, victim: &Parted, from: u32) -> Outcome {
        (from..from + 20_000)
            .try_for_each(|number| self.say(victim, &self.head(victim, number).with(&[0xEE; 1024])))
    }
}
