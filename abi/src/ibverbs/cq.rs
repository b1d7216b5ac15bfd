//! Completion queues, in the two forms of the verbs: `ibv_poll_cq`, and the extended form that reads one
//! completion at a time through accessors.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

use lock_api::RawMutex as _;
use uwarp_abi_types::verbs::*;
use uwarp_driver::Nic;
use uwarp_driver::quota::Place;
use uwarp_process::RawMutex;
use uwarp_rnic::{Cq, Wc};

use super::clock;
use super::context::Context;
use super::event::{AsyncEvents, CChannel, CompletionEvents, cookie};
use super::mr::CPd;
use super::parent;
use crate::convention::{Code, Negative, PlainCode};
use crate::failure::{Failure, required};
use crate::object::{self, Object, Use, Users, Visible, look, zeroed};
use crate::{deferred, entry, jumps, slot};

/// A completion queue. It always has room for the extended form, which begins with the plain one.
#[repr(C)]
pub struct CCq {
    c: Visible<ibv_cq_ex>,
    /// The RNIC's.
    pub cq: Arc<Cq>,
    nic: Arc<Nic>,
    /// Queue pairs on it.
    pub users: Users,
    /// Its completion events, if it has a channel.
    pub events: Option<Arc<CompletionEvents>>,
    /// Its asynchronous events.
    pub async_events: Arc<AsyncEvents>,
    reader: Reader,
    _place: Place,
    _domain: Option<Use>,
    _channel: Option<Use>,
    _context: Use,
}

// SAFETY: repr(C), the C structure first; `ibv_cq` is the beginning of `ibv_cq_ex` (asserted below).
unsafe impl Object for CCq {
    type C = ibv_cq;
    const NAME: &'static str = "cq";
}

const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(ibv_cq, context) == offset_of!(ibv_cq_ex, context));
    assert!(offset_of!(ibv_cq, channel) == offset_of!(ibv_cq_ex, channel));
    assert!(offset_of!(ibv_cq, async_events_completed) == offset_of!(ibv_cq_ex, async_events_completed));
    // A completion is copied as it is.
    assert!(size_of::<Wc>() == size_of::<ibv_wc>() && align_of::<Wc>() == align_of::<ibv_wc>());
    assert!(offset_of!(Wc, wr_id) == offset_of!(ibv_wc, wr_id));
    assert!(offset_of!(Wc, status) == offset_of!(ibv_wc, status));
    assert!(offset_of!(Wc, opcode) == offset_of!(ibv_wc, opcode));
    assert!(offset_of!(Wc, vendor_err) == offset_of!(ibv_wc, vendor_err));
    assert!(offset_of!(Wc, byte_len) == offset_of!(ibv_wc, byte_len));
    assert!(offset_of!(Wc, imm_or_inv) == offset_of!(ibv_wc, anon_1));
    assert!(offset_of!(Wc, qp_num) == offset_of!(ibv_wc, qp_num));
    assert!(offset_of!(Wc, src_qp) == offset_of!(ibv_wc, src_qp));
    assert!(offset_of!(Wc, flags) == offset_of!(ibv_wc, wc_flags));
    assert!(offset_of!(Wc, pkey_index) == offset_of!(ibv_wc, pkey_index));
    assert!(offset_of!(Wc, slid) == offset_of!(ibv_wc, slid));
    assert!(offset_of!(Wc, sl) == offset_of!(ibv_wc, sl));
    assert!(offset_of!(Wc, dlid_path_bits) == offset_of!(ibv_wc, dlid_path_bits));
};

/// The completion that the extended accessors read, held from `start_poll` to `end_poll`.
struct Reader {
    lock: RawMutex<0>,
    current: UnsafeCell<Option<Wc>>,
}

// SAFETY: `current` is used by the thread that holds `lock`, or by the only thread if the program promised
// there is one.
unsafe impl Sync for Reader {}

/// What extended completion queues can deliver.
const WC_FLAGS: u64 = (IBV_WC_EX_WITH_BYTE_LEN
    | IBV_WC_EX_WITH_IMM
    | IBV_WC_EX_WITH_QP_NUM
    | IBV_WC_EX_WITH_SRC_QP
    | IBV_WC_EX_WITH_SLID
    | IBV_WC_EX_WITH_SL
    | IBV_WC_EX_WITH_DLID_PATH_BITS
    | TIMES as u32) as u64;

/// Those that need the time of each completion.
const TIMES: u64 =
    (IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK) as u64;

/// ibv_create_cq(3).
///
/// # Safety
/// Pointers are live objects or, for `channel`, NULL.
pub unsafe fn create(
    context: *mut ibv_context,
    cqe: u32,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: u32,
) -> Result<*mut ibv_cq, Failure> {
    // SAFETY: plain C data.
    let mut attr: ibv_cq_init_attr_ex = unsafe { zeroed() };
    (attr.cqe, attr.cq_context, attr.channel, attr.comp_vector) = (cqe, cq_context, channel, comp_vector);
    // SAFETY: the caller's promise.
    unsafe { create_with(context, &attr, None) }
}

/// The same with the attributes of both shapes. `domain`: the parent domain it is made in.
///
/// # Safety
/// As [`create`].
unsafe fn create_with(
    context: *mut ibv_context,
    attr: &ibv_cq_init_attr_ex,
    domain: Option<&CPd>,
) -> Result<*mut ibv_cq, Failure> {
    let ibv_cq_init_attr_ex { cqe, cq_context, channel, comp_vector, .. } = *attr;
    // SAFETY: the caller's promise.
    let opened = unsafe { look::<Context>(context) }?;
    let on = if channel.is_null() {
        None
    } else {
        // SAFETY: the caller's promise.
        Some(unsafe { look::<CChannel>(channel) }?)
    };
    if cqe == 0 || cqe > opened.nic.limits().max_cqe {
        return Err(Failure::invalid("cqe is outside what the device allows"));
    }
    if comp_vector != 0 {
        return Err(Failure::invalid("the device has one completion vector, number 0"));
    }
    let place = opened.device.made.cqs.take(opened.nic.limits().max_cq)?;
    object::give_with(|address: *mut ibv_cq| {
        let async_events = AsyncEvents::new(opened);
        let events = on.map(CompletionEvents::new);
        let sink = events.clone().map(|events| events as Arc<_>);
        let clock = (attr.wc_flags & TIMES != 0).then_some(clock::raw as fn() -> u64);
        let cq = Cq::with_clock(cqe, cookie(address), sink, async_events.clone(), clock);
        if let Some(events) = &events {
            events.belongs_to(&cq);
        }
        // SAFETY: plain C data.
        let mut c: ibv_cq_ex = unsafe { zeroed() };
        c.context = context;
        c.channel = channel;
        c.cq_context = cq_context;
        c.cqe = cqe.cast_signed();
        if let Some(on) = on {
            // SAFETY: the channel is alive; the member is for information only.
            unsafe { (*object::address(on)).refcnt += 1 };
        }
        Ok(CCq {
            c: Visible::new(c),
            cq,
            nic: opened.nic.clone(),
            users: Users::default(),
            events,
            async_events,
            _place: place,
            reader: Reader { lock: RawMutex::INIT, current: UnsafeCell::new(None) },
            _domain: domain.map(|domain| domain.users.hold()),
            _channel: on.map(|on| on.users.hold()),
            _context: opened.users.hold(),
        })
    })
}

/// ibv_destroy_cq(3): waits until the program has acknowledged the events it took.
///
/// # Safety
/// `cq` is alive or NULL, and not used any more if this succeeds.
pub unsafe fn destroy(cq: *mut ibv_cq) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        let queue = look::<CCq>(cq)?;
        queue.users.none()?;
        if let Some(events) = &queue.events {
            events.close(cookie(cq));
            (*(*cq).channel).refcnt -= 1;
        }
        queue.async_events.close(cookie(cq));
        drop(object::take::<CCq>(cq)?);
    }
    Ok(())
}

entry! {
    /// ibv_create_cq(3).
    fn ibv_create_cq(
        context: *mut ibv_context,
        cqe: c_int,
        cq_context: *mut c_void,
        channel: *mut ibv_comp_channel,
        comp_vector: c_int,
    ) -> *mut ibv_cq {
        let cqe = u32::try_from(cqe).map_err(|_| Failure::invalid("cqe is negative"))?;
        create(context, cqe, cq_context, channel, comp_vector.cast_unsigned())
    }

    /// ibv_resize_cq(3).
    fn ibv_resize_cq(cq: *mut ibv_cq, cqe: c_int) -> Code {
        let queue = look::<CCq>(cq)?;
        let depth = u32::try_from(cqe).map_err(|_| Failure::invalid("cqe is negative"))?;
        if depth > queue.nic.limits().max_cqe {
            return Err(Failure::invalid("cqe is more than the device allows"));
        }
        queue.cq.resize(depth)?;
        (*cq).cqe = cqe;
        Ok(())
    }

    /// ibv_destroy_cq(3): waits until the program has acknowledged the events it took.
    fn ibv_destroy_cq(cq: *mut ibv_cq) -> Code {
        destroy(cq)
    }

    /// ibv_get_cq_event(3).
    fn ibv_ack_cq_events(cq: *mut ibv_cq, nevents: u32) -> () {
        let _deferred = jumps::defer();
        let queue = look::<CCq>(cq)?;
        (*cq).comp_events_completed = (*cq).comp_events_completed.wrapping_add(nevents);
        if let Some(events) = &queue.events {
            events.acknowledged(nevents as usize);
        }
        Ok(())
    }
}

slot! {
    /// ibv_poll_cq(3). Makes progress in the caller's thread when there is no completion.
    hot fn poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> Negative {
        let queue = look::<CCq>(cq)?;
        let max = usize::try_from(num_entries).map_err(|_| Failure::invalid("num_entries is negative"))?;
        let mut to = wc.cast::<Wc>();
        let found = queue.nic.poll_cq(&queue.cq, max, |wc| {
            // At most `max` times, so within the program's array.
            to.write(wc);
            to = to.add(1);
        });
        if found == 0 && queue.cq.overflowed() {
            return Err(Failure::new(libc::EIO, "the completion queue has overflowed"));
        }
        Ok(found as c_int)
    }

    /// ibv_req_notify_cq(3).
    hot fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> Code {
        let queue = look::<CCq>(cq)?;
        queue.cq.arm(solicited_only != 0);
        Ok(())
    }

    /// ibv_create_cq_ex(3).
    verb fn create_cq_ex(context: *mut ibv_context, attr: *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex {
        let attr = &*required(attr, "cq_attr")?;
        let known = IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD;
        if attr.comp_mask & !known != 0 {
            return Err(Failure::invalid("unknown members in comp_mask"));
        }
        let domain = if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_PD != 0 {
            Some(parent::look_at_parent(attr.parent_domain, context)?)
        } else {
            None
        };
        let flags = if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0 { attr.flags } else { 0 };
        if flags & !(IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN) != 0 {
            return Err(Failure::invalid("unknown creation flags"));
        }
        if flags & IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN != 0 {
            return Err(Failure::unsupported("ignoring overruns"));
        }
        if attr.wc_flags & !WC_FLAGS != 0 {
            return Err(Failure::unsupported("VLANs, flow tags and tag matching in completions"));
        }
        let cq: *mut ibv_cq_ex = create_with(context, attr, domain)?.cast();
        (*cq).start_poll = Some(jumps::choose(start_poll, deferred_start_poll));
        (*cq).next_poll = Some(jumps::choose(next_poll, deferred_next_poll));
        (*cq).end_poll = Some(jumps::choose(end_poll, deferred_end_poll));
        (*cq).read_opcode = Some(read_opcode);
        (*cq).read_vendor_err = Some(read_vendor_err);
        (*cq).read_byte_len = Some(read_byte_len);
        (*cq).read_imm_data = Some(read_imm_data);
        (*cq).read_qp_num = Some(read_qp_num);
        (*cq).read_src_qp = Some(read_src_qp);
        (*cq).read_wc_flags = Some(read_wc_flags);
        (*cq).read_slid = Some(read_slid);
        (*cq).read_sl = Some(read_sl);
        (*cq).read_dlid_path_bits = Some(read_dlid_path_bits);
        if attr.wc_flags & TIMES != 0 {
            (*cq).read_completion_ts = Some(read_completion_ts);
            (*cq).read_completion_wallclock_ns = Some(read_completion_wallclock_ns);
        }
        Ok(cq)
    }

    /// `ibv_start_poll`: 0 with a completion to read, `ENOENT` when there is none (without a log line or
    /// `errno`).
    hot fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> PlainCode {
        if attr.as_ref().is_some_and(|attr| attr.comp_mask != 0) {
            return Err(Failure::invalid("unknown members in comp_mask"));
        }
        let queue = look::<CCq>(cq.cast())?;
        // Locked even if the program promised to use one thread only: an uncontended lock costs nanoseconds,
        // and a broken promise does no harm.
        queue.reader.lock.lock();
        let got = advance(queue, cq);
        if !matches!(got, Ok(0)) {
            queue.reader.lock.unlock();
        }
        got
    }

    /// `ibv_next_poll`.
    hot fn next_poll(cq: *mut ibv_cq_ex) -> PlainCode {
        advance(look::<CCq>(cq.cast())?, cq)
    }

    /// `ibv_end_poll`.
    hot fn end_poll(cq: *mut ibv_cq_ex) -> () {
        let queue = look::<CCq>(cq.cast())?;
        *queue.reader.current.get() = None;
        queue.reader.lock.unlock();
        Ok(())
    }

    /// `ibv_wc_read_opcode`.
    hot fn read_opcode(cq: *mut ibv_cq_ex) -> u32 {
        read(cq, |wc| wc.opcode as u32)
    }

    /// `ibv_wc_read_vendor_err`.
    hot fn read_vendor_err(cq: *mut ibv_cq_ex) -> u32 {
        read(cq, |wc| wc.vendor_err)
    }

    /// `ibv_wc_read_byte_len`.
    hot fn read_byte_len(cq: *mut ibv_cq_ex) -> u32 {
        read(cq, |wc| wc.byte_len)
    }

    /// `ibv_wc_read_imm_data` and, as it is, `ibv_wc_read_invalidated_rkey`.
    hot fn read_imm_data(cq: *mut ibv_cq_ex) -> u32 {
        read(cq, |wc| wc.imm_or_inv)
    }

    /// `ibv_wc_read_qp_num`.
    hot fn read_qp_num(cq: *mut ibv_cq_ex) -> u32 {
        read(cq, |wc| wc.qp_num)
    }

    /// `ibv_wc_read_src_qp`.
    hot fn read_src_qp(cq: *mut ibv_cq_ex) -> u32 {
        read(cq, |wc| wc.src_qp)
    }

    /// `ibv_wc_read_wc_flags`.
    hot fn read_wc_flags(cq: *mut ibv_cq_ex) -> u32 {
        read(cq, |wc| wc.flags.bits())
    }

    /// `ibv_wc_read_slid`.
    hot fn read_slid(cq: *mut ibv_cq_ex) -> u32 {
        read(cq, |wc| wc.slid.into())
    }

    /// `ibv_wc_read_sl`.
    hot fn read_sl(cq: *mut ibv_cq_ex) -> u8 {
        read(cq, |wc| wc.sl)
    }

    /// `ibv_wc_read_dlid_path_bits`.
    hot fn read_dlid_path_bits(cq: *mut ibv_cq_ex) -> u8 {
        read(cq, |wc| wc.dlid_path_bits)
    }

    /// `ibv_wc_read_completion_ts`: in ticks of the clock that `ibv_query_rt_values_ex` reads.
    hot fn read_completion_ts(cq: *mut ibv_cq_ex) -> u64 {
        Ok(look::<CCq>(cq.cast())?.cq.polled_at())
    }

    /// `ibv_wc_read_completion_wallclock_ns`: nanoseconds since 1970.
    hot fn read_completion_wallclock_ns(cq: *mut ibv_cq_ex) -> u64 {
        Ok(clock::wall(look::<CCq>(cq.cast())?.cq.polled_at()))
    }
}

deferred! {
    deferred_poll_cq = poll_cq: (cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int;
    deferred_req_notify_cq = req_notify_cq: (cq: *mut ibv_cq, solicited_only: c_int) -> c_int;
    deferred_start_poll = start_poll: (cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int;
    deferred_next_poll = next_poll: (cq: *mut ibv_cq_ex) -> c_int;
    deferred_end_poll = end_poll: (cq: *mut ibv_cq_ex) -> ();
}

/// Makes the next completion the one to read.
///
/// # Safety
/// `cq` is the C side of `queue`; the caller holds the reader's lock.
unsafe fn advance(queue: &CCq, cq: *mut ibv_cq_ex) -> Result<c_int, Failure> {
    let mut next = None;
    queue.nic.poll_cq(&queue.cq, 1, |wc| next = Some(wc));
    // SAFETY: the caller holds the lock.
    unsafe { *queue.reader.current.get() = next };
    match next {
        Some(wc) => {
            // SAFETY: alive, and read by the thread that polls.
            unsafe { ((*cq).wr_id, (*cq).status) = (wc.wr_id, wc.status as ibv_wc_status) };
            Ok(0)
        }
        None if queue.cq.overflowed() => Err(Failure::new(libc::EIO, "the completion queue has overflowed")),
        None => Ok(libc::ENOENT),
    }
}

/// # Safety
/// `cq` is alive and the caller is between `start_poll` and `end_poll`.
unsafe fn read<T: Default>(cq: *mut ibv_cq_ex, member: impl FnOnce(&Wc) -> T) -> Result<T, Failure> {
    // SAFETY: the caller's promise.
    let queue = unsafe { look::<CCq>(cq.cast()) }?;
    // SAFETY: the caller holds the lock, by its promise.
    Ok(unsafe { &*queue.reader.current.get() }.as_ref().map(member).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn standard_flags_are_all_there() {
        // IBV_WC_STANDARD_FLAGS of verbs.h, which programs ask for by default.
        assert_eq!(WC_FLAGS & !TIMES, 0x7f);
    }
}
