//! To whom a datagram goes that has come to a port, and what is answered.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use uwarp_llp::udp::{Incoming, Outgoing, Route};
use uwarp_proto::datagram;
use uwarp_rnic::ah::{QPN_MULTICAST, port_of};
use uwarp_rnic::qp::{Arrival, Dropped};
use uwarp_rnic::trace;
use uwarp_wire::datagram::error::ErrorMessage;
use uwarp_wire::datagram::memory::Memory;
use uwarp_wire::datagram::proof::Proof;
use uwarp_wire::datagram::record;
use uwarp_wire::terminate::UntaggedBuffer;

use super::receivers::Receivers;
use super::unclaimed::{ANSWERS, ANSWERS_OF_ONE, drop_unclaimed};
use super::{DatagramPort, UdQp};
use crate::address;
use crate::config::{Config, View};

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

    pub(super) fn deliver(&self, bytes: &[u8], incoming: &Incoming) {
        let unclaimed = &*self.unclaimed;
        if incoming.truncated {
            return drop_unclaimed(&unclaimed.malformed, &"malformed (truncated)", bytes, incoming);
        }
        if let Some(exchanges) = self.exchanges.get().filter(|_| uwarp_wire::rd::is_reliable(bytes)) {
            return exchanges.take(&self.engine).input(bytes, incoming);
        }
        let message = match datagram::parse(bytes) {
            Ok(message) => message,
            Err(reject) => {
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
                tracing::debug!(from = %incoming.from, "datagram dropped: {reject}");
                let why = format_args!("malformed ({reject})");
                return drop_unclaimed(&unclaimed.malformed, &why, bytes, incoming);
            }
        };
        if port_of(message.head.source_qpn) != incoming.from.port() {
            return drop_unclaimed(&unclaimed.spoofed, &"spoofed", bytes, incoming);
        }
        let arrival =
            Arrival { from: incoming.from.ip(), to: incoming.to, slid: shown_lid(incoming.from.ip()) };
        let receivers = self.receivers.find(message.head.destination_qpn, incoming);
        if receivers.is_empty() {
            return drop_unclaimed(&unclaimed.unknown, &"unknown", bytes, incoming);
        }
        for qp in receivers {
            let mut inner = qp.inner.lock();
            if message.head.destination_qpn == QPN_MULTICAST && !inner.groups.contains(&incoming.to) {
                // It has left since. Nothing may complete after ibv_detach_mcast has returned.
                continue;
            }
            if let Err(dropped) = inner.core.deliver(&message, &arrival) {
                drop(inner);
                tracing::debug!(qpn = qp.qpn(), from = %incoming.from, "datagram dropped: {dropped}");
                self.answer(&qp, dropped, bytes, incoming);
            }
        }
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
