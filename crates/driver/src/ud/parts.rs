//! Messages that are longer than a packet of the path go to other uwarps in parts (docs/datagram-iwarp.md
//! section 16), several messages in one call.

use std::cell::Cell;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Instant;

use rustix::io::Errno;
use uwarp_llp::udp::{self, Incoming, Marks, Outgoing, Route};
use uwarp_proto::datagram;
use uwarp_proto::parts::{Assembler, FITS, How, Peers, Question, layout};
use uwarp_rnic::ah::{Endpoint, QPN_MULTICAST, port_of};
use uwarp_rnic::mr::random_u32;
use uwarp_rnic::qp::Run;
use uwarp_rnic::trace;
use uwarp_wire::datagram::part::{Offer, Part, PartHead};
use uwarp_wire::datagram::{Header, Kind};

use super::DatagramPort;
use super::receivers::Receivers;
use super::unclaimed::drop_unclaimed;
use crate::address;
use crate::config::{Config, UdMtu};
use crate::sync::{AtomicU32, Mutex, Ordering};

/// Questions for parts that a process answers in a second at most.
const ANSWERS: u64 = 20_000;

thread_local! {
    /// Parts of one call, one behind the other.
    static STAGING: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// What a port knows of parts.
pub(super) struct Parts {
    assembler: Mutex<Assembler, 17>,
    peers: Mutex<Peers, 21>,
    /// Of the next datagram that goes in parts. Whoever does not see them cannot spoil one.
    number: AtomicU32,
}

impl Default for Parts {
    fn default() -> Self {
        let number = AtomicU32::new(random_u32().unwrap_or(0));
        Self { assembler: Mutex::default(), peers: Mutex::default(), number }
    }
}

fn random() -> u64 {
    let word = || u64::from(random_u32().unwrap_or(0));
    word() << 32 | word()
}

impl DatagramPort {
    /// How a datagram goes to this place that is these bytes. The first long one there also asks whether
    /// parts are taken.
    #[inline]
    pub(super) fn how(&self, to: &Endpoint, bytes: &[u8]) -> How {
        if bytes.len() <= FITS { How::Whole } else { self.how_long(to, bytes) }
    }

    fn how_long(&self, to: &Endpoint, bytes: &[u8]) -> How {
        let Ok(header) = Header::parse(bytes) else { return How::Whole };
        let is_shared = to.to.ip().is_multicast() || header.destination_qpn == QPN_MULTICAST;
        // What is no message is as long as its maker wants it.
        if is_shared || header.kind() != Kind::Message || Config::get().ud_mtu == UdMtu::Interface {
            return How::Whole;
        }
        let packet = || self.longest(to);
        let way = self.parts.peers.lock().way(Instant::now(), to.to, bytes.len(), packet, random);
        if let (_, Some(Question { token, bytes })) = way {
            let Header { source_qpn, destination_qpn, .. } = header;
            let offer = Offer { source_qpn, destination_qpn, token, answers: false };
            let bytes = bytes.clamp(Offer::LEN, udp::MOST_JOINED);
            let mut question = vec![0; bytes];
            offer.emit(&mut question);
            if self.send_offer(&Route { to: to.to, from: to.from }, &question) == Err(Errno::AGAIN) {
                self.parts.peers.lock().was_not_asked(to.to);
            }
        }
        way.0
    }

    /// If it is lost, it is asked again, or the datagrams go as they are.
    fn send_offer(&self, route: &Route, bytes: &[u8]) -> Result<usize, Errno> {
        trace::unclaimed(trace::Way::Out, route.to, bytes, None);
        self.socket.send(&[Outgoing { route, bytes }])
    }

    /// Hands some of a run to the system, in fragments of IP: one by one, as the system cuts none of these.
    pub(super) fn send_in_fragments(&self, run: &Run<'_>, marks: Marks) -> Result<usize, Errno> {
        let route = Route { to: run.endpoint.to, from: run.endpoint.from };
        self.socket.send_apart(&route, marks, run.bytes, run.length)
    }

    /// Hands some of a run to the system, in packets of so many bytes; returns how many it took whole, at
    /// least one. `AGAIN`: not even the first. (What it took of the next one is in vain.)
    pub(super) fn send_in_parts(&self, run: &Run<'_>, marks: Marks, packet: usize) -> Result<usize, Errno> {
        let Some((count, each)) = layout(run.length, packet) else {
            return self.send_in_fragments(run, marks);
        };
        let route = Route { to: run.endpoint.to, from: run.endpoint.from };
        let length = PartHead::LEN + each;
        let at_once = if self.socket.cuts(length) { udp::RUN } else { udp::BATCH };
        let most = (at_once / count).min(udp::MOST_JOINED / (length * count)).clamp(1, run.count.max(1));
        let mut staged = STAGING.try_with(Cell::take).unwrap_or_default();
        staged.clear();
        for datagram in run.bytes.chunks(run.length).take(most) {
            self.stage(datagram, each, &mut staged);
        }
        let (all, mut sent) = (staged.len() / length, 0);
        let error = loop {
            let rest = staged.get(sent * length..).unwrap_or(&[]);
            match self.socket.send_cut(&route, marks, rest, length) {
                Ok(some) => sent += some,
                Err(error) if udp::refuses_to_cut(error) => {
                    // Older systems say the same of a path that has become shorter and of an interface that
                    // does not cut.
                    if self.longest(run.endpoint) < length {
                        break Some(Errno::MSGSIZE);
                    }
                    match self.socket.send_run(&route, marks, rest, length) {
                        Ok(some) => sent += some,
                        Err(error) => break Some(error),
                    }
                }
                Err(error) => break Some(error),
            }
            if sent >= all {
                break None;
            }
        };
        let _ = STAGING.try_with(|kept| kept.set(staged));
        match error {
            None => Ok(most),
            Some(_) if sent >= count => Ok(sent / count),
            Some(Errno::MSGSIZE) => {
                self.parts.peers.lock().forget(Instant::now(), run.endpoint.to);
                self.send_in_fragments(run, marks)
            }
            Some(error) => Err(error),
        }
    }

    /// Bytes of a packet of the path, as the system knows it now.
    fn longest(&self, to: &Endpoint) -> usize {
        let any = if to.to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        address::longest_datagram(to.from.unwrap_or(any), to.to).unwrap_or(usize::MAX)
    }

    fn stage(&self, datagram: &[u8], each: usize, staged: &mut Vec<u8>) {
        let Ok(header) = Header::parse(datagram) else { return };
        let mut head = PartHead {
            source_qpn: header.source_qpn,
            destination_qpn: header.destination_qpn,
            qkey: header.qkey,
            number: self.parts.number.fetch_add(1, Ordering::Relaxed),
            length: u16::try_from(datagram.len()).unwrap_or(u16::MAX),
            offset: 0,
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
        let part = Part::parse(bytes).filter(|_| Config::get().ud_mtu == UdMtu::Auto);
        let Some(part) = part else {
            return drop_unclaimed(&unclaimed.malformed, &"malformed (part)", bytes, incoming);
        };
        if port_of(part.head.source_qpn) != incoming.from.port() {
            return drop_unclaimed(&unclaimed.spoofed, &"spoofed", bytes, incoming);
        }
        let mut assembler = self.parts.assembler.lock();
        let taken = assembler.take(incoming.from, &part, || self.is_expected(&part, incoming));
        let dropped = assembler.take_dropped();
        drop(assembler);
        if dropped > 0 {
            unclaimed.incomplete.fetch_add(dropped, Ordering::Relaxed);
        }
        let Ok(taken) = taken else {
            return drop_unclaimed(&unclaimed.unknown, &"unknown", bytes, incoming);
        };
        let Some(whole) = taken else { return };
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

    /// Whether its message would reach a queue pair: nobody else's parts take room.
    fn is_expected(&self, part: &Part<'_>, incoming: &Incoming) -> bool {
        let receivers = self.receivers.find(part.head.destination_qpn, incoming);
        let is_ours = self.is_for_us(part.head.destination_qpn, incoming);
        is_ours && receivers.first().is_some_and(|qp| qp.inner.lock().core.qkey() == part.head.qkey)
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
        // Not longer than the question, and only so often: its sender may be an address that somebody has
        // forged.
        if Config::get().ud_mtu == UdMtu::Auto && unclaimed.parts_answers.allows(ANSWERS) {
            let route = Route { to: incoming.from, from: Some(incoming.to) };
            // It is asked again.
            let _ = self.send_offer(&route, &offer.answer().to_bytes());
        }
    }

    /// Whether a number is one of this port, and the datagram has come to this process alone.
    fn is_for_us(&self, qpn: u32, incoming: &Incoming) -> bool {
        let Receivers::Numbers { port, .. } = self.receivers else { return false };
        let is_shared = incoming.to.is_multicast() || incoming.to == IpAddr::V4(Ipv4Addr::BROADCAST);
        port_of(qpn) == port && !is_shared
    }
}
