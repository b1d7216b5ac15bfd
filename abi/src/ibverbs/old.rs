//! Version 1.0 of libibverbs' interface (2006), for programs that were linked then. Its structures have no
//! room for later members, so each object of such a program is a small structure of the old form that points
//! to today's object. The context that the program sees in an object is the old one, and leads back to it.
//!
//! These functions are exported under the version node IBVERBS_1.0 only; `abi/symbols.txt` marks them `old`.
//! They call functions of today, which are declared here under other names and bound to ours when the library
//! is linked.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;

use uwarp_abi_types::verbs::*;
use uwarp_process::{Mutex, PerProcess};

use super::async_event::Of;
use crate::jumps;

/// Defines structures of 2006.
macro_rules! structures {
    ($($(#[$meta:meta])* $name:ident { $($member:ident: $type:ty,)* })*) => {$(
        $(#[$meta])*
        #[repr(C)]
        #[allow(missing_docs)]
        pub struct $name { $(pub $member: $type,)* }
    )*};
}

/// A mutex and a condition variable, which only the library of 2006 used.
type Waiting = [u64; (size_of::<libc::pthread_mutex_t>() + size_of::<libc::pthread_cond_t>()) / 8];

structures! {
    OldDevice { _obsolete: [*mut c_void; 2], real: *mut ibv_device, _ops: [*mut c_void; 2], }
    OldContext {
        device: *mut OldDevice,
        _before: [*mut c_void; 7],
        poll_cq: unsafe extern "C" fn(*mut OldCq, c_int, *mut ibv_wc) -> c_int,
        req_notify_cq: unsafe extern "C" fn(*mut OldCq, c_int) -> c_int,
        _between: [*mut c_void; 7],
        post_srq_recv: unsafe extern "C" fn(*mut OldSrq, *mut OldRecvWr, *mut *mut OldRecvWr) -> c_int,
        _queue_pairs: [*mut c_void; 4],
        post_send: unsafe extern "C" fn(*mut OldQp, *mut OldSendWr, *mut *mut OldSendWr) -> c_int,
        post_recv: unsafe extern "C" fn(*mut OldQp, *mut OldRecvWr, *mut *mut OldRecvWr) -> c_int,
        _after: [*mut c_void; 4],
        cmd_fd: c_int,
        async_fd: c_int,
        num_comp_vectors: c_int,
        real: *mut ibv_context,
    }
    OldPd { context: *mut OldContext, handle: u32, real: *mut ibv_pd, }
    OldMr { context: *mut OldContext, pd: *mut OldPd, handle: u32, lkey: u32, rkey: u32, real: *mut ibv_mr, }
    OldCq {
        context: *mut OldContext,
        cq_context: *mut c_void,
        handle: u32,
        cqe: c_int,
        _waiting: Waiting,
        comp_events_completed: u32,
        async_events_completed: u32,
        real: *mut ibv_cq,
    }
    OldSrq {
        context: *mut OldContext,
        srq_context: *mut c_void,
        pd: *mut OldPd,
        handle: u32,
        _waiting: Waiting,
        events_completed: u32,
        real: *mut ibv_srq,
    }
    OldQp {
        context: *mut OldContext,
        qp_context: *mut c_void,
        pd: *mut OldPd,
        send_cq: *mut OldCq,
        recv_cq: *mut OldCq,
        srq: *mut OldSrq,
        handle: u32,
        qp_num: u32,
        state: ibv_qp_state,
        qp_type: ibv_qp_type,
        _waiting: Waiting,
        events_completed: u32,
        real: *mut ibv_qp,
    }
    OldAh { context: *mut OldContext, pd: *mut OldPd, handle: u32, real: *mut ibv_ah, }
    OldQpInitAttr {
        qp_context: *mut c_void,
        send_cq: *mut OldCq,
        recv_cq: *mut OldCq,
        srq: *mut OldSrq,
        cap: ibv_qp_cap,
        qp_type: ibv_qp_type,
        sq_sig_all: c_int,
    }
    OldRecvWr { next: *mut Self, wr_id: u64, sg_list: *mut ibv_sge, num_sge: c_int, }
    /// Today `wr_id` comes first. The other members up to the union `wr` are the same as today; the union's
    /// longest member was that of atomics.
    OldSendWr {
        next: *mut Self,
        wr_id: u64,
        _members: [u64; 3],
        ah: *mut OldAh,
        _wr: [u64; 3],
    }
}

const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(OldSendWr, ah) == offset_of!(ibv_send_wr, wr));
    assert!(size_of::<OldSendWr>() == offset_of!(ibv_send_wr, qp_type));
    // As a compiler of 2006 laid them out.
    assert!(offset_of!(OldContext, poll_cq) == 64 && offset_of!(OldContext, post_srq_recv) == 136);
    assert!(offset_of!(OldContext, post_send) == 176 && offset_of!(OldContext, cmd_fd) == 224);
};

// "C-unwind": some are cancellation points.
unsafe extern "C-unwind" {
    #[link_name = "ibv_get_device_list"]
    fn get_device_list(num: *mut c_int) -> *mut *mut ibv_device;
    #[link_name = "ibv_free_device_list"]
    fn free_device_list(list: *mut *mut ibv_device);
    #[link_name = "ibv_get_device_name"]
    fn get_device_name(device: *mut ibv_device) -> *const c_char;
    #[link_name = "ibv_get_device_guid"]
    fn get_device_guid(device: *mut ibv_device) -> u64;
    #[link_name = "ibv_open_device"]
    fn open_device(device: *mut ibv_device) -> *mut ibv_context;
    #[link_name = "ibv_close_device"]
    fn close_device(context: *mut ibv_context) -> c_int;
    #[link_name = "ibv_get_async_event"]
    fn get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int;
    #[link_name = "ibv_ack_async_event"]
    fn ack_async_event(event: *mut ibv_async_event);
    #[link_name = "ibv_query_device"]
    fn query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int;
    #[link_name = "ibv_query_port"]
    fn query_port(context: *mut ibv_context, port: u8, attr: *mut _compat_ibv_port_attr) -> c_int;
    #[link_name = "ibv_query_gid"]
    fn query_gid(context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid) -> c_int;
    #[link_name = "ibv_query_pkey"]
    fn query_pkey(context: *mut ibv_context, port: u8, index: c_int, pkey: *mut u16) -> c_int;
    #[link_name = "ibv_alloc_pd"]
    fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd;
    #[link_name = "ibv_dealloc_pd"]
    fn dealloc_pd(pd: *mut ibv_pd) -> c_int;
    #[link_name = "ibv_reg_mr"]
    fn reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr;
    #[link_name = "ibv_dereg_mr"]
    fn dereg_mr(mr: *mut ibv_mr) -> c_int;
    #[link_name = "ibv_create_cq"]
    fn create_cq(
        context: *mut ibv_context,
        cqe: c_int,
        cq_context: *mut c_void,
        channel: *mut ibv_comp_channel,
        vector: c_int,
    ) -> *mut ibv_cq;
    #[link_name = "ibv_resize_cq"]
    fn resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int;
    #[link_name = "ibv_destroy_cq"]
    fn destroy_cq(cq: *mut ibv_cq) -> c_int;
    #[link_name = "ibv_get_cq_event"]
    fn get_cq_event(
        channel: *mut ibv_comp_channel,
        cq: *mut *mut ibv_cq,
        cq_context: *mut *mut c_void,
    ) -> c_int;
    #[link_name = "ibv_ack_cq_events"]
    fn ack_cq_events(cq: *mut ibv_cq, count: u32);
    #[link_name = "ibv_create_srq"]
    fn create_srq(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq;
    #[link_name = "ibv_modify_srq"]
    fn modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int;
    #[link_name = "ibv_query_srq"]
    fn query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int;
    #[link_name = "ibv_destroy_srq"]
    fn destroy_srq(srq: *mut ibv_srq) -> c_int;
    #[link_name = "ibv_create_qp"]
    fn create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp;
    #[link_name = "ibv_query_qp"]
    fn query_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int, init: *mut ibv_qp_init_attr) -> c_int;
    #[link_name = "ibv_modify_qp"]
    fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int;
    #[link_name = "ibv_destroy_qp"]
    fn destroy_qp(qp: *mut ibv_qp) -> c_int;
    #[link_name = "ibv_create_ah"]
    fn create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah;
    #[link_name = "ibv_destroy_ah"]
    fn destroy_ah(ah: *mut ibv_ah) -> c_int;
    #[link_name = "ibv_attach_mcast"]
    fn attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int;
    #[link_name = "ibv_detach_mcast"]
    fn detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int;
}

/// Contexts of programs of 2006, old and real: the functions for completion channels are the same in both
/// versions and get either of the two.
static CONTEXTS: PerProcess<Mutex<HashMap<usize, usize>, 29>> = PerProcess::new(Mutex::default);

/// The context of today behind one that may be old.
pub fn real_context(context: *mut ibv_context) -> *mut ibv_context {
    let real = CONTEXTS.lock().get(&context.addr()).copied();
    real.map_or(context, std::ptr::with_exposed_provenance_mut)
}

/// Defines functions of the old interface. Their bodies only convert arguments and call the functions of
/// today, which handle forks, panics and errors.
macro_rules! old {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? $body:block)*) => {$(
        /// The function of this name in version 1.0 of the interface.
        ///
        /// # Safety
        /// The pointers are what the C interface says, and objects are of the old form.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name($($arg: $type),*) $(-> $ret)? {
            // SAFETY: the caller's promise.
            unsafe { $body }
        }
    )*};
}

/// A new object of the old form for `real`, unless that is NULL.
fn give<R, O>(real: *mut R, old: impl FnOnce(*mut R) -> O) -> *mut O {
    if real.is_null() { null_mut() } else { Box::into_raw(Box::new(old(real))) }
}

/// Frees the old object after its real one was destroyed.
///
/// # Safety
/// `old` came from [`give`], and is not used any more if this returns 0.
unsafe fn taken<O>(result: c_int, old: *mut O) -> c_int {
    if result == 0 {
        // SAFETY: the caller's promise.
        drop(unsafe { Box::from_raw(old) });
    }
    result
}

unsafe extern "C" fn poll_cq(cq: *mut OldCq, count: c_int, wc: *mut ibv_wc) -> c_int {
    let _deferred = jumps::defer();
    // SAFETY: the caller's promise; the table of a context of ours is full.
    unsafe { super::cq::poll_cq((*cq).real, count, wc) }
}

unsafe extern "C" fn req_notify_cq(cq: *mut OldCq, solicited: c_int) -> c_int {
    let _deferred = jumps::defer();
    // SAFETY: as above.
    unsafe { super::cq::req_notify_cq((*cq).real, solicited) }
}

/// Calls `post` for each work request of a list; stores in `bad` which one was refused. One at a time: speed
/// does not matter for programs of 2006.
///
/// # Safety
/// `list` is a list of old work requests, `bad` is valid for a write.
unsafe fn each<W>(
    list: *mut W,
    bad: *mut *mut W,
    next: impl Fn(&W) -> *mut W,
    post: impl Fn(&W) -> c_int,
) -> c_int {
    let _deferred = jumps::defer();
    let mut at = list;
    // SAFETY: the caller's promise, here and below.
    while let Some(wr) = unsafe { at.as_ref() } {
        let result = post(wr);
        if result != 0 {
            // SAFETY: as above.
            unsafe { *bad = at };
            return result;
        }
        at = next(wr);
    }
    0
}

impl OldRecvWr {
    fn new_form(&self) -> ibv_recv_wr {
        let Self { wr_id, sg_list, num_sge, .. } = *self;
        ibv_recv_wr { wr_id, next: null_mut(), sg_list, num_sge }
    }
}

unsafe extern "C" fn post_srq_recv(srq: *mut OldSrq, wr: *mut OldRecvWr, bad: *mut *mut OldRecvWr) -> c_int {
    let post = |wr: &OldRecvWr| {
        let (mut new, mut refused) = (wr.new_form(), null_mut());
        // SAFETY: as above.
        unsafe { super::srq::post_srq_recv((*srq).real, &raw mut new, &raw mut refused) }
    };
    // SAFETY: as above.
    unsafe { each(wr, bad, |wr| wr.next, post) }
}

unsafe extern "C" fn post_recv(qp: *mut OldQp, wr: *mut OldRecvWr, bad: *mut *mut OldRecvWr) -> c_int {
    let post = |wr: &OldRecvWr| {
        let (mut new, mut refused) = (wr.new_form(), null_mut());
        // SAFETY: as above.
        unsafe { super::post::post_recv((*qp).real, &raw mut new, &raw mut refused) }
    };
    // SAFETY: as above.
    unsafe { each(wr, bad, |wr| wr.next, post) }
}

unsafe extern "C" fn post_send(qp: *mut OldQp, wr: *mut OldSendWr, bad: *mut *mut OldSendWr) -> c_int {
    // SAFETY: as above; the old form is shorter than today's, and has its members (asserted above) but for
    // the first two.
    let post = |wr: &OldSendWr| unsafe {
        let mut new: ibv_send_wr = crate::object::zeroed();
        let old = std::ptr::from_ref(wr).cast::<u8>();
        std::ptr::copy_nonoverlapping(old, (&raw mut new).cast::<u8>(), size_of::<OldSendWr>());
        (new.wr_id, new.next) = (wr.wr_id, null_mut());
        if (*qp).qp_type == IBV_QPT_UD && !wr.ah.is_null() {
            new.wr.ud.ah = (*wr.ah).real;
        }
        let mut refused = null_mut();
        super::post::post_send((*qp).real, &raw mut new, &raw mut refused)
    };
    // SAFETY: as above.
    unsafe { each(wr, bad, |wr| wr.next, post) }
}

old! {
    fn uwarp_old_ibv_get_device_list(num: *mut c_int) -> *mut *mut OldDevice {
        let mut count = 0;
        let real = get_device_list(&raw mut count);
        if real.is_null() {
            return null_mut();
        }
        let devices = (0..count as usize).map(|i| {
            give(*real.add(i), |real| OldDevice { _obsolete: [null_mut(); 2], real, _ops: [null_mut(); 2] })
        });
        // As in the library of 2006: private data of the list is in front of its first entry.
        let list: Vec<*mut OldDevice> =
            std::iter::once(real.cast()).chain(devices).chain([null_mut()]).collect();
        if !num.is_null() {
            *num = count;
        }
        Box::into_raw(list.into_boxed_slice()).cast::<*mut OldDevice>().add(1)
    }

    fn uwarp_old_ibv_free_device_list(list: *mut *mut OldDevice) {
        if list.is_null() {
            return;
        }
        let mut count = 0;
        while !(*list.add(count)).is_null() {
            drop(Box::from_raw(*list.add(count)));
            count += 1;
        }
        let first = list.sub(1);
        free_device_list((*first).cast());
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(first, count + 2)));
    }

    fn uwarp_old_ibv_get_device_name(device: *mut OldDevice) -> *const c_char {
        get_device_name((*device).real)
    }

    fn uwarp_old_ibv_get_device_guid(device: *mut OldDevice) -> u64 {
        get_device_guid((*device).real)
    }

    fn uwarp_old_ibv_open_device(device: *mut OldDevice) -> *mut OldContext {
        let old = give(open_device((*device).real), |real| OldContext {
            device,
            _before: [null_mut(); 7],
            poll_cq,
            req_notify_cq,
            _between: [null_mut(); 7],
            post_srq_recv,
            _queue_pairs: [null_mut(); 4],
            post_send,
            post_recv,
            _after: [null_mut(); 4],
            cmd_fd: (*real).cmd_fd,
            async_fd: (*real).async_fd,
            num_comp_vectors: (*real).num_comp_vectors,
            real,
        });
        if !old.is_null() {
            let real = (*old).real.expose_provenance();
            CONTEXTS.lock().insert(old.addr(), real);
        }
        old
    }

    fn uwarp_old_ibv_close_device(context: *mut OldContext) -> c_int {
        let result = close_device((*context).real);
        if result == 0 {
            CONTEXTS.lock().remove(&context.addr());
        }
        taken(result, context)
    }

    fn uwarp_old_ibv_get_async_event(context: *mut OldContext, event: *mut ibv_async_event) -> c_int {
        let result = get_async_event((*context).real, event);
        if result == 0 {
            match Of::event((*event).event_type) {
                Of::Cq => (*event).element.cq = (*(*event).element.cq).cq_context.cast(),
                Of::Srq => (*event).element.srq = (*(*event).element.srq).srq_context.cast(),
                Of::Qp => (*event).element.qp = (*(*event).element.qp).qp_context.cast(),
                Of::Port => {}
            }
        }
        result
    }

    fn uwarp_old_ibv_ack_async_event(event: *mut ibv_async_event) {
        let mut real = *event;
        match Of::event((*event).event_type) {
            Of::Cq => real.element.cq = (*(*event).element.cq.cast::<OldCq>()).real,
            Of::Srq => real.element.srq = (*(*event).element.srq.cast::<OldSrq>()).real,
            Of::Qp => real.element.qp = (*(*event).element.qp.cast::<OldQp>()).real,
            Of::Port => {}
        }
        ack_async_event(&raw mut real);
    }

    fn uwarp_old_ibv_query_device(context: *mut OldContext, attr: *mut ibv_device_attr) -> c_int {
        query_device((*context).real, attr)
    }

    fn uwarp_old_ibv_query_port(
        context: *mut OldContext,
        port: u8,
        attr: *mut _compat_ibv_port_attr,
    ) -> c_int {
        query_port((*context).real, port, attr)
    }

    fn uwarp_old_ibv_query_gid(context: *mut OldContext, port: u8, index: c_int, gid: *mut ibv_gid) -> c_int {
        query_gid((*context).real, port, index, gid)
    }

    fn uwarp_old_ibv_query_pkey(context: *mut OldContext, port: u8, index: c_int, pkey: *mut u16) -> c_int {
        query_pkey((*context).real, port, index, pkey)
    }

    fn uwarp_old_ibv_alloc_pd(context: *mut OldContext) -> *mut OldPd {
        give(alloc_pd((*context).real), |real| OldPd { context, handle: (*real).handle, real })
    }

    fn uwarp_old_ibv_dealloc_pd(pd: *mut OldPd) -> c_int {
        taken(dealloc_pd((*pd).real), pd)
    }

    fn uwarp_old_ibv_reg_mr(pd: *mut OldPd, addr: *mut c_void, length: usize, access: c_int) -> *mut OldMr {
        give(reg_mr((*pd).real, addr, length, access), |real| OldMr {
            context: (*pd).context,
            pd,
            handle: (*real).handle,
            lkey: (*real).lkey,
            rkey: (*real).rkey,
            real,
        })
    }

    fn uwarp_old_ibv_dereg_mr(mr: *mut OldMr) -> c_int {
        taken(dereg_mr((*mr).real), mr)
    }

    fn uwarp_old_ibv_create_cq(
        context: *mut OldContext,
        cqe: c_int,
        cq_context: *mut c_void,
        channel: *mut ibv_comp_channel,
        vector: c_int,
    ) -> *mut OldCq {
        let real = create_cq((*context).real, cqe, null_mut(), channel, vector);
        let old = give(real, |real| OldCq {
            context,
            cq_context,
            handle: (*real).handle,
            cqe: (*real).cqe,
            _waiting: Waiting::default(),
            comp_events_completed: 0,
            async_events_completed: 0,
            real,
        });
        if !old.is_null() {
            (*real).cq_context = old.cast();
        }
        old
    }

    fn uwarp_old_ibv_resize_cq(cq: *mut OldCq, cqe: c_int) -> c_int {
        let result = resize_cq((*cq).real, cqe);
        (*cq).cqe = (*(*cq).real).cqe;
        result
    }

    fn uwarp_old_ibv_destroy_cq(cq: *mut OldCq) -> c_int {
        taken(destroy_cq((*cq).real), cq)
    }

    fn uwarp_old_ibv_get_cq_event(
        channel: *mut ibv_comp_channel,
        cq: *mut *mut OldCq,
        cq_context: *mut *mut c_void,
    ) -> c_int {
        let (mut real, mut old) = (null_mut(), null_mut());
        let result = get_cq_event(channel, &raw mut real, &raw mut old);
        if result == 0 {
            *cq = old.cast();
            *cq_context = (**cq).cq_context;
        }
        result
    }

    fn uwarp_old_ibv_ack_cq_events(cq: *mut OldCq, count: u32) {
        ack_cq_events((*cq).real, count);
    }

    fn uwarp_old_ibv_create_srq(pd: *mut OldPd, attr: *mut ibv_srq_init_attr) -> *mut OldSrq {
        let real = create_srq((*pd).real, attr);
        let old = give(real, |real| OldSrq {
            context: (*pd).context,
            srq_context: (*attr).srq_context,
            pd,
            handle: (*real).handle,
            _waiting: Waiting::default(),
            events_completed: 0,
            real,
        });
        if !old.is_null() {
            (*real).srq_context = old.cast();
        }
        old
    }

    fn uwarp_old_ibv_modify_srq(srq: *mut OldSrq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int {
        modify_srq((*srq).real, attr, mask)
    }

    fn uwarp_old_ibv_query_srq(srq: *mut OldSrq, attr: *mut ibv_srq_attr) -> c_int {
        query_srq((*srq).real, attr)
    }

    fn uwarp_old_ibv_destroy_srq(srq: *mut OldSrq) -> c_int {
        taken(destroy_srq((*srq).real), srq)
    }

    fn uwarp_old_ibv_create_qp(pd: *mut OldPd, attr: *mut OldQpInitAttr) -> *mut OldQp {
        let given = &mut *attr;
        let queue = |cq: *mut OldCq| if cq.is_null() { null_mut() } else { (*cq).real };
        let mut init: ibv_qp_init_attr = crate::object::zeroed();
        (init.send_cq, init.recv_cq) = (queue(given.send_cq), queue(given.recv_cq));
        init.srq = if given.srq.is_null() { null_mut() } else { (*given.srq).real };
        (init.cap, init.qp_type, init.sq_sig_all) = (given.cap, given.qp_type, given.sq_sig_all);
        let real = create_qp((*pd).real, &raw mut init);
        let old = give(real, |real| OldQp {
            context: (*pd).context,
            qp_context: given.qp_context,
            pd,
            send_cq: given.send_cq,
            recv_cq: given.recv_cq,
            srq: given.srq,
            handle: (*real).handle,
            qp_num: (*real).qp_num,
            state: (*real).state,
            qp_type: given.qp_type,
            _waiting: Waiting::default(),
            events_completed: 0,
            real,
        });
        if !old.is_null() {
            (*real).qp_context = old.cast();
            given.cap = init.cap;
        }
        old
    }

    fn uwarp_old_ibv_query_qp(
        qp: *mut OldQp,
        attr: *mut ibv_qp_attr,
        mask: c_int,
        init: *mut OldQpInitAttr,
    ) -> c_int {
        let mut real: ibv_qp_init_attr = crate::object::zeroed();
        let result = query_qp((*qp).real, attr, mask, &raw mut real);
        if result == 0 {
            (*qp).state = (*(*qp).real).state;
            *init = OldQpInitAttr {
                qp_context: (*qp).qp_context,
                send_cq: (*qp).send_cq,
                recv_cq: (*qp).recv_cq,
                srq: (*qp).srq,
                cap: real.cap,
                qp_type: real.qp_type,
                sq_sig_all: real.sq_sig_all,
            };
        }
        result
    }

    fn uwarp_old_ibv_modify_qp(qp: *mut OldQp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
        let result = modify_qp((*qp).real, attr, mask);
        (*qp).state = (*(*qp).real).state;
        result
    }

    fn uwarp_old_ibv_destroy_qp(qp: *mut OldQp) -> c_int {
        taken(destroy_qp((*qp).real), qp)
    }

    fn uwarp_old_ibv_create_ah(pd: *mut OldPd, attr: *mut ibv_ah_attr) -> *mut OldAh {
        give(create_ah((*pd).real, attr), |real| OldAh {
            context: (*pd).context,
            pd,
            handle: (*real).handle,
            real,
        })
    }

    fn uwarp_old_ibv_destroy_ah(ah: *mut OldAh) -> c_int {
        taken(destroy_ah((*ah).real), ah)
    }

    fn uwarp_old_ibv_attach_mcast(qp: *mut OldQp, gid: *const ibv_gid, lid: u16) -> c_int {
        attach_mcast((*qp).real, gid, lid)
    }

    fn uwarp_old_ibv_detach_mcast(qp: *mut OldQp, gid: *const ibv_gid, lid: u16) -> c_int {
        detach_mcast((*qp).real, gid, lid)
    }
}
