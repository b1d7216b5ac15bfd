//! To whom a datagram goes that has come to a port, and what is answered.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use uwarp_llp::udp::{Incoming, Outgoing, Route, Slot};
use uwarp_proto::datagram::{self, Message, Reject};
use uwarp_rnic::ah::{QPN_MULTICAST, port_of};
use uwarp_rnic::qp::{Arrival, Dropped};
use uwarp_rnic::trace;
use uwarp_wire::datagram::error::ErrorMessage;
use uwarp_wire::datagram::memory::Memory;
use uwarp_wire::datagram::proof::Proof;
use uwarp_wire::datagram::{part, record};
use uwarp_wire::rd::is_reliable;
use uwarp_wire::terminate::UntaggedBuffer;

use super::receivers::Receivers;
use super::unclaimed::{ANSWERS, ANSWERS_OF_ONE, drop_unclaimed};
use super::{DatagramPort, UdQp};
use crate::address;
use crate::config::{Config, View};

/// A datagram, and what it is.
type Parsed<'a> = (&'a [u8], Result<Message<'a>, Reject>);

/// Datagrams that are checked before they are delivered, at most.
const TOGETHER: usize = 8;

fn trace_error(
    qp: &UdQp,
    way: trace::Way,
    peer: SocketAddr,
    bytes: &[u8],
    dropped: Option<&dyn fmt::Display>,
) {
    let (qpn, len) = (Some(qp.qpn()), bytes.len());
    trace::datagram(trace::Datagram { qpn, way, peer, group: None, head: bytes, len, dropped });
}

/// The LID of an address; 0 where the device shows none.
pub(crate) fn shown_lid(ip: IpAddr) -> u16 {
    if Config::get().view == View::Ib { address::lid_of(ip) } else { 0 }
}

impl DatagramPort {
    fn take_proof(&self, proof: Proof, bytes: &[u8], incoming: &Incoming) {
        let unclaimed = &*self.unclaimed;
        let Receivers::Numbers { port, .. } = self.receivers else {
            return drop_unclaimed(&unclaimed.unknown, &"unknown", bytes, incoming);
        };
        if port_of(proof.source_qpn) != incoming.from.port() {
            return drop_unclaimed(&unclaimed.spoofed, &"spoofed", bytes, incoming);
        }
        if port_of(proof.destination_qpn) != port || !self.proofs.take(incoming.from, incoming.to, proof) {
            return drop_unclaimed(&unclaimed.unknown, &"unknown", bytes, incoming);
        }
        trace::unclaimed(trace::Way::In, incoming.from, bytes, None);
    }

    fn take_memory(&self, memory: Memory, bytes: &[u8], incoming: &Incoming) {
        let unclaimed = &*self.unclaimed;
        if port_of(memory.source_qpn) != incoming.from.port() {
            return drop_unclaimed(&unclaimed.spoofed, &"spoofed", bytes, incoming);
        }
        let Receivers::Numbers { port, .. } = self.receivers else {
            return drop_unclaimed(&unclaimed.unknown, &"unknown", bytes, incoming);
        };
        if port_of(memory.destination_qpn) != port || !self.rings.hear(memory, incoming) {
            return drop_unclaimed(&unclaimed.unknown, &"unknown", bytes, incoming);
        }
        trace::unclaimed(trace::Way::In, incoming.from, bytes, None);
    }

    /// What came in one slot, in order of arrival.
    pub(super) fn deliver_slot(&self, slot: &Slot<'_>) {
        if slot.incoming().truncated {
            return slot.each().for_each(|(bytes, incoming)| self.deliver(bytes, &incoming));
        }
        self.deliver_all(slot.datagrams(), slot.incoming());
    }

    /// The same on a port that has reliable datagrams, too. These go to `reliable`, each with all
    /// that are behind it; `None`: another one comes.
    pub(super) fn deliver_either(
        &self,
        slot: &Slot<'_>,
        mut reliable: impl FnMut(Option<(&[u8], &Incoming)>),
    ) {
        if slot.incoming().truncated {
            reliable(None);
            return self.deliver_slot(slot);
        }
        let (incoming, mut datagrams) = (slot.incoming(), slot.datagrams());
        while let Some(bytes) = datagrams.clone().next() {
            if is_reliable(bytes) {
                reliable(Some((datagrams.rest(), &Incoming { len: bytes.len(), ..*incoming })));
                datagrams.next();
            } else {
                reliable(None);
                let others = std::iter::from_fn(|| {
                    datagrams
                        .clone()
                        .next()
                        .filter(|bytes| !is_reliable(bytes))
                        .and_then(|_| datagrams.next())
                });
                self.deliver_all(others, incoming);
            }
        }
    }

    /// A datagram that has come, of which nothing is known.
    pub(super) fn deliver(&self, bytes: &[u8], incoming: &Incoming) {
        if incoming.truncated {
            let malformed = &self.unclaimed.malformed;
            return drop_unclaimed(malformed, &"malformed (truncated)", bytes, incoming);
        }
        if let Some(exchanges) = self.exchanges.get().filter(|_| is_reliable(bytes)) {
            return exchanges.take(&self.engine).input(bytes, incoming);
        }
        self.deliver_all(std::iter::once(bytes), incoming);
    }

    /// Datagrams of one sender to one address, in order of arrival. Each is checked by itself, some at a
    /// time: the processor works on two CRCs at once.
    #[inline]
    fn deliver_all<'a>(&self, mut datagrams: impl Iterator<Item = &'a [u8]>, incoming: &Incoming) {
        let mut parsed = [const { None }; TOGETHER];
        loop {
            let mut count = 0;
            for (place, bytes) in parsed.iter_mut().zip(datagrams.by_ref()) {
                *place = Some((bytes, datagram::parse(bytes)));
                count += 1;
            }
            let mut rest = parsed.get(..count).unwrap_or(&[]);
            while let [Some((bytes, first)), behind @ ..] = rest {
                rest = match first {
                    Ok(message) => self.deliver_run(bytes, message, behind, incoming),
                    Err(reject) => {
                        self.deliver_other(*reject, bytes, incoming);
                        behind
                    }
                };
            }
            if count < TOGETHER {
                return;
            }
        }
    }

    /// Takes a message, and those behind it that are for the same queue pair, with its lock held once.
    /// Returns the others.
    #[inline]
    pub(super) fn deliver_run<'a, 'b>(
        &self,
        mut bytes: &'a [u8],
        mut message: &'b Message<'a>,
        mut behind: &'b [Option<Parsed<'a>>],
        incoming: &Incoming,
    ) -> &'b [Option<Parsed<'a>>] {
        let unclaimed = &*self.unclaimed;
        let (from, port) = (incoming.from.ip(), incoming.from.port());
        if port_of(message.head.source_qpn) != port {
            drop_unclaimed(&unclaimed.spoofed, &"spoofed", bytes, incoming);
            return behind;
        }
        let destination = message.head.destination_qpn;
        let arrival = Arrival { from, to: incoming.to, slid: shown_lid(from) };
        let mut members = self.receivers.find(destination, incoming);
        if destination == QPN_MULTICAST && !members.is_empty() {
            members.iter().for_each(|qp| self.deliver_to_group(qp, bytes, message, &arrival, incoming));
            return behind;
        }
        let Some(qp) = members.pop() else {
            drop_unclaimed(&unclaimed.unknown, &"unknown", bytes, incoming);
            return behind;
        };
        let mut inner = qp.inner.lock();
        let mut receiving = inner.core.receiving(&arrival);
        loop {
            if let Err(dropped) = receiving.deliver(message) {
                drop(receiving);
                drop(inner);
                self.answer(&qp, dropped, bytes, incoming);
                // (The number may be another queue pair's now.)
                return behind;
            }
            match behind {
                [Some((next, Ok(parsed))), others @ ..]
                    if (parsed.head.destination_qpn, port_of(parsed.head.source_qpn))
                        == (destination, port) =>
                {
                    (bytes, message, behind) = (next, parsed, others);
                }
                _ => return behind,
            }
        }
    }

    /// A message to a group of which this queue pair is a member.
    fn deliver_to_group(
        &self,
        qp: &UdQp,
        bytes: &[u8],
        message: &Message<'_>,
        arrival: &Arrival,
        incoming: &Incoming,
    ) {
        let mut inner = qp.inner.lock();
        if !inner.groups.contains(&incoming.to) {
            // It has left since. Nothing may complete after ibv_detach_mcast has returned.
            return;
        }
        if let Err(dropped) = inner.core.deliver(message, arrival) {
            drop(inner);
            self.answer(qp, dropped, bytes, incoming);
        }
    }

    /// What is no message.
    fn deliver_other(&self, reject: Reject, bytes: &[u8], incoming: &Incoming) {
        if part::is_part(bytes) {
            return self.take_part(bytes, incoming);
        }
        if let Some(segment) = datagram::parse_record(bytes) {
            return self.deliver_record(&segment, bytes, incoming);
        }
        if let Some(error) = datagram::parse_error(bytes) {
            return self.hear(&error, bytes, incoming);
        }
        if let Some(proof) = datagram::parse_proof(bytes) {
            return self.take_proof(proof, bytes, incoming);
        }
        if let Some(memory) = datagram::parse_memory(bytes) {
            return self.take_memory(memory, bytes, incoming);
        }
        if let Some(offer) = datagram::parse_offer(bytes) {
            return self.take_offer(offer, bytes, incoming);
        }
        tracing::debug!(from = %incoming.from, "datagram dropped: {reject}");
        let why = format_args!("malformed ({reject})");
        drop_unclaimed(&self.unclaimed.malformed, &why, bytes, incoming);
    }

    /// A segment of an RDMA Write-Record.
    fn deliver_record(&self, segment: &record::Segment<'_>, bytes: &[u8], incoming: &Incoming) {
        let unclaimed = &*self.unclaimed;
        let head = &segment.head;
        if port_of(head.source_qpn) != incoming.from.port() {
            return drop_unclaimed(&unclaimed.spoofed, &"spoofed", bytes, incoming);
        }
        let receivers = self.receivers.find(head.destination_qpn, incoming);
        let Some(qp) = receivers.first().filter(|_| head.destination_qpn != QPN_MULTICAST) else {
            return drop_unclaimed(&unclaimed.unknown, &"unknown", bytes, incoming);
        };
        let from = incoming.from.ip();
        let arrival = Arrival { from, to: incoming.to, slid: shown_lid(from) };
        if let Err(dropped) = qp.take_record(segment, &arrival) {
            tracing::debug!(qpn = qp.qpn(), from = %incoming.from, "segment of a record dropped: {dropped}");
        }
    }

    /// Says to the sender of a message why it was dropped: never in more bytes than it had, never to a group,
    /// and only so often. The sender may be an address that somebody has forged.
    fn answer(&self, qp: &UdQp, dropped: Dropped, bytes: &[u8], incoming: &Incoming) {
        tracing::debug!(qpn = qp.qpn(), from = %incoming.from, "datagram dropped: {dropped}");
        let why = match dropped {
            Dropped::NoReceive => UntaggedBuffer::NoBuffer,
            Dropped::TooLong => UntaggedBuffer::TooLong,
            // Whoever names memory learns nothing of it.
            Dropped::Access | Dropped::NoRecord | Dropped::Late => return,
            Dropped::State | Dropped::Qkey => return,
        };
        let many = matches!(self.receivers, Receivers::Groups(_))
            || incoming.to.is_multicast()
            || incoming.to == IpAddr::V4(Ipv4Addr::BROADCAST);
        let Some(error) = datagram::answer(bytes, why).filter(|_| !many) else { return };
        if !qp.answers.allows(ANSWERS_OF_ONE) || !self.unclaimed.answers.allows(ANSWERS) {
            return;
        }
        let (route, bytes) = (Route { to: incoming.from, from: Some(incoming.to) }, error.to_bytes());
        // What the system does not take now is lost: it is advice.
        if self.socket.send(&[Outgoing { route: &route, bytes: &bytes }]).is_ok() {
            trace_error(qp, trace::Way::Out, incoming.from, &bytes, None);
        }
    }

    /// A peer says that it has dropped a message.
    fn hear(&self, error: &ErrorMessage, bytes: &[u8], incoming: &Incoming) {
        let unclaimed = &*self.unclaimed;
        if port_of(error.source_qpn) != incoming.from.port() {
            return drop_unclaimed(&unclaimed.spoofed, &"spoofed", bytes, incoming);
        }
        let receivers = self.receivers.find(error.destination_qpn, incoming);
        // A group has sent nothing.
        let Some(qp) = receivers.first().filter(|_| error.destination_qpn != QPN_MULTICAST) else {
            return drop_unclaimed(&unclaimed.unknown, &"unknown", bytes, incoming);
        };
        let heard = qp.inner.lock().core.handle_error(error, incoming.from.ip());
        match heard {
            Ok(()) => trace_error(qp, trace::Way::In, incoming.from, bytes, None),
            Err(Some(dropped)) => trace_error(qp, trace::Way::In, incoming.from, bytes, Some(&dropped)),
            // It is about an earlier queue pair of this number, or made up.
            Err(None) => drop_unclaimed(&unclaimed.spoofed, &"spoofed", bytes, incoming),
        }
    }
}
