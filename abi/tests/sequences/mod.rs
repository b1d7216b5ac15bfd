//! Arbitrary sequences of C calls on a few objects of each kind, in any order, right or wrong, with valid
//! handles only. Shared by a test and a fuzz target.
//!
//! What must hold: no crash, no panic (which the entry points would turn into EIO), no hang; an object that
//! cannot be destroyed because it is in use returns EBUSY and stays; in the end every object can be destroyed
//! in the right order.

#![allow(unsafe_code)]

mod extended;

use std::ffi::{c_int, c_void};
use std::mem::zeroed;
use std::ptr::null_mut;

use uwarp_abi::ibverbs::async_event::{ibv_ack_async_event, ibv_get_async_event};
use uwarp_abi::ibverbs::cq::{ibv_ack_cq_events, ibv_create_cq, ibv_destroy_cq, ibv_resize_cq};
use uwarp_abi::ibverbs::create_qp::ibv_create_qp;
use uwarp_abi::ibverbs::device::{ibv_free_device_list, ibv_get_device_list, ibv_open_device};
use uwarp_abi::ibverbs::event::{ibv_create_comp_channel, ibv_destroy_comp_channel, ibv_get_cq_event};
use uwarp_abi::ibverbs::mr::{ibv_alloc_pd, ibv_dealloc_pd, ibv_dereg_mr, ibv_reg_mr, ibv_rereg_mr};
use uwarp_abi::ibverbs::qp::{ibv_destroy_qp, ibv_modify_qp, ibv_query_qp};
use uwarp_abi::ibverbs::srq::ibv_destroy_srq;
use uwarp_abi::rdmacm::channel::rdma_create_event_channel;
use uwarp_abi::rdmacm::connection::{
    rdma_accept, rdma_bind_addr, rdma_connect, rdma_disconnect, rdma_listen, rdma_reject, rdma_resolve_addr,
    rdma_resolve_route,
};
use uwarp_abi::rdmacm::event::rdma_ack_cm_event;
use uwarp_abi::rdmacm::id::{
    rdma_create_id, rdma_destroy_id, rdma_get_src_port, rdma_migrate_id, rdma_set_option,
};
use uwarp_abi::rdmacm::qp::{rdma_create_qp, rdma_destroy_qp};
use uwarp_abi::rdmacm::take::rdma_get_cm_event;
use uwarp_abi_types::rdmacm::*;
use uwarp_abi_types::verbs::*;

/// Objects of each kind at a time.
const MOST: usize = 4;
/// Calls of one sequence.
const CALLS: usize = 200;
const MEMORY: usize = 64 << 10;
/// CONNECT_REQUEST of rdma_cm's events.
const CONNECT_REQUEST: u32 = 4;

/// What is opened once: a device, and two channels of connection events. None of them blocks.
struct Fixed {
    context: *mut ibv_context,
    channels: [*mut rdma_event_channel; 2],
}

struct Objects {
    fixed: Fixed,
    pds: Vec<*mut ibv_pd>,
    /// Deallocated; ids may still name them.
    pds_gone: Vec<*mut ibv_pd>,
    mrs: Vec<*mut ibv_mr>,
    completions: Vec<*mut ibv_comp_channel>,
    cqs: Vec<*mut ibv_cq>,
    srqs: Vec<*mut ibv_srq>,
    qps: Vec<*mut ibv_qp>,
    ids: Vec<*mut rdma_cm_id>,
    memory: Vec<u8>,
}

/// The input, a byte at a time; zeros behind its end.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn number(&mut self) -> usize {
        usize::from(self.byte())
    }

    fn word(&mut self) -> u32 {
        u32::from_le_bytes([self.byte(), self.byte(), self.byte(), self.byte()])
    }

    /// Mostly small.
    fn size(&mut self) -> u32 {
        match self.byte() {
            255 => self.word(),
            n => u32::from(n),
        }
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> Option<T> {
        let n = self.number();
        of.get(n % of.len().max(1)).copied()
    }

    /// One of them, taken out.
    fn take<T>(&mut self, of: &mut Vec<T>) -> Option<T> {
        let n = self.number();
        (!of.is_empty()).then(|| of.remove(n % of.len()))
    }
}

fn errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// A call that returns an error number.
fn code(what: &str, returned: c_int) -> bool {
    assert!((0..=200).contains(&returned) && returned != libc::EIO, "{what} returns {returned}");
    returned == 0
}

/// A call that returns 0, or -1 and `errno`.
fn minus_one(what: &str, returned: c_int) -> bool {
    assert!(returned == 0 || returned == -1, "{what} returns {returned}");
    assert!(returned == 0 || (errno() > 0 && errno() != libc::EIO), "{what}: errno {}", errno());
    returned == 0
}

fn pointer<T>(what: &str, returned: *mut T) -> Option<*mut T> {
    assert!(!returned.is_null() || (errno() > 0 && errno() != libc::EIO), "{what}: errno {}", errno());
    (!returned.is_null()).then_some(returned)
}

fn non_blocking(fd: c_int) {
    // SAFETY: no pointers.
    let rc = unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) };
    assert_eq!(rc, 0);
}

fn readable(fd: c_int, millis: c_int) -> bool {
    let mut one = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one structure, as said.
    unsafe { libc::poll(&raw mut one, 1, millis) == 1 }
}

impl Fixed {
    fn get() -> Self {
        struct Shared(*mut ibv_context, [*mut rdma_event_channel; 2]);
        // SAFETY: the library's objects may be used from any thread.
        unsafe impl Send for Shared {}
        // SAFETY: as above.
        unsafe impl Sync for Shared {}
        static FIXED: std::sync::OnceLock<Shared> = std::sync::OnceLock::new();
        let fixed = FIXED.get_or_init(|| {
            // SAFETY: each pointer comes from the call before.
            unsafe {
                let list = ibv_get_device_list(null_mut());
                let context = ibv_open_device(*list);
                ibv_free_device_list(list);
                assert!(!context.is_null(), "no device");
                non_blocking((*context).async_fd);
                let channels = [rdma_create_event_channel(), rdma_create_event_channel()];
                for channel in channels {
                    non_blocking((*channel).fd);
                }
                Shared(context, channels)
            }
        });
        Self { context: fixed.0, channels: fixed.1 }
    }
}

/// Carries out the calls that `bytes` name.
///
/// # Panics
/// When something is not as it must be.
pub fn check(bytes: &[u8]) {
    // All sequences share the channels: one would take the events of another, and wait for ever for their
    // acknowledgement.
    static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut bytes = Bytes(bytes);
    let mut objects = Objects {
        fixed: Fixed::get(),
        pds: Vec::new(),
        pds_gone: Vec::new(),
        mrs: Vec::new(),
        completions: Vec::new(),
        cqs: Vec::new(),
        srqs: Vec::new(),
        qps: Vec::new(),
        ids: Vec::new(),
        memory: vec![0; MEMORY],
    };
    // SAFETY: only handles that are alive are used, and pointers to structures that outlive the calls.
    unsafe {
        for _ in 0..CALLS {
            if bytes.0.is_empty() {
                break;
            }
            objects.step(&mut bytes);
        }
        objects.give_up();
    }
}

impl Objects {
    /// One call. Where there are enough objects of a kind, an option of an id is set instead of making
    /// another.
    ///
    /// # Safety
    /// The lists hold live objects only.
    unsafe fn step(&mut self, bytes: &mut Bytes<'_>) {
        // SAFETY: by the caller's promise.
        unsafe {
            match bytes.byte() % 47 {
                which @ ..6 => self.memory_step(which, bytes),
                which @ 6..15 => self.completion_step(which, bytes),
                which @ 15..25 => self.qp_step(which, bytes),
                which @ 25..36 => self.id_step(which, bytes),
                which @ 36.. => self.extended_step(which - 36, bytes),
            }
        }
    }

    /// A call on protection domains and regions.
    unsafe fn memory_step(&mut self, which: u8, bytes: &mut Bytes<'_>) {
        // SAFETY: as for `step`.
        unsafe {
            match which {
                0 if self.pds.len() < MOST => {
                    self.pds.extend(pointer("alloc_pd", ibv_alloc_pd(self.fixed.context)));
                    // A new one may be where another was.
                    self.pds_gone.retain(|pd| !self.pds.contains(pd));
                }
                1 => {
                    let Some(pd) = bytes.take(&mut self.pds) else { return };
                    let list = match busy("dealloc_pd", ibv_dealloc_pd(pd)) {
                        true => &mut self.pds_gone,
                        false => &mut self.pds,
                    };
                    list.push(pd);
                }
                2 | 3 if self.mrs.len() < MOST => {
                    let Some(pd) = bytes.pick(&self.pds) else { return };
                    let (at, len) = (bytes.number() * 256, bytes.number() * 64);
                    let access = bytes.byte();
                    let addr = self.memory.as_mut_ptr().add(at).cast();
                    self.mrs
                        .extend(pointer("reg_mr", ibv_reg_mr(pd, addr, len.min(MEMORY - at), access.into())));
                }
                4 => {
                    if let Some(mr) = bytes.take(&mut self.mrs) {
                        assert_eq!(ibv_dereg_mr(mr), 0);
                    }
                }
                5 => {
                    let (Some(mr), flags) = (bytes.pick(&self.mrs), bytes.byte()) else { return };
                    let pd = bytes.pick(&self.pds).unwrap_or(null_mut());
                    let (at, len) = (bytes.number() * 256, bytes.number() * 64);
                    let addr = self.memory.as_mut_ptr().add(at).cast();
                    // Its results are -1 to -4 for each way to fail; the region may be gone or still exist,
                    // and must be deregistered in either case.
                    let done =
                        ibv_rereg_mr(mr, flags.into(), pd, addr, len.min(MEMORY - at), bytes.byte().into());
                    assert!((-4..=0).contains(&done), "rereg_mr returns {done}");
                }
                _ => self.id_option(bytes),
            }
        }
    }

    /// A call on completion channels and queues.
    unsafe fn completion_step(&mut self, which: u8, bytes: &mut Bytes<'_>) {
        // SAFETY: as for `step`.
        unsafe {
            match which {
                6 if self.completions.len() < MOST => {
                    let Some(channel) =
                        pointer("create_comp_channel", ibv_create_comp_channel(self.fixed.context))
                    else {
                        return;
                    };
                    non_blocking((*channel).fd);
                    self.completions.push(channel);
                }
                7 => {
                    if let Some(channel) = bytes.take(&mut self.completions)
                        && !busy("destroy_comp_channel", ibv_destroy_comp_channel(channel))
                    {
                        self.completions.push(channel);
                    }
                }
                8 | 9 if self.cqs.len() < MOST => {
                    let channel = bytes.pick(&self.completions).unwrap_or(null_mut());
                    let channel = if bytes.byte() & 1 == 0 { channel } else { null_mut() };
                    let cqe = bytes.size() as c_int;
                    let cq = ibv_create_cq(
                        self.fixed.context,
                        cqe.min(1000),
                        null_mut(),
                        channel,
                        bytes.byte().into(),
                    );
                    self.cqs.extend(pointer("create_cq", cq));
                }
                10 => {
                    if let Some(cq) = bytes.take(&mut self.cqs)
                        && !busy("destroy_cq", ibv_destroy_cq(cq))
                    {
                        self.cqs.push(cq);
                    }
                }
                11 => {
                    if let Some(cq) = bytes.pick(&self.cqs) {
                        code("resize_cq", ibv_resize_cq(cq, (bytes.size() as c_int).min(1000)));
                    }
                }
                12 | 13 => self.poll(bytes),
                14 => self.arm(bytes),
                _ => self.id_option(bytes),
            }
        }
    }

    /// A call on queue pairs.
    unsafe fn qp_step(&mut self, which: u8, bytes: &mut Bytes<'_>) {
        // SAFETY: as for `step`.
        unsafe {
            match which {
                15 | 16 if self.qps.len() < MOST => {
                    let Some(pd) = bytes.pick(&self.pds) else { return };
                    let Some(mut attr) = self.qp_attr(bytes) else { return };
                    self.qps.extend(pointer("create_qp", ibv_create_qp(pd, &raw mut attr)));
                }
                17 => {
                    if let Some(qp) = bytes.take(&mut self.qps) {
                        assert_eq!(ibv_destroy_qp(qp), 0);
                    }
                }
                18 | 19 => self.modify(bytes),
                20 => {
                    if let Some(qp) = self.any_qp(bytes) {
                        let (mut attr, mut init): (ibv_qp_attr, ibv_qp_init_attr) = (zeroed(), zeroed());
                        let mask = bytes.word() as c_int;
                        code("query_qp", ibv_query_qp(qp, &raw mut attr, mask, &raw mut init));
                    }
                }
                21 | 22 => self.post_send(bytes),
                23 => self.post_recv(bytes),
                24 => self.async_events(),
                _ => self.id_option(bytes),
            }
        }
    }

    /// A call on ids and their connections.
    unsafe fn id_step(&mut self, which: u8, bytes: &mut Bytes<'_>) {
        // SAFETY: as for `step`.
        unsafe {
            match which {
                25 | 26 if self.ids.len() < MOST => {
                    let mut id = null_mut();
                    let channel = self.fixed.channels[bytes.number() % 2];
                    let ps = if bytes.byte() < 240 { RDMA_PS_TCP } else { bytes.word() };
                    if minus_one("create_id", rdma_create_id(channel, &raw mut id, null_mut(), ps)) {
                        self.ids.push(id);
                    }
                }
                27 => {
                    if let Some(id) = bytes.take(&mut self.ids) {
                        self.destroy_id(id);
                    }
                }
                28 => {
                    let (Some(id), mut at) = (bytes.pick(&self.ids), loopback(0)) else { return };
                    minus_one("bind", rdma_bind_addr(id, (&raw mut at).cast()));
                }
                29 => {
                    let Some(id) = bytes.pick(&self.ids) else { return };
                    minus_one("listen", rdma_listen(id, bytes.byte().into()));
                }
                30 => {
                    // To the port of one of our ids, or to a port without a listener.
                    let (Some(id), Some(other)) = (bytes.pick(&self.ids), bytes.pick(&self.ids)) else {
                        return;
                    };
                    let port = rdma_get_src_port(other);
                    let mut to = loopback(if port == 0 { 9u16.to_be() } else { port });
                    minus_one("resolve_addr", rdma_resolve_addr(id, null_mut(), (&raw mut to).cast(), 100));
                    minus_one("resolve_route", rdma_resolve_route(id, 100));
                }
                31 => {
                    let Some(id) = bytes.pick(&self.ids) else { return };
                    if bytes.byte() & 3 == 0 {
                        rdma_destroy_qp(id);
                    } else if let (Some(pd), Some(mut attr)) = (bytes.pick(&self.pds), self.qp_attr(bytes)) {
                        minus_one("create_qp", rdma_create_qp(id, pd, &raw mut attr));
                    }
                }
                32 | 33 => self.connection(bytes),
                34 => self.cm_events(bytes.byte().into()),
                _ => self.id_option(bytes),
            }
        }
    }

    /// Moves an id to another channel, or sets an option of it.
    unsafe fn id_option(&mut self, bytes: &mut Bytes<'_>) {
        // SAFETY: as for `step`.
        unsafe {
            let Some(id) = bytes.pick(&self.ids) else { return };
            if bytes.byte() & 1 == 0 {
                let channel = self.fixed.channels[bytes.number() % 2];
                minus_one("migrate", rdma_migrate_id(id, channel));
            } else {
                let (level, name) = (bytes.byte() % 4, bytes.byte() % 8);
                let mut value = [bytes.byte(), 0, 0, 0, 0, 0, 0, 0];
                let len = bytes.number() % 9;
                let value = (&raw mut value).cast();
                minus_one("set_option", rdma_set_option(id, level.into(), name.into(), value, len));
            }
        }
    }

    fn qp_attr(&self, bytes: &mut Bytes<'_>) -> Option<ibv_qp_init_attr> {
        let (send_cq, recv_cq) = (bytes.pick(&self.cqs)?, bytes.pick(&self.cqs)?);
        let mut attr = ibv_qp_init_attr {
            qp_context: null_mut(),
            send_cq,
            recv_cq,
            srq: null_mut(),
            cap: ibv_qp_cap {
                max_send_wr: bytes.size(),
                max_recv_wr: bytes.size(),
                max_send_sge: bytes.size() % 8,
                max_recv_sge: bytes.size() % 8,
                max_inline_data: bytes.size(),
            },
            qp_type: if bytes.byte() < 230 { IBV_QPT_RC } else { bytes.size() },
            sq_sig_all: 0,
        };
        let more = bytes.byte();
        attr.sq_sig_all = (more & 1).into();
        if more & 2 != 0 {
            attr.srq = bytes.pick(&self.srqs).unwrap_or(null_mut());
        }
        Some(attr)
    }

    /// One that was made directly, or an id's.
    unsafe fn any_qp(&self, bytes: &mut Bytes<'_>) -> Option<*mut ibv_qp> {
        // SAFETY: ids in the list are alive.
        let of_ids = self.ids.iter().map(|id| unsafe { (**id).qp }).filter(|qp| !qp.is_null());
        let all: Vec<_> = self.qps.iter().copied().chain(of_ids).collect();
        bytes.pick(&all)
    }

    unsafe fn modify(&self, bytes: &mut Bytes<'_>) {
        // SAFETY: the structure is plain numbers; the queue pair is alive.
        unsafe {
            let Some(qp) = self.any_qp(bytes) else { return };
            let mut attr: ibv_qp_attr = zeroed();
            attr.qp_state = u32::from(bytes.byte() % 9);
            attr.cur_qp_state = u32::from(bytes.byte() % 8);
            attr.qp_access_flags = u32::from(bytes.byte());
            (attr.port_num, attr.pkey_index) = (bytes.byte() % 3, u16::from(bytes.byte() & 1));
            (attr.max_rd_atomic, attr.max_dest_rd_atomic) = (bytes.byte(), bytes.byte());
            (attr.min_rnr_timer, attr.timeout) = (bytes.byte(), bytes.byte());
            (attr.retry_cnt, attr.rnr_retry) = (bytes.byte(), bytes.byte());
            attr.path_mtu = u32::from(bytes.byte() % 8);
            // State alone is what programs over rdma_cm change; anything else is tried too.
            let mask = if bytes.byte() & 1 == 0 { 1 } else { bytes.word() as c_int };
            code("modify_qp", ibv_modify_qp(qp, &raw mut attr, mask));
        }
    }

    fn sges(&mut self, bytes: &mut Bytes<'_>) -> Vec<ibv_sge> {
        // SAFETY: regions in the list are alive.
        let keys: Vec<u32> = self.mrs.iter().map(|mr| unsafe { (**mr).lkey }).collect();
        let base = self.memory.as_ptr().expose_provenance() as u64;
        (0..bytes.byte() % 5)
            .map(|_| {
                let at = bytes.number() * 128;
                let length = (bytes.number() * 32).min(MEMORY - at) as u32;
                let lkey = bytes.pick(&keys).unwrap_or(0) ^ u32::from(bytes.byte() / 250);
                ibv_sge { addr: base + at as u64, length, lkey }
            })
            .collect()
    }

    unsafe fn post_send(&mut self, bytes: &mut Bytes<'_>) {
        // SAFETY: lists of live structures in this frame; memory of the elements is this object's.
        unsafe {
            let Some(qp) = self.any_qp(bytes) else { return };
            let mut lists: Vec<Vec<ibv_sge>> = (0..=bytes.byte() % 3).map(|_| self.sges(bytes)).collect();
            let keys: Vec<u32> = self.mrs.iter().map(|mr| (**mr).rkey).collect();
            let base = self.memory.as_ptr().expose_provenance() as u64;
            let mut wrs: Vec<ibv_send_wr> = lists
                .iter_mut()
                .map(|sges| {
                    let mut wr: ibv_send_wr = zeroed();
                    wr.sg_list = sges.as_mut_ptr();
                    wr.num_sge = sges.len() as c_int;
                    wr.opcode = u32::from(bytes.byte() % 16);
                    wr.send_flags = u32::from(bytes.byte() & 0x3F);
                    wr.wr.rdma.remote_addr = base + bytes.number() as u64 * 64;
                    wr.wr.rdma.rkey = bytes.pick(&keys).unwrap_or(7);
                    wr
                })
                .collect();
            for n in 1..wrs.len() {
                let next = &raw mut wrs[n];
                wrs[n - 1].next = next;
            }
            let mut bad = null_mut();
            let post = (*(*qp).context).ops.post_send.expect("post_send");
            if !code("post_send", post(qp, wrs.as_mut_ptr(), &raw mut bad)) {
                assert!(wrs.as_mut_ptr_range().contains(&bad), "bad_wr is none of the list");
            }
        }
    }

    unsafe fn post_recv(&mut self, bytes: &mut Bytes<'_>) {
        // SAFETY: as in `post_send`.
        unsafe {
            let Some(qp) = self.any_qp(bytes) else { return };
            let mut sges = self.sges(bytes);
            let mut wr = ibv_recv_wr {
                wr_id: 1,
                next: null_mut(),
                sg_list: sges.as_mut_ptr(),
                num_sge: sges.len() as c_int,
            };
            let mut bad = null_mut();
            let post = (*(*qp).context).ops.post_recv.expect("post_recv");
            if !code("post_recv", post(qp, &raw mut wr, &raw mut bad)) {
                assert_eq!(bad, &raw mut wr);
            }
        }
    }

    unsafe fn poll(&self, bytes: &mut Bytes<'_>) {
        // SAFETY: the queue is alive, the array as long as said.
        unsafe {
            let Some(cq) = bytes.pick(&self.cqs) else { return };
            let mut wcs: [ibv_wc; 8] = zeroed();
            let poll = (*(*cq).context).ops.poll_cq.expect("poll_cq");
            let n = poll(cq, c_int::from(bytes.byte() % 9), wcs.as_mut_ptr());
            // -2: it has overflowed.
            assert!((-2..=8).contains(&n), "poll_cq returns {n}");
        }
    }

    unsafe fn arm(&self, bytes: &mut Bytes<'_>) {
        // SAFETY: queues and channels are alive; an event is taken only where one waits, and acknowledged at
        // once.
        unsafe {
            let Some(cq) = bytes.pick(&self.cqs) else { return };
            let arm = (*(*cq).context).ops.req_notify_cq.expect("req_notify_cq");
            code("req_notify_cq", arm(cq, c_int::from(bytes.byte() & 1)));
            if let Some(channel) = bytes.pick(&self.completions) {
                let (mut of, mut cookie): (*mut ibv_cq, *mut c_void) = (null_mut(), null_mut());
                if minus_one("get_cq_event", ibv_get_cq_event(channel, &raw mut of, &raw mut cookie)) {
                    assert!(self.cqs.contains(&of), "an event of no queue");
                    ibv_ack_cq_events(of, 1);
                }
            }
        }
    }

    unsafe fn async_events(&self) {
        // SAFETY: as in `arm`.
        unsafe {
            let mut event: ibv_async_event = zeroed();
            while minus_one("get_async_event", ibv_get_async_event(self.fixed.context, &raw mut event)) {
                ibv_ack_async_event(&raw mut event);
            }
        }
    }

    unsafe fn connection(&self, bytes: &mut Bytes<'_>) {
        // SAFETY: ids are alive, the parameters are in this frame.
        unsafe {
            let Some(id) = bytes.pick(&self.ids) else { return };
            let data = [7u8; 256];
            let mut param: rdma_conn_param = zeroed();
            param.private_data = data.as_ptr().cast();
            param.private_data_len = bytes.byte();
            (param.responder_resources, param.initiator_depth) = (bytes.byte(), bytes.byte());
            (param.retry_count, param.rnr_retry_count) = (bytes.byte() % 8, bytes.byte() % 9);
            let how = bytes.byte();
            // An id without a queue pair of its own names one.
            if how & 8 != 0
                && let Some(qp) = self.any_qp(bytes)
            {
                param.qp_num = (*qp).qp_num;
            }
            let given = if how & 7 == 0 { null_mut() } else { &raw mut param };
            match bytes.byte() % 4 {
                0 => minus_one("connect", rdma_connect(id, given)),
                1 => minus_one("accept", rdma_accept(id, given)),
                2 => minus_one("reject", rdma_reject(id, data.as_ptr().cast(), bytes.byte())),
                _ => minus_one("disconnect", rdma_disconnect(id)),
            };
        }
    }

    /// Takes what there is; waits a little for the first.
    unsafe fn cm_events(&mut self, millis: c_int) {
        // SAFETY: events are read before they are acknowledged.
        unsafe {
            for channel in self.fixed.channels {
                let mut event: *mut rdma_cm_event = null_mut();
                if !readable((*channel).fd, millis % 8) {
                    continue;
                }
                while minus_one("get_cm_event", rdma_get_cm_event(channel, &raw mut event)) {
                    let (id, kind) = ((*event).id, (*event).event);
                    if kind == CONNECT_REQUEST {
                        assert!(
                            (*event).param.conn.private_data_len == 0
                                || !(*event).param.conn.private_data.is_null()
                        );
                        self.ids.push(id);
                    } else {
                        assert!(self.ids.contains(&id), "an event of no id");
                    }
                    assert_eq!(rdma_ack_cm_event(event), 0);
                }
            }
        }
    }

    unsafe fn destroy_id(&mut self, id: *mut rdma_cm_id) {
        // SAFETY: it is alive and out of the list.
        unsafe {
            if !(*id).qp.is_null() {
                rdma_destroy_qp(id);
            }
            let srq = (*id).srq;
            assert_eq!(rdma_destroy_id(id), 0);
            // Which leaves a shared receive queue, as others may use it.
            self.srqs.extend((!srq.is_null()).then_some(srq));
        }
    }

    /// Everything in the right order: nothing may be in the way.
    unsafe fn give_up(mut self) {
        // SAFETY: each is alive until here.
        unsafe {
            while let Some(id) = self.ids.pop() {
                self.destroy_id(id);
            }
            // Requests that were not taken.
            self.cm_events(0);
            while let Some(id) = self.ids.pop() {
                self.destroy_id(id);
            }
            self.async_events();
            for qp in std::mem::take(&mut self.qps) {
                assert_eq!(ibv_destroy_qp(qp), 0);
            }
            for srq in std::mem::take(&mut self.srqs) {
                assert_eq!(ibv_destroy_srq(srq), 0);
            }
            for cq in std::mem::take(&mut self.cqs) {
                assert_eq!(ibv_destroy_cq(cq), 0);
            }
            for channel in std::mem::take(&mut self.completions) {
                assert_eq!(ibv_destroy_comp_channel(channel), 0);
            }
            for mr in std::mem::take(&mut self.mrs) {
                assert_eq!(ibv_dereg_mr(mr), 0);
            }
            for pd in std::mem::take(&mut self.pds) {
                assert_eq!(ibv_dealloc_pd(pd), 0);
            }
        }
    }
}

/// Whether it is gone; if not, it must be in use.
fn busy(what: &str, returned: c_int) -> bool {
    assert!(returned == 0 || returned == libc::EBUSY, "{what} returns {returned}");
    returned == 0
}

/// 127.0.0.1 with a port in network order.
fn loopback(port: u16) -> libc::sockaddr_in {
    // SAFETY: plain numbers.
    let mut at: libc::sockaddr_in = unsafe { zeroed() };
    at.sin_family = libc::AF_INET as u16;
    at.sin_port = port;
    at.sin_addr.s_addr = u32::from_ne_bytes([127, 0, 0, 1]);
    at
}
