//! Posting lists of work requests.

use std::ffi::c_int;

use uwarp_abi_types::verbs::*;
use uwarp_driver::{Qp, QueuePair, Srq};
use uwarp_rnic::qp::UdSendWr;
use uwarp_rnic::{RecvWr, SendFlags, SendOp, SendWr, Sge, VerbsError};
use uwarp_rsocket::OwnWork;

use super::ah::CAh;
use super::mw;
use super::qp::CQp;
use crate::convention::Code;
use crate::failure::Failure;
use crate::object::look;
use crate::{deferred, slot};

const _: () = {
    use std::mem::offset_of;
    // A scatter/gather list is read in place.
    assert!(size_of::<Sge>() == size_of::<ibv_sge>() && align_of::<Sge>() == align_of::<ibv_sge>());
    assert!(offset_of!(Sge, addr) == offset_of!(ibv_sge, addr));
    assert!(offset_of!(Sge, length) == offset_of!(ibv_sge, length));
    assert!(offset_of!(Sge, lkey) == offset_of!(ibv_sge, lkey));
};

/// A scatter/gather list, which is read in place.
///
/// # Safety
/// `list` points to `n` elements that stay until the request is posted.
pub(super) unsafe fn sges<'a, N>(list: *mut ibv_sge, n: N) -> Option<&'a [Sge]>
where
    usize: TryFrom<N>,
{
    match usize::try_from(n) {
        Ok(0) => Some(&[]),
        // SAFETY: the same layout (asserted above), and the caller's promise.
        Ok(n) if !list.is_null() => Some(unsafe { std::slice::from_raw_parts(list.cast::<Sge>(), n) }),
        _ => None,
    }
}

/// A send work request in the RNIC's form.
///
/// # Safety
/// `wr` is a valid request whose scatter/gather list stays until it is posted.
unsafe fn send_wr<'a>(wr: &ibv_send_wr) -> Result<SendWr<'a>, Failure> {
    // SAFETY: the opcode says which members of the unions are valid; all of them are plain numbers.
    let op = unsafe {
        let (stag, to) = (wr.wr.rdma.rkey, wr.wr.rdma.remote_addr);
        match wr.opcode {
            IBV_WR_SEND => SendOp::Send { invalidate: None },
            IBV_WR_SEND_WITH_INV => SendOp::Send { invalidate: Some(wr.anon_1.invalidate_rkey) },
            IBV_WR_SEND_WITH_IMM => SendOp::SendImmediate { imm: wr.anon_1.imm_data.to_ne_bytes() },
            IBV_WR_RDMA_WRITE => SendOp::Write { stag, to },
            IBV_WR_RDMA_WRITE_WITH_IMM => {
                SendOp::WriteImmediate { stag, to, imm: wr.anon_1.imm_data.to_ne_bytes() }
            }
            IBV_WR_RDMA_READ => SendOp::Read { stag, to, invalidate_local: false },
            IBV_WR_BIND_MW => {
                let request = wr.anon_2.bind_mw;
                let op = mw::bind_request(request.mw, request.rkey, &request.bind_info)?;
                return Ok(SendWr { sges: &[], ..of(wr, op) });
            }
            IBV_WR_LOCAL_INV => SendOp::LocalInvalidate { stag: wr.anon_1.invalidate_rkey },
            IBV_WR_ATOMIC_FETCH_AND_ADD => {
                let atomic = wr.wr.atomic;
                SendOp::FetchAdd { stag: atomic.rkey, to: atomic.remote_addr, add: atomic.compare_add }
            }
            IBV_WR_ATOMIC_CMP_AND_SWP => {
                let atomic = wr.wr.atomic;
                let (compare, swap) = (atomic.compare_add, atomic.swap);
                SendOp::CmpSwap { stag: atomic.rkey, to: atomic.remote_addr, compare, swap }
            }
            _ => return Err(Failure::invalid("unknown opcode, or one that is not offered")),
        }
    };
    // SAFETY: the caller's promise.
    let sges = unsafe { sges(wr.sg_list, wr.num_sge) }
        .ok_or_else(|| Failure::invalid("num_sge or sg_list is wrong"))?;
    Ok(SendWr { sges, ..of(wr, op) })
}

/// The request without its scatter/gather list.
#[inline]
fn of<'a>(wr: &ibv_send_wr, op: SendOp) -> SendWr<'a> {
    SendWr { wr_id: wr.wr_id, op, flags: SendFlags::of_program(wr.send_flags), sges: &[] }
}

/// The same of a datagram queue pair.
///
/// # Safety
/// As [`send_wr`]; its address handle is alive.
// Inlined, or its result is moved twice for each datagram of a list, by loads that wait for several stores.
#[inline(always)]
unsafe fn ud_send_wr<'a>(wr: &ibv_send_wr) -> Result<UdSendWr<'a>, Failure> {
    // SAFETY: the caller's promise; the members of a datagram's request are valid.
    unsafe {
        let op = match wr.opcode {
            IBV_WR_SEND => SendOp::Send { invalidate: None },
            IBV_WR_SEND_WITH_IMM => SendOp::SendImmediate { imm: wr.anon_1.imm_data.to_ne_bytes() },
            _ => return Err(Failure::invalid("a datagram queue pair has Sends only")),
        };
        let ud = wr.wr.ud;
        let sges = sges(wr.sg_list, wr.num_sge);
        let sges = sges.ok_or_else(|| Failure::invalid("num_sge or sg_list is wrong"))?;
        Ok(UdSendWr {
            wr: SendWr { sges, ..of(wr, op) },
            ah: &look::<CAh>(ud.ah)?.ah,
            remote_qpn: ud.remote_qpn,
            remote_qkey: ud.remote_qkey,
            job_key: None,
        })
    }
}

/// A list of work requests in C, walked once.
struct List<W> {
    next: *mut W,
    /// The first one that cannot be converted; those before it are posted.
    refused: Option<(*mut W, Failure)>,
}

impl<W> List<W> {
    fn walk<'a, R>(
        &mut self,
        convert: impl Fn(&W) -> Result<R, Failure> + 'a,
        following: impl Fn(&W) -> *mut W + 'a,
    ) -> impl Iterator<Item = R> {
        std::iter::from_fn(move || {
            // SAFETY: a list in C: each element is valid and the last one's successor is NULL.
            let wr = unsafe { self.next.as_ref() }?;
            match convert(wr) {
                Ok(converted) => {
                    self.next = following(wr);
                    Some(converted)
                }
                Err(why) => {
                    self.refused = Some((self.next, why));
                    self.next = std::ptr::null_mut();
                    None
                }
            }
        })
    }
}

/// The `n`th element of a list.
///
/// # Safety
/// The list has that many.
unsafe fn nth<W>(mut wr: *mut W, n: usize, following: impl Fn(&W) -> *mut W) -> *mut W {
    for _ in 0..n {
        // SAFETY: the caller's promise.
        wr = unsafe { following(&*wr) };
    }
    wr
}

/// A queue of receives. A trait rather than a closure, for static dispatch.
pub(super) trait Receives {
    fn post<'a>(&self, wrs: impl Iterator<Item = RecvWr<'a>>) -> Result<(), (usize, VerbsError)>;
}

impl Receives for QueuePair {
    #[inline]
    fn post<'a>(&self, wrs: impl Iterator<Item = RecvWr<'a>>) -> Result<(), (usize, VerbsError)> {
        match self {
            Self::Rc(qp) => qp.post_recv(wrs),
            Self::Ud(qp) => qp.post_recv(wrs),
            Self::Rd(qp) => qp.post_recv(wrs),
            Self::Uc(qp) => qp.post_recv(wrs),
        }
    }
}

impl Receives for Srq {
    #[inline]
    fn post<'a>(&self, wrs: impl Iterator<Item = RecvWr<'a>>) -> Result<(), (usize, VerbsError)> {
        self.post_recv(wrs)
    }
}

/// Posts a list of receives; stores in `bad_wr` which one was refused.
///
/// # Safety
/// `wr` is a valid list that stays until it is posted; `bad_wr` may be written.
#[inline]
pub(super) unsafe fn post_receives(
    to: &impl Receives,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> Result<(), Failure> {
    let mut list = List { next: wr, refused: None };
    let convert = |wr: &ibv_recv_wr| {
        // SAFETY: the caller's promise.
        let sges = unsafe { sges(wr.sg_list, wr.num_sge) };
        let sges = sges.ok_or_else(|| Failure::invalid("num_sge or sg_list is wrong"))?;
        Ok(RecvWr { wr_id: wr.wr_id, sges })
    };
    let posted = to.post(list.walk(convert, |wr| wr.next));
    let (bad, why) = match (posted, list.refused) {
        (Ok(()), None) => return Ok(()),
        (Ok(()), Some(refused)) => refused,
        // SAFETY: the list has more than `index` elements.
        (Err((index, error)), _) => (unsafe { nth(wr, index, |wr| wr.next) }, error.into()),
    };
    // SAFETY: the caller's promise.
    unsafe { *bad_wr = bad };
    Err(why)
}

/// Posts a list of sends to the queue pair of a socket, as far as there is room beside the stream's own. What
/// takes a receive of the peer is refused: those are its stream's.
fn post_own<'a>(
    qp: &Qp,
    own: &OwnWork,
    wrs: impl Iterator<Item = SendWr<'a>>,
) -> Result<(), (usize, VerbsError)> {
    let (mut taken, mut why) = (0, None);
    let counted = wrs.map_while(|wr| {
        let takes_receive = matches!(
            wr.op,
            SendOp::Send { .. } | SendOp::SendImmediate { .. } | SendOp::WriteImmediate { .. }
        );
        if wr.wr_id >= OwnWork::NUMBERS || takes_receive {
            why = Some(VerbsError::Invalid(
                "of a socket's queue pair the receives and the upper half of the numbers are its own",
            ));
        } else if !own.take() {
            why = Some(VerbsError::QueueFull);
        } else {
            taken += 1;
            return Some(wr);
        }
        None
    });
    let result = qp.post_send(counted);
    let posted = result.map_or_else(|(posted, _)| posted, |()| taken as usize);
    own.give_back(taken - posted as u32);
    match (result, why) {
        (Ok(()), Some(why)) => Err((posted, why)),
        (result, _) => result,
    }
}

slot! {
    /// ibv_post_send(3).
    hot fn post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad_wr: *mut *mut ibv_send_wr) -> Code {
        let pair = look::<CQp>(qp).inspect_err(|_| *bad_wr = wr)?;
        let mut list = List { next: wr, refused: None };
        let posted = match &pair.qp {
            QueuePair::Rc(qp) if let Some(own) = &pair.own_work => {
                post_own(qp, own, list.walk(|wr| send_wr(wr), |wr| wr.next))
            }
            QueuePair::Rc(qp) => qp.post_send(list.walk(|wr| send_wr(wr), |wr| wr.next)),
            QueuePair::Ud(qp) => qp.post_send(list.walk(|wr| ud_send_wr(wr), |wr| wr.next)),
            QueuePair::Rd(qp) => qp.post_send(list.walk(|wr| ud_send_wr(wr), |wr| wr.next)),
            QueuePair::Uc(qp) => qp.post_send(list.walk(|wr| send_wr(wr), |wr| wr.next)),
        };
        let (bad, why) = match (posted, list.refused) {
            (Ok(()), None) => return Ok(()),
            (Ok(()), Some(refused)) => refused,
            (Err((index, error)), _) => (nth(wr, index, |wr| wr.next), error.into()),
        };
        *bad_wr = bad;
        Err(why)
    }

    /// ibv_post_recv(3).
    hot fn post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad_wr: *mut *mut ibv_recv_wr) -> Code {
        let pair = look::<CQp>(qp).inspect_err(|_| *bad_wr = wr)?;
        if pair.own_work.is_some() {
            *bad_wr = wr;
            return Err(Failure::invalid("the receives of a socket's queue pair are its stream's"));
        }
        post_receives(&pair.qp, wr, bad_wr)
    }
}

deferred! {
    deferred_post_send = post_send:
        (qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad_wr: *mut *mut ibv_send_wr) -> c_int;
    deferred_post_recv = post_recv:
        (qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad_wr: *mut *mut ibv_recv_wr) -> c_int;
}
