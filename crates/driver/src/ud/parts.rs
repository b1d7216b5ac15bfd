//! Messages that are longer than a packet of the path go to other uwarps in parts (docs/datagram-iwarp.md section
//! 16), several messages in one call.

use std::cell::Cell;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Instant;

use rustix::io::Errno;
use uwarp_llp::udp::{self, Incoming, Marks, Outgoing, Route};
use uwarp_proto::datagram;
use uwarp_proto::parts::{Assembler, Peers, Way, layout};
use uwarp_rnic::ah::{Endpoint, QPN_MULTICAST, port_of};
use uwarp_rnic::mr::random_u32;
use uwarp_rnic::qp::Run;
use uwarp_rnic::trace;
use uwarp_wire::datagram::Header;
use uwarp_wire::datagram::part::{Offer, Part, PartHead};

use super::DatagramPort;
use super::receivers::Receivers;
use super::unclaimed::{ANSWERS, drop_unclaimed};
use crate::address;
use crate::config::{Config, UdMtu};
use crate::sync::{AtomicU32, Mutex, Ordering};

/// A datagram of so many bytes needs no parts on any path that programs may count on: an MTU of 1280 (RFC 8200
/// section 5), without the headers of IPv6 and UDP.
const FITS: usize = 1280 - 48;

thread_local! {
    /// Parts of one call, one behind the other.
    static STAGING: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// What a port knows of parts.
#[derive(Default)]
pub(super) struct Parts {
    assembler: Mutex<Assembler, 17>,
    peers: Mutex<Peers, 21>,
    /// Of the next datagram that goes in parts.
    number: AtomicU32,
}

fn random() -> u64 {
    let word = || u64::from(random_u32().unwrap_or(0));
    word() << 32 | word()
}

impl DatagramPort {
    /// Into packets of how many bytes a datagram to this place is cut that begins with these bytes; `None`: it
    /// goes as it is. The first one there also asks whether parts are taken.
    #[inline]
    pub(super) fn cut_to(&self, to: &Endpoint, bytes: &[u8]) -> Option<usize> {
        if bytes.len() <= FITS { None } else { self.cut_long(to, bytes) }
    }

    fn cut_long(&self, to: &Endpoint, bytes: &[u8]) -> Option<usize> {
        let header = Header::parse(bytes).ok()?;
        let is_shared = to.to.ip().is_multicast() || header.destination_qpn == QPN_MULTICAST;
        if is_shared || Config::get().ud_mtu == UdMtu::Interface {
            return None;
        }
        let any = if to.to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let packet = || address::longest_datagram(to.from.unwrap_or(any), to.to).unwrap_or(FITS);
        let Way { parts, asks } =
            self.parts.peers.lock().way(Instant::now(), to.to, bytes.len(), packet, random);
        if let Some(token) = asks {
            let Header { source_qpn, destination_qpn, .. } = header;
            let offer = Offer { source_qpn, destination_qpn, token, answers: false };
            self.send_offer(&Route { to: to.to, from: to.from }, offer);
        }
        parts
    }

    /// If it is lost, it is asked again, or the datagrams go as they are.
    fn send_offer(&self, route: &Route, offer: Offer) {
        let bytes = offer.to_bytes();
        trace::unclaimed(trace::Way::Out, route.to, &bytes, None);
        let _ = self.socket.send(&[Outgoing { route, bytes: &bytes }]);
    }

    /// Hands some of a run to the system, in packets of so many bytes; returns how many it took whole, at least
    /// one. `AGAIN`: not even the first. (What it took of the next one is in vain.)
    pub(super) fn send_in_parts(&self, run: &Run<'_>, marks: Marks, packet: usize) -> Result<usize, Errno> {
        let Some((count, each)) = layout(run.length, packet) else { return Err(Errno::MSGSIZE) };
        let route = Route { to: run.endpoint.to, from: run.endpoint.from };
        let length = PartHead::LEN + each;
        let most = (udp::RUN / count).min(udp::MOST_JOINED / (length * count)).max(1);
        let mut staged = STAGING.try_with(Cell::take).unwrap_or_default();
        staged.clear();
        for datagram in run.bytes.chunks(run.length).take(most) {
            self.stage(datagram, each, &mut staged);
        }
        let sent = self.socket.send_run(&route, marks, &staged, length);
        let all = staged.len() / length;
        let _ = STAGING.try_with(|kept| kept.set(staged));
        match sent? {
            sent if sent >= all => Ok(most.min(run.count)),
            sent => Some(sent / count).filter(|whole| *whole > 0).ok_or(Errno::AGAIN),
        }
    }

    fn stage(&self, datagram: &[u8], each: usize, staged: &mut Vec<u8>) {
        let Ok(header) = Header::parse(datagram) else { return };
        let mut head = PartHead {
            source_qpn: header.source_qpn,
            destination_qpn: header.destination_qpn,
            number: self.parts.number.fetch_add(1, Ordering::Relaxed),
            length: u16::try_from(datagram.len()).unwrap_or(u16::MAX),
            offset: 0,
            incarnation: header.incarnation,
        };
        for bytes in datagram.chunks(each) {
            staged.extend_from_slice(&head.to_bytes());
            staged.extend_from_slice(bytes);
            staged.resize(staged.len() + each - bytes.len(), 0);
            head.offset = head.offset.saturating_add(u16::try_from(each).unwrap_or(u16::MAX));
        }
    }

    /// A part has come.
    pub(super) fn take_part(&self, bytes: &[u8], incoming: &Incoming) {
        let unclaimed = &*self.unclaimed;
        let Some(part) = Part::parse(bytes) else {
            return drop_unclaimed(&unclaimed.malformed, &"malformed (part)", bytes, incoming);
        };
        if port_of(part.head.source_qpn) != incoming.from.port() {
            return drop_unclaimed(&unclaimed.spoofed, &"spoofed", bytes, incoming);
        }
        if !self.is_for_us(part.head.destination_qpn, incoming) {
            return drop_unclaimed(&unclaimed.unknown, &"unknown", bytes, incoming);
        }
        let mut assembler = self.parts.assembler.lock();
        let whole = assembler.take(incoming.from, &part);
        let dropped = assembler.take_dropped();
        drop(assembler);
        if dropped > 0 {
            unclaimed.incomplete.fetch_add(dropped, Ordering::Relaxed);
        }
        let Some(whole) = whole else { return };
        let incoming = Incoming { len: whole.len(), ..*incoming };
        match datagram::parse(&whole) {
            Ok(message) => _ = self.deliver_run(&whole, &message, &[], &incoming),
            // Nothing else is sent in parts, parts least of all.
            Err(reject) => {
                let why = format_args!("malformed ({reject})");
                drop_unclaimed(&unclaimed.malformed, &why, &whole, &incoming);
            }
        }
        self.parts.assembler.lock().give_back(whole);
    }

    /// Somebody asks whether this process takes parts, or answers.
    pub(super) fn take_offer(&self, offer: Offer, bytes: &[u8], incoming: &Incoming) {
        let unclaimed = &*self.unclaimed;
        if port_of(offer.source_qpn) != incoming.from.port() {
            return drop_unclaimed(&unclaimed.spoofed, &"spoofed", bytes, incoming);
        }
        if !self.is_for_us(offer.destination_qpn, incoming) {
            return drop_unclaimed(&unclaimed.unknown, &"unknown", bytes, incoming);
        }
        if offer.answers {
            let is_ours = self.parts.peers.lock().on_answer(incoming.from, offer.token);
            let dropped: Option<&dyn std::fmt::Display> = if is_ours { None } else { Some(&"not asked") };
            return trace::unclaimed(trace::Way::In, incoming.from, bytes, dropped);
        }
        trace::unclaimed(trace::Way::In, incoming.from, bytes, None);
        // As long as the question, and only so often: the sender may be an address that somebody has forged.
        if Config::get().ud_mtu == UdMtu::Auto && unclaimed.answers.allows(ANSWERS) {
            self.send_offer(&Route { to: incoming.from, from: Some(incoming.to) }, offer.answer());
        }
    }

    /// Whether a number is one of this port, and the datagram has come to this process alone.
    fn is_for_us(&self, qpn: u32, incoming: &Incoming) -> bool {
        let Receivers::Numbers { port, .. } = self.receivers else { return false };
        let is_shared = incoming.to.is_multicast() || incoming.to == IpAddr::V4(Ipv4Addr::BROADCAST);
        port_of(qpn) == port && !is_shared
    }
}
