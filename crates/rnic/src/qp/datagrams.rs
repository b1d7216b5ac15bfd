//! What the services of datagrams have in common, reliable or not: their work requests, the area of the
//! routing header before a received message, the bytes of a scatter/gather list.

use std::fmt;
use std::net::IpAddr;

use serde::Serialize;
use uwarp_mem as mem;
use uwarp_wire::grh::{self, Grh};

use crate::ah::Ah;
use crate::error::VerbsError;
use crate::mr::{Access, MrCache};
use crate::queues::slice_sges;
use crate::wr::{SendFlags, SendOp, SendWr, Sge};

/// Bytes before the payload of a received message: room for a global routing header, as in the verbs.
pub const GRH_LEN: u32 = grh::LEN as u32;
/// A remote Q_Key with this bit stands for the queue pair's own (ibv_post_send(3), InfiniBand volume 1
/// section 10.2.4.5).
const CONTROLLED_QKEY: u32 = 1 << 31;

/// A send work request of a datagram.
#[derive(Clone, Copy)]
pub struct UdSendWr<'a> {
    /// What every service has. The operation is a Send, with immediate data or without.
    pub wr: SendWr<'a>,
    /// Where it goes.
    pub ah: &'a Ah,
    /// The receiver's queue pair.
    pub remote_qpn: u32,
    /// The receiver's Q_Key, or one with the top bit set for this queue pair's own.
    pub remote_qkey: u32,
    /// Of reliable datagrams that name memory: the job key, if not the queue pair's own.
    pub job_key: Option<u64>,
}

impl UdSendWr<'_> {
    /// The Q_Key that it carries, from a queue pair with this one.
    pub(super) fn qkey(&self, own: u32) -> u32 {
        if self.remote_qkey & CONTROLLED_QKEY != 0 { own } else { self.remote_qkey }
    }

    /// Refuses inline data that is longer than the queue pair was made for.
    pub(super) fn check_inline(&self, max_inline: u32) -> Result<(), VerbsError> {
        let inline = self.wr.flags.contains(SendFlags::INLINE);
        if inline && total_len(self.wr.sges) > u64::from(max_inline) {
            return Err(VerbsError::Invalid("more inline data than the queue pair was made for"));
        }
        Ok(())
    }
}

/// How a datagram came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// Its sender's address.
    pub from: IpAddr,
    /// The address it was sent to.
    pub to: IpAddr,
    /// The sender's LID, where the device has LIDs.
    pub slid: u16,
}

/// What a completion shows as the service level of a datagram. RoCE has none: adapters put there what headers
/// the packet had (bit 3: UDP; 2: IPv4, 1: IPv6), and UCX 1.13 looks there for the form of the GRH area. It
/// drops, without a word, each datagram whose destination it then does not find.
pub(super) fn service_level(arrival: &Arrival) -> u8 {
    match (arrival.slid, arrival.to) {
        (0, IpAddr::V4(_)) => 8 | 2,
        (0, IpAddr::V6(_)) => 8 | 1,
        // InfiniBand's.
        _ => 0,
    }
}

/// The immediate data of an operation, if it has any; refuses what datagrams cannot do.
pub(super) fn immediate_of(op: SendOp) -> Result<Option<[u8; 4]>, VerbsError> {
    match op {
        SendOp::Send { invalidate: None } => Ok(None),
        SendOp::SendImmediate { imm } => Ok(Some(imm)),
        _ => Err(VerbsError::Invalid("a datagram queue pair has Sends only")),
    }
}

pub(super) fn total_len(sges: &[Sge]) -> u64 {
    sges.iter().map(|sge| u64::from(sge.length)).sum()
}

/// Why a queue pair dropped a datagram that was whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dropped {
    /// It does not receive in its state.
    State,
    /// Another Q_Key.
    Qkey,
    /// No receive was posted.
    NoReceive,
    /// Longer than the receive that was next, which stays.
    TooLong,
    /// It names memory that it must not use.
    Access,
    /// No room for a record, or for one more range of it.
    NoRecord,
    /// A segment of a message that has ended, or was there before.
    Late,
}

/// The reason as docs/datagram-iwarp.md section 4.2 names it.
impl fmt::Display for Dropped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::State => "state",
            Self::Qkey => "Q_Key",
            Self::NoReceive => "no receive",
            Self::TooLong => "too long",
            Self::Access => "access",
            Self::NoRecord => "no record",
            Self::Late => "late",
        })
    }
}

/// Datagrams that were dropped, by reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[allow(missing_docs)]
pub struct Drops {
    pub state: u64,
    pub qkey: u64,
    pub no_receive: u64,
    pub too_long: u64,
    /// The lower layer refused them on the way out: no route, a firewall.
    pub unsent: u64,
    /// Sent, and dropped by peers that said so. There may be more of them than were reported.
    pub by_peer: u64,
    /// Segments that named memory which they must not use.
    pub access: u64,
    /// Segments of Write-Records that found no room for a record, or for one more range of it.
    pub no_record: u64,
    /// Messages of an unreliable connection of which a part did not come.
    pub incomplete: u64,
}

impl Drops {
    /// Counts one more. (Of a message that was there before, nothing is lost.)
    pub(super) fn count(&mut self, dropped: Dropped) {
        let counter = match dropped {
            Dropped::State => &mut self.state,
            Dropped::Qkey => &mut self.qkey,
            Dropped::NoReceive => &mut self.no_receive,
            Dropped::TooLong => &mut self.too_long,
            Dropped::Access => &mut self.access,
            Dropped::NoRecord => &mut self.no_record,
            Dropped::Late => return,
        };
        *counter += 1;
    }
}

impl std::ops::AddAssign for Drops {
    fn add_assign(&mut self, other: Self) {
        self.state += other.state;
        self.qkey += other.qkey;
        self.no_receive += other.no_receive;
        self.too_long += other.too_long;
        self.unsent += other.unsent;
        self.by_peer += other.by_peer;
        self.access += other.access;
        self.no_record += other.no_record;
        self.incomplete += other.incomplete;
    }
}

/// Writes the area of the routing header of a datagram with `len` bytes into a scatter list; says whether its
/// memory could be used. With IPv4 the first half stays as the program left it.
pub(super) fn write_grh<'a>(
    local: &mut MrCache,
    pd: u32,
    sges: impl Iterator<Item = &'a Sge>,
    arrival: &Arrival,
    len: usize,
) -> bool {
    let mut area = [0; grh::LEN];
    Grh::of_datagram(arrival.from, arrival.to, u16::try_from(len).unwrap_or(u16::MAX)).emit(&mut area);
    let skip = if area[0] == 0 { grh::LEN - grh::V4_LEN } else { 0 };
    copy_in(local, pd, sges, skip as u32, area.get(skip..).unwrap_or(&[]))
}

/// Copies bytes to their place in a scatter list, `offset` bytes from its start; says whether its memory
/// could be used.
pub(super) fn copy_in<'a>(
    local: &mut MrCache,
    pd: u32,
    sges: impl Iterator<Item = &'a Sge>,
    offset: u32,
    mut bytes: &[u8],
) -> bool {
    let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    slice_sges(sges, offset, len).all(|part| {
        match local.with(part, pd, Access::LOCAL_WRITE, |place| mem::copy_in(place, bytes)) {
            Ok(Ok(n)) => {
                bytes = bytes.get(n..).unwrap_or(&[]);
                true
            }
            _ => false,
        }
    })
}

/// Appends `len` bytes of a gather list to `out`, from `offset` bytes after its start; says whether its
/// memory could be used. If not, `out` may be longer by some of the bytes.
pub(super) fn copy_out<'a>(
    local: &mut MrCache,
    pd: u32,
    sges: impl Iterator<Item = &'a Sge>,
    offset: u32,
    len: u32,
    out: &mut Vec<u8>,
) -> bool {
    slice_sges(sges, offset, len).all(|part| {
        let copied = local.with(part, pd, Access::empty(), |memory| mem::copy_out(memory, out));
        matches!(copied, Ok(Ok(())))
    })
}

/// Appends the bytes of an inline post to `out`.
pub(super) fn copy_inline(sges: &[Sge], out: &mut Vec<u8>) {
    for sge in sges {
        let start = out.len();
        out.resize(start + sge.length as usize, 0);
        let place = out.get_mut(start..).unwrap_or(&mut []);
        mem::copy_inline(place, mem::MemSeg { addr: sge.addr, len: sge.length as usize });
    }
}
