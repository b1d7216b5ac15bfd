//! Datagrams that came together, for one queue pair.
//!
//! A sender posts lists, and the system passes what came of one sender at once. Of these, each is checked and
//! placed by itself. What is the same for all is done once: the use of the region that the receives are in,
//! and the look at the completion queue.

use std::fmt;
use std::net::SocketAddr;

use uwarp_mem as mem;
use uwarp_proto::datagram::{self, Head, Message};
use uwarp_wire::datagram::QPN_MULTICAST;
use uwarp_wire::grh::{self, Grh};

use super::UdCore;
use crate::ah::port_of;
use crate::cq::Completed;
use crate::mr::{Access, Part};
use crate::qp::datagrams::{Arrival, Dropped, GRH_LEN, copy_in, service_level};
use crate::qp::shell::Shell;
use crate::qp::state::QpState;
use crate::trace;
use crate::wr::{Wc, WcFlags, WcOpcode, WcStatus};

/// Completions that are added together, at most.
const TOGETHER: usize = 16;

/// Takes messages that came together. Their completions are there when it is dropped.
pub struct Receiving<'a> {
    core: &'a mut UdCore,
    arrival: &'a Arrival,
    header: RoutingHeader,
}

/// The area before a message. It is the same for all that are of one length.
struct RoutingHeader {
    /// Payload of the message that it was made for.
    payload: Option<usize>,
    area: [u8; grh::LEN],
}

impl RoutingHeader {
    #[inline]
    fn of(&mut self, arrival: &Arrival, payload: usize) {
        if self.payload != Some(payload) {
            let len = u16::try_from(datagram::OVERHEAD + payload).unwrap_or(u16::MAX);
            Grh::of_datagram(arrival.from, arrival.to, len).emit(&mut self.area);
            self.payload = Some(payload);
        }
    }

    /// The bytes that are written, and where: with IPv4 the first half stays as the program left it.
    #[inline]
    fn bytes(&self) -> (u32, &[u8]) {
        let skip = if self.area[0] == 0 { grh::LEN - grh::V4_LEN } else { 0 };
        (skip as u32, self.area.get(skip..).unwrap_or(&[]))
    }
}

impl UdCore {
    /// Places a message into the next receive, or drops it.
    #[inline]
    pub fn deliver(&mut self, message: &Message<'_>, arrival: &Arrival) -> Result<(), Dropped> {
        self.receiving(arrival).deliver(message)
    }

    /// The same for messages that came together.
    #[inline]
    pub fn receiving<'a>(&'a mut self, arrival: &'a Arrival) -> Receiving<'a> {
        let header = RoutingHeader { payload: None, area: [0; grh::LEN] };
        Receiving { core: self, arrival, header }
    }

    fn trace_arrival(&self, message: &Message<'_>, arrival: &Arrival, placed: Result<(), Dropped>) {
        let Head { source_qpn, destination_qpn, .. } = message.head;
        trace::datagram(trace::Datagram {
            qpn: Some(self.shell.qpn),
            way: trace::Way::In,
            peer: SocketAddr::new(arrival.from, port_of(source_qpn)),
            group: (destination_qpn == QPN_MULTICAST).then_some(arrival.to),
            head: &message.head.to_bytes(),
            len: datagram::OVERHEAD + message.payload.len(),
            dropped: placed.as_ref().err().map(|why| why as &dyn fmt::Display),
        });
    }
}

impl Receiving<'_> {
    /// Places the next message, or drops it.
    #[inline]
    pub fn deliver(&mut self, message: &Message<'_>) -> Result<(), Dropped> {
        let placed = self.place(message);
        if trace::is_on() {
            self.finish();
            self.core.trace_arrival(message, self.arrival, placed);
        }
        if let Err(dropped) = placed {
            self.core.drops.count(dropped);
        }
        placed
    }

    fn place(&mut self, message: &Message<'_>) -> Result<(), Dropped> {
        let shell = &mut self.core.shell;
        if !shell.receives() {
            return Err(Dropped::State);
        }
        if message.head.qkey != shell.attr.qkey {
            return Err(Dropped::Qkey);
        }
        let payload = u32::try_from(message.payload.len()).unwrap_or(u32::MAX);
        let byte_len = payload.saturating_add(GRH_LEN);
        if let Some(srq) = &shell.srq {
            // Other threads may have it.
            shell.local.end_use();
            match srq.take_for_datagram(shell.qpn, byte_len, &mut shell.rq) {
                Some(true) => {}
                Some(false) => return Err(Dropped::NoReceive),
                None => return Err(Dropped::TooLong),
            }
        }
        let Some(room) = shell.rq.front().map(|recv| recv.total) else { return Err(Dropped::NoReceive) };
        if byte_len > room {
            return Err(Dropped::TooLong);
        }
        self.header.of(self.arrival, message.payload.len());
        let good = write(shell, &self.header, message.payload, byte_len);
        let Some(recv) = shell.rq.pop() else { return Ok(()) };
        if !good {
            // The program's own mistake, as with every service.
            let wc = Wc::new(recv.wr_id, WcStatus::LocProtErr, WcOpcode::Recv, shell.qpn);
            self.finish();
            self.core.complete_recv(wc, false);
            self.core.enter(QpState::Err, false);
            return Ok(());
        }
        shell.counters.received.send.count(payload);
        let mut wc = Wc::new(recv.wr_id, WcStatus::Success, WcOpcode::Recv, shell.qpn);
        wc.byte_len = byte_len;
        wc.src_qp = message.head.source_qpn;
        wc.slid = self.arrival.slid;
        wc.sl = service_level(self.arrival);
        wc.flags = WcFlags::GRH;
        if let Some(imm) = message.head.immediate {
            wc.flags |= WcFlags::WITH_IMM;
            wc.imm_or_inv = u32::from_ne_bytes(imm);
        }
        let (tail, solicited) = (shell.rq.completes(), message.head.solicited);
        self.core.arrived.push(Completed { tail, wc, solicited });
        if self.core.arrived.len() == TOGETHER {
            self.finish();
        }
        Ok(())
    }

    /// Ends the use of memory, and adds the completions. If they do not fit, the queue pair fails: with the
    /// first one that is lost. The messages behind that one have come too late.
    fn finish(&mut self) {
        let core = &mut *self.core;
        core.shell.local.end_use();
        if core.arrived.is_empty() {
            return;
        }
        let lost = core.shell.complete_recv_run(&core.arrived);
        if lost > 1 {
            let too_late = core.arrived.iter().rev().take(lost - 1);
            for completed in too_late {
                core.shell.counters.received.send.uncount(completed.wc.byte_len - GRH_LEN);
                core.drops.count(Dropped::State);
            }
        }
        core.arrived.clear();
        core.check_overflow();
    }
}

impl Drop for Receiving<'_> {
    #[inline]
    fn drop(&mut self) {
        self.finish();
    }
}

/// Writes the area of the routing header and the payload behind it into the oldest receive, which has room
/// for them; says whether its memory could be used.
#[inline]
fn write(shell: &mut Shell, header: &RoutingHeader, payload: &[u8], byte_len: u32) -> bool {
    let pd = shell.recv_pd();
    let (skip, area) = header.bytes();
    let Shell { local, rq, .. } = shell;
    // Nearly always one stretch of memory.
    if let Some(sge) = rq.front_sge() {
        let at = sge.addr.wrapping_add(skip.into());
        let part = Part { stag: sge.lkey, to: at, len: (byte_len - skip) as usize };
        let written = local.with_more(part, pd, Access::LOCAL_WRITE, |place| {
            let behind = mem::copy_in(place, area)?;
            mem::copy_in(place.part(behind, payload.len()), payload)
        });
        return matches!(written, Ok(Ok(_)));
    }
    copy_in(local, pd, rq.front_sges(), skip, area) && copy_in(local, pd, rq.front_sges(), GRH_LEN, payload)
}
