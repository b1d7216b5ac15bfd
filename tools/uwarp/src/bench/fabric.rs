//! A connection over uwarp, through the C interface that every program uses: the two libraries by name,
//! connections by librdmacm, and on the data path the functions in `ibv_context.ops`, as the inline functions
//! of `<infiniband/verbs.h>` call them.
//!
//! With [`crowd`] and [`by_number`] the one file of the measurements that loads the library and calls C
//! functions of it.

pub mod by_number;
pub mod crowd;
pub mod datagram;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::io;
use std::mem::{self, MaybeUninit};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use rustix::event::{PollFd, PollFlags};
use rustix::fd::BorrowedFd;
use uwarp_abi_types::rdmacm::{
    RDMA_CM_EVENT_ADDR_RESOLVED, RDMA_CM_EVENT_CONNECT_REQUEST, RDMA_CM_EVENT_ESTABLISHED,
    RDMA_CM_EVENT_ROUTE_RESOLVED, RDMA_PS_TCP, rdma_cm_event, rdma_cm_event_type, rdma_cm_id,
    rdma_conn_param, rdma_event_channel,
};
use uwarp_abi_types::verbs::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE,
    IBV_QPT_RC, IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_WC_SUCCESS, IBV_WR_ATOMIC_FETCH_AND_ADD,
    IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_SEND, ibv_ah, ibv_ah_attr, ibv_comp_channel, ibv_context,
    ibv_context_ops, ibv_cq, ibv_device, ibv_gid, ibv_mr, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_init_attr,
    ibv_qp_init_attr_ex, ibv_recv_wr, ibv_send_wr, ibv_sge, ibv_srq, ibv_srq_init_attr, ibv_wc,
};

use super::protocol::{Failure, LARGEST, Result, Verb};
use crate::libdir::SONAMES;

/// Room for small messages to be sent.
pub const SMALL: u32 = 4096;
/// Receives that are posted at any time, as `ib_send_bw` has them.
const RECEIVES: u32 = 512;
const SEND_QUEUE: u32 = 512;
/// Outstanding RDMA Reads, in either direction: what the device allows.
const READS: u8 = 16;

/// Layout of an end's memory, in bytes.
pub const SOURCE: u32 = 0;
pub const TARGET: u32 = LARGEST;
pub const OUT: u32 = 2 * LARGEST;
/// All receives are of this one place, as those of perftest are: what came last is there.
pub const IN: u32 = OUT + SMALL;
const MEMORY: u32 = IN + LARGEST;

/// The functions used, under the names and types of the headers.
pub struct Libraries {
    alloc_pd: unsafe extern "C" fn(*mut ibv_context) -> *mut ibv_pd,
    reg_mr: unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr,
    create_comp_channel: unsafe extern "C" fn(*mut ibv_context) -> *mut ibv_comp_channel,
    create_cq: unsafe extern "C" fn(
        *mut ibv_context,
        c_int,
        *mut c_void,
        *mut ibv_comp_channel,
        c_int,
    ) -> *mut ibv_cq,
    get_cq_event: unsafe extern "C" fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int,
    ack_cq_events: unsafe extern "C" fn(*mut ibv_cq, u32),
    wc_status_str: unsafe extern "C" fn(u32) -> *const c_char,
    get_device_list: unsafe extern "C" fn(*mut c_int) -> *mut *mut ibv_device,
    open_device: unsafe extern "C" fn(*mut ibv_device) -> *mut ibv_context,
    query_gid: unsafe extern "C" fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int,
    create_ah: unsafe extern "C" fn(*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah,
    create_reliable_qp: unsafe extern "C" fn(
        *mut ibv_context,
        *mut ibv_qp_init_attr_ex,
        *mut datagram::ReliableInit,
        u32,
    ) -> *mut ibv_qp,
    create_verbs_qp: unsafe extern "C" fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp,
    modify_qp: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int,
    destroy_verbs_qp: unsafe extern "C" fn(*mut ibv_qp) -> c_int,
    create_srq: unsafe extern "C" fn(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq,
    create_event_channel: unsafe extern "C" fn() -> *mut rdma_event_channel,
    create_id: unsafe extern "C" fn(*mut rdma_event_channel, *mut *mut rdma_cm_id, *mut c_void, u32) -> c_int,
    bind_addr: unsafe extern "C" fn(*mut rdma_cm_id, *mut libc::sockaddr) -> c_int,
    listen: unsafe extern "C" fn(*mut rdma_cm_id, c_int) -> c_int,
    get_src_port: unsafe extern "C" fn(*mut rdma_cm_id) -> u16,
    resolve_addr:
        unsafe extern "C" fn(*mut rdma_cm_id, *mut libc::sockaddr, *mut libc::sockaddr, c_int) -> c_int,
    resolve_route: unsafe extern "C" fn(*mut rdma_cm_id, c_int) -> c_int,
    create_qp: unsafe extern "C" fn(*mut rdma_cm_id, *mut ibv_pd, *mut ibv_qp_init_attr) -> c_int,
    connect: unsafe extern "C" fn(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int,
    accept: unsafe extern "C" fn(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int,
    disconnect: unsafe extern "C" fn(*mut rdma_cm_id) -> c_int,
    destroy_qp: unsafe extern "C" fn(*mut rdma_cm_id),
    destroy_id: unsafe extern "C" fn(*mut rdma_cm_id) -> c_int,
    get_cm_event: unsafe extern "C" fn(*mut rdma_event_channel, *mut *mut rdma_cm_event) -> c_int,
    ack_cm_event: unsafe extern "C" fn(*mut rdma_cm_event) -> c_int,
    event_str: unsafe extern "C" fn(rdma_cm_event_type) -> *const c_char,
}

impl Libraries {
    /// Loads both from `directory`. They stay until the process ends, as their threads may.
    pub fn load(directory: &Path) -> Result<&'static Libraries> {
        let [verbs, cm] = SONAMES.map(|name| {
            let path = directory.join(name);
            // SAFETY: libuwarp has no constructor that requires anything of its caller. Now, so that a symbol
            // that is missing is an error here and not a crash later.
            let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) };
            library
                .map(|library| &*Box::leak(Box::new(library)))
                .map_err(|e| Failure(format!("{}: {e}", path.display())))
        });
        let (verbs, cm) = (verbs?, cm?);
        // SAFETY: the types above are those of the headers for these names.
        let libraries = unsafe {
            Libraries {
                alloc_pd: symbol(verbs, c"ibv_alloc_pd")?,
                reg_mr: symbol(verbs, c"ibv_reg_mr")?,
                create_comp_channel: symbol(verbs, c"ibv_create_comp_channel")?,
                create_cq: symbol(verbs, c"ibv_create_cq")?,
                get_cq_event: symbol(verbs, c"ibv_get_cq_event")?,
                ack_cq_events: symbol(verbs, c"ibv_ack_cq_events")?,
                wc_status_str: symbol(verbs, c"ibv_wc_status_str")?,
                get_device_list: symbol(verbs, c"ibv_get_device_list")?,
                open_device: symbol(verbs, c"ibv_open_device")?,
                query_gid: symbol(verbs, c"ibv_query_gid")?,
                create_ah: symbol(verbs, c"ibv_create_ah")?,
                create_reliable_qp: symbol(verbs, c"uwarpdv_create_qp")?,
                create_verbs_qp: symbol(verbs, c"ibv_create_qp")?,
                modify_qp: symbol(verbs, c"ibv_modify_qp")?,
                destroy_verbs_qp: symbol(verbs, c"ibv_destroy_qp")?,
                create_srq: symbol(verbs, c"ibv_create_srq")?,
                create_event_channel: symbol(cm, c"rdma_create_event_channel")?,
                create_id: symbol(cm, c"rdma_create_id")?,
                bind_addr: symbol(cm, c"rdma_bind_addr")?,
                listen: symbol(cm, c"rdma_listen")?,
                get_src_port: symbol(cm, c"rdma_get_src_port")?,
                resolve_addr: symbol(cm, c"rdma_resolve_addr")?,
                resolve_route: symbol(cm, c"rdma_resolve_route")?,
                create_qp: symbol(cm, c"rdma_create_qp")?,
                connect: symbol(cm, c"rdma_connect")?,
                accept: symbol(cm, c"rdma_accept")?,
                disconnect: symbol(cm, c"rdma_disconnect")?,
                destroy_qp: symbol(cm, c"rdma_destroy_qp")?,
                destroy_id: symbol(cm, c"rdma_destroy_id")?,
                get_cm_event: symbol(cm, c"rdma_get_cm_event")?,
                ack_cm_event: symbol(cm, c"rdma_ack_cm_event")?,
                event_str: symbol(cm, c"rdma_event_str")?,
            }
        };
        Ok(Box::leak(Box::new(libraries)))
    }
}

/// A listening id.
pub struct Listener {
    libraries: &'static Libraries,
    channel: *mut rdma_event_channel,
    pub port: u16,
}

impl Listener {
    /// Listens on a port of the library's choice.
    pub fn new(libraries: &'static Libraries, address: IpAddr) -> Result<Listener> {
        let (channel, id) = new_id(libraries)?;
        let mut address = SocketAddress::new(SocketAddr::new(address, 0));
        // SAFETY: the id is new; the address outlives the call.
        check("rdma_bind_addr", unsafe { (libraries.bind_addr)(id, address.as_mut_ptr()) })?;
        // SAFETY: the id is bound.
        check("rdma_listen", unsafe { (libraries.listen)(id, 1) })?;
        // SAFETY: the id is bound. The port is in network byte order.
        let port = u16::from_be(unsafe { (libraries.get_src_port)(id) });
        Ok(Listener { libraries, channel, port })
    }

    /// Waits for the one connection of a measurement.
    pub fn accept(self) -> Result<Link> {
        let Listener { libraries, channel, .. } = self;
        let request = next_event(libraries, channel, RDMA_CM_EVENT_CONNECT_REQUEST)?;
        let mut link = Link::new(libraries, request.id)?;
        link.remote = request
            .offer
            .ok_or_else(|| Failure::new("the connection request does not describe the memory"))?;
        let offer = link.offer().to_bytes();
        let mut param = parameters(&offer);
        // SAFETY: the id is that of the request, its queue pair is made and has receives; `offer` outlives
        // the call.
        check("rdma_accept", unsafe { (libraries.accept)(request.id, &mut param) })?;
        next_event(libraries, channel, RDMA_CM_EVENT_ESTABLISHED)?;
        Ok(link)
    }
}

/// A connected queue pair with its completion queues and memory. Everything lives until the process ends.
pub struct Link {
    libraries: &'static Libraries,
    ops: ibv_context_ops,
    qp: *mut ibv_qp,
    send_cq: *mut ibv_cq,
    receive_cq: *mut ibv_cq,
    channel: *mut ibv_comp_channel,
    /// Registered. Atomic words: the peer's Writes are placed while we look.
    memory: &'static [Line],
    mr: *mut ibv_mr,
    remote: Offer,
    inline: u32,
    /// Of a datagram queue pair: where it sends to.
    peer: Option<datagram::Peer>,
}

/// Memory comes in whole pages of the usual size, so that both ends' buffers are laid out alike.
#[repr(C, align(4096))]
struct Line([AtomicU64; 512]);

/// An end's memory as the other must know it, in private data.
#[derive(Clone, Copy)]
struct Offer {
    address: u64,
    key: u32,
}

/// A list of work requests, prepared once and posted often.
pub struct List {
    requests: Box<[ibv_send_wr]>,
    /// What the requests point to.
    elements: Box<[ibv_sge]>,
}

impl List {
    /// What the atomic operations of the list add.
    pub fn set_operand(&mut self, operand: u64) {
        for request in &mut self.requests {
            request.wr.atomic.compare_add = operand;
        }
    }
}

impl Link {
    pub fn connect(libraries: &'static Libraries, to: SocketAddr) -> Result<Link> {
        const PATIENCE_MS: c_int = 5000;
        let (channel, id) = new_id(libraries)?;
        let mut address = SocketAddress::new(to);
        // SAFETY: the id is new; the address outlives the call.
        let status =
            unsafe { (libraries.resolve_addr)(id, ptr::null_mut(), address.as_mut_ptr(), PATIENCE_MS) };
        check("rdma_resolve_addr", status)?;
        next_event(libraries, channel, RDMA_CM_EVENT_ADDR_RESOLVED)?;
        // SAFETY: the address is resolved.
        check("rdma_resolve_route", unsafe { (libraries.resolve_route)(id, PATIENCE_MS) })?;
        next_event(libraries, channel, RDMA_CM_EVENT_ROUTE_RESOLVED)?;
        let mut link = Link::new(libraries, id)?;
        let offer = link.offer().to_bytes();
        let mut param = parameters(&offer);
        // SAFETY: the route is resolved, the queue pair is made; `offer` outlives the call.
        check("rdma_connect", unsafe { (libraries.connect)(id, &mut param) })?;
        let established = next_event(libraries, channel, RDMA_CM_EVENT_ESTABLISHED)?;
        link.remote =
            established.offer.ok_or_else(|| Failure::new("the accept does not describe the memory"))?;
        Ok(link)
    }

    /// Protection domain, memory, completion queues and queue pair for an id that has a device; receives are
    /// posted.
    fn new(libraries: &'static Libraries, id: *mut rdma_cm_id) -> Result<Link> {
        // SAFETY: the id is one that rdma_create_id or a connection request gave.
        let context = unsafe { (*id).verbs };
        // SAFETY: an id whose address is resolved has an open context.
        let (pd, channel) =
            unsafe { ((libraries.alloc_pd)(context), (libraries.create_comp_channel)(context)) };
        if pd.is_null() || channel.is_null() {
            return Err(last("ibv_alloc_pd or ibv_create_comp_channel"));
        }
        // SAFETY: as above.
        let cq = |channel| unsafe { (libraries.create_cq)(context, 4096, ptr::null_mut(), channel, 0) };
        let (send_cq, receive_cq) = (cq(ptr::null_mut()), cq(channel));
        if send_cq.is_null() || receive_cq.is_null() {
            return Err(last("ibv_create_cq"));
        }
        let pages = (MEMORY as usize).div_ceil(size_of::<Line>());
        let zeros = || Line([const { AtomicU64::new(0) }; 512]);
        let memory: &'static [Line] = Box::leak((0..pages).map(|_| zeros()).collect());
        let remote = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
        let rights = (IBV_ACCESS_LOCAL_WRITE | remote).cast_signed();
        let start: *mut c_void = ptr::from_ref(memory).cast_mut().cast();
        // SAFETY: the memory is never freed, and looked at through atomics only.
        let mr = unsafe { (libraries.reg_mr)(pd, start, MEMORY as usize, rights) };
        if mr.is_null() {
            return Err(last("ibv_reg_mr"));
        }
        // SAFETY: null pointers and zeros are values of all fields.
        let mut init: ibv_qp_init_attr = unsafe { mem::zeroed() };
        init.send_cq = send_cq;
        init.recv_cq = receive_cq;
        init.qp_type = IBV_QPT_RC;
        init.cap.max_send_wr = SEND_QUEUE;
        init.cap.max_recv_wr = RECEIVES;
        init.cap.max_send_sge = 1;
        init.cap.max_recv_sge = 1;
        init.cap.max_inline_data = 64;
        // SAFETY: id and domain are of one context; `init` outlives the call.
        check("rdma_create_qp", unsafe { (libraries.create_qp)(id, pd, &mut init) })?;
        // SAFETY: the id has a queue pair now, and the context its table of functions.
        let (qp, ops) = unsafe { ((*id).qp, (*context).ops) };
        let link = Link {
            libraries,
            ops,
            qp,
            send_cq,
            receive_cq,
            channel,
            memory,
            mr,
            remote: Offer { address: 0, key: 0 },
            inline: init.cap.max_inline_data,
            peer: None,
        };
        (0..RECEIVES).try_for_each(|_| link.post_receive())?;
        Ok(link)
    }

    fn offer(&self) -> Offer {
        // SAFETY: the region is registered.
        let key = unsafe { (*self.mr).rkey };
        Offer { address: self.address(0), key }
    }

    fn address(&self, offset: u32) -> u64 {
        self.memory.as_ptr().expose_provenance() as u64 + u64::from(offset)
    }

    fn word(&self, offset: u32) -> &AtomicU64 {
        static OUTSIDE: AtomicU64 = AtomicU64::new(0);
        let word = offset as usize / 8;
        self.memory.get(word / 512).and_then(|page| page.0.get(word % 512)).unwrap_or(&OUTSIDE)
    }

    /// The 8 bytes at `offset`, a multiple of 8.
    #[inline]
    pub fn load(&self, offset: u32) -> u64 {
        self.word(offset).load(Ordering::Acquire)
    }

    #[inline]
    pub fn store(&self, offset: u32, value: u64) {
        self.word(offset).store(value, Ordering::Release);
    }

    /// A signalled Send of our bytes at `offset`, as a list of one. Inline where the device takes it.
    pub fn send_list(&self, offset: u32, size: u32, signalled: bool) -> List {
        let mut list = self.list(IBV_WR_SEND, &[(offset, 0)], size);
        self.finish_list(&mut list, size <= self.inline, signalled);
        list
    }

    /// One message of this kind: a Write or a Send of what is at [`SOURCE`], to [`TARGET`] or the next
    /// receive; a Read of the peer's `SOURCE` to our `TARGET`.
    pub fn message(&self, verb: Verb, size: u32, signalled: bool) -> List {
        let (opcode, place) = match verb {
            Verb::Write => (IBV_WR_RDMA_WRITE, (SOURCE, TARGET)),
            Verb::Read => (IBV_WR_RDMA_READ, (TARGET, SOURCE)),
            Verb::Send => (IBV_WR_SEND, (SOURCE, 0)),
        };
        let mut list = self.list(opcode, &[place], size);
        self.finish_list(&mut list, false, signalled);
        list
    }

    /// A Write as [`Link::message`] has it, with a signalled Send of `size` bytes at [`OUT`] behind it in one
    /// list.
    pub fn write_and_send(&self, written: u32, sent: u32) -> List {
        let mut list = self.list(IBV_WR_RDMA_WRITE, &[(SOURCE, TARGET), (OUT, 0)], written);
        if let (Some(request), Some(element)) = (list.requests.last_mut(), list.elements.last_mut()) {
            request.opcode = IBV_WR_SEND;
            element.length = sent;
        }
        self.finish_list(&mut list, false, true);
        if let Some(request) = list.requests.last_mut()
            && sent <= self.inline
        {
            request.send_flags |= IBV_SEND_INLINE;
        }
        list
    }

    /// A list of Writes from and to offsets in the two memories, the last one signalled.
    pub fn write_list(&self, places: &[(u32, u32)], size: u32, inline: bool) -> List {
        let mut list = self.list(IBV_WR_RDMA_WRITE, places, size);
        self.finish_list(&mut list, inline && size <= self.inline, true);
        list
    }

    /// A fetch-and-add on the word at `to` of the peer's memory; the value before it goes to `place` here.
    pub fn fetch_add(&self, place: u32, to: u32) -> List {
        let mut list = self.list(IBV_WR_ATOMIC_FETCH_AND_ADD, &[(place, to)], 8);
        self.finish_list(&mut list, false, true);
        for request in &mut list.requests {
            request.wr.atomic.rkey = self.remote.key;
        }
        list
    }

    fn list(&self, opcode: u32, places: &[(u32, u32)], size: u32) -> List {
        // SAFETY: the region is registered.
        let lkey = unsafe { (*self.mr).lkey };
        let mut elements: Box<[_]> = places
            .iter()
            .map(|&(from, _)| ibv_sge { addr: self.address(from), length: size, lkey })
            .collect();
        let mut requests: Box<[_]> = places
            .iter()
            .zip(&mut elements)
            .map(|(&(_, to), element)| {
                // SAFETY: null pointers and zeros are values of all fields.
                let mut request: ibv_send_wr = unsafe { mem::zeroed() };
                request.sg_list = ptr::from_mut(element);
                request.num_sge = 1;
                request.opcode = opcode;
                match &self.peer {
                    Some(peer) => peer.address(&mut request),
                    None => {
                        request.wr.rdma.remote_addr = self.remote.address + u64::from(to);
                        request.wr.rdma.rkey = self.remote.key;
                    }
                }
                request
            })
            .collect();
        let start = requests.as_mut_ptr();
        for index in 1..requests.len() {
            // SAFETY: both indices are inside the allocation behind `start`.
            unsafe { (*start.add(index - 1)).next = start.add(index) };
        }
        List { requests, elements }
    }

    fn finish_list(&self, list: &mut List, inline: bool, signalled: bool) {
        for request in &mut list.requests {
            request.send_flags = if inline { IBV_SEND_INLINE } else { 0 };
        }
        if let Some(request) = list.requests.last_mut()
            && signalled
        {
            request.send_flags |= IBV_SEND_SIGNALED;
        }
    }

    /// `ibv_post_send`.
    #[inline]
    pub fn post(&self, list: &mut List) -> Result<()> {
        debug_assert_eq!(list.elements.len(), list.requests.len());
        let mut bad = ptr::null_mut();
        let Some(post_send) = self.ops.post_send else { return Err(absent("post_send")) };
        // SAFETY: the list's pointers lead into its own boxes; the memory they name is never freed.
        let status = unsafe { post_send(self.qp, list.requests.as_mut_ptr(), &mut bad) };
        check("ibv_post_send", status)
    }

    /// Where the payload of what was received last begins.
    #[inline]
    pub fn received(&self) -> u32 {
        IN + if self.peer.is_some() { datagram::GRH } else { 0 }
    }

    /// `ibv_post_recv` of one receive.
    #[inline]
    pub fn post_receive(&self) -> Result<()> {
        // SAFETY: the region is registered.
        let lkey = unsafe { (*self.mr).lkey };
        let mut element = ibv_sge { addr: self.address(IN), length: LARGEST, lkey };
        let mut request = ibv_recv_wr { wr_id: 0, next: ptr::null_mut(), sg_list: &mut element, num_sge: 1 };
        let mut bad = ptr::null_mut();
        let Some(post_recv) = self.ops.post_recv else { return Err(absent("post_recv")) };
        // SAFETY: request and element outlive the call; the memory they name is never freed.
        check("ibv_post_recv", unsafe { post_recv(self.qp, &mut request, &mut bad) })
    }

    /// `ibv_poll_cq` for completions of our work requests; returns how many there were.
    #[inline]
    pub fn reap_sends(&self) -> Result<u32> {
        self.poll::<16>(self.send_cq, |_| Ok(()))
    }

    /// `ibv_poll_cq` for one received Send; returns its length.
    #[inline]
    pub fn reap_receive(&self) -> Result<Option<u32>> {
        let mut length = None;
        self.poll::<1>(self.receive_cq, |completion| {
            length = Some(completion.byte_len);
            Ok(())
        })?;
        Ok(length)
    }

    /// `ibv_poll_cq` for received Sends; calls back with the length of each.
    #[inline]
    pub fn reap_receives(&self, mut each: impl FnMut(u32) -> Result<()>) -> Result<()> {
        self.poll::<16>(self.receive_cq, |completion| each(completion.byte_len)).map(drop)
    }

    #[inline]
    fn poll<const MOST: usize>(
        &self,
        cq: *mut ibv_cq,
        mut each: impl FnMut(&ibv_wc) -> Result<()>,
    ) -> Result<u32> {
        let mut completions = [const { MaybeUninit::<ibv_wc>::uninit() }; MOST];
        let Some(poll_cq) = self.ops.poll_cq else { return Err(absent("poll_cq")) };
        // SAFETY: the queue is ours and the array has room for MOST, which is small.
        let count = unsafe { poll_cq(cq, MOST as c_int, completions.as_mut_ptr().cast()) };
        let count = u32::try_from(count).map_err(|_| Failure(format!("ibv_poll_cq answers {count}")))?;
        for completion in completions.iter().take(count as usize) {
            // SAFETY: the function filled as many as it says.
            let completion = unsafe { completion.assume_init_ref() };
            if completion.status != IBV_WC_SUCCESS {
                return Err(self.work_request_failed(completion.status));
            }
            each(completion)?;
        }
        Ok(count)
    }

    #[cold]
    fn work_request_failed(&self, status: u32) -> Failure {
        // SAFETY: the function returns a constant string for every number.
        let words = unsafe { CStr::from_ptr((self.libraries.wc_status_str)(status)) };
        Failure(format!("a work request ended with: {}", words.to_string_lossy()))
    }

    /// `ibv_req_notify_cq` for received Sends.
    #[inline]
    pub fn arm(&self) -> Result<()> {
        let Some(req_notify_cq) = self.ops.req_notify_cq else { return Err(absent("req_notify_cq")) };
        // SAFETY: the queue is ours.
        check("ibv_req_notify_cq", unsafe { req_notify_cq(self.receive_cq, 0) })
    }

    /// The same for completions of our work requests, of a datagram queue pair.
    pub fn arm_sends(&self) -> Result<()> {
        let Some(req_notify_cq) = self.ops.req_notify_cq else { return Err(absent("req_notify_cq")) };
        // SAFETY: the queue is ours.
        check("ibv_req_notify_cq", unsafe { req_notify_cq(self.send_cq, 0) })
    }

    /// `ibv_get_cq_event` and `ibv_ack_cq_events`; blocks.
    #[inline]
    pub fn event(&self) -> Result<()> {
        let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel is ours and both places outlive the call.
        if unsafe { (self.libraries.get_cq_event)(self.channel, &mut cq, &mut context) } != 0 {
            return Err(last("ibv_get_cq_event"));
        }
        // SAFETY: the event is one of this queue, acknowledged once.
        unsafe { (self.libraries.ack_cq_events)(cq, 1) };
        Ok(())
    }

    /// poll(2) until the channel's descriptor is readable.
    #[inline]
    pub fn descriptor(&self) -> Result<()> {
        // SAFETY: the channel is never destroyed, so its descriptor stays open.
        let fd = unsafe { BorrowedFd::borrow_raw((*self.channel).fd) };
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        rustix::event::poll(&mut fds, None).map(drop).map_err(Failure::of("poll"))
    }
}

impl Offer {
    const LENGTH: usize = 12;

    fn to_bytes(self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        let (address, key) = bytes.split_at_mut(8);
        address.copy_from_slice(&self.address.to_be_bytes());
        key.copy_from_slice(&self.key.to_be_bytes());
        bytes
    }

    fn parse(bytes: &[u8]) -> Option<Offer> {
        let (address, rest) = bytes.split_first_chunk()?;
        let key = rest.first_chunk()?;
        Some(Offer { address: u64::from_be_bytes(*address), key: u32::from_be_bytes(*key) })
    }
}

struct Event {
    id: *mut rdma_cm_id,
    offer: Option<Offer>,
}

fn new_id(libraries: &'static Libraries) -> Result<(*mut rdma_event_channel, *mut rdma_cm_id)> {
    // SAFETY: takes nothing.
    let channel = unsafe { (libraries.create_event_channel)() };
    if channel.is_null() {
        return Err(last("rdma_create_event_channel"));
    }
    let mut id = ptr::null_mut();
    // SAFETY: the channel is new, and `id` outlives the call.
    let status = unsafe { (libraries.create_id)(channel, &mut id, ptr::null_mut(), RDMA_PS_TCP) };
    check("rdma_create_id", status)?;
    Ok((channel, id))
}

/// Waits for the next event, which must be `wanted`.
fn next_event(
    libraries: &Libraries,
    channel: *mut rdma_event_channel,
    wanted: rdma_cm_event_type,
) -> Result<Event> {
    let mut event = ptr::null_mut();
    // SAFETY: the channel is never destroyed, and `event` outlives the call.
    check("rdma_get_cm_event", unsafe { (libraries.get_cm_event)(channel, &mut event) })?;
    // SAFETY: the event is valid until it is acknowledged, below; its private data is as long as it says.
    let (kind, status, found) = unsafe {
        let conn = (*event).param.conn;
        let private: &[u8] = match conn.private_data.is_null() {
            true => &[],
            false => std::slice::from_raw_parts(conn.private_data.cast(), conn.private_data_len.into()),
        };
        ((*event).event, (*event).status, Event { id: (*event).id, offer: Offer::parse(private) })
    };
    // SAFETY: acknowledged once, and used no more.
    unsafe { (libraries.ack_cm_event)(event) };
    if kind == wanted {
        return Ok(found);
    }
    // SAFETY: the function returns a constant string for every number.
    let words = unsafe { CStr::from_ptr((libraries.event_str)(kind)) };
    Err(Failure(format!("connecting over uwarp: {} ({status})", words.to_string_lossy())))
}

fn parameters(private: &[u8; Offer::LENGTH]) -> rdma_conn_param {
    // SAFETY: a null pointer and zeros are values of all fields.
    let mut param: rdma_conn_param = unsafe { mem::zeroed() };
    param.private_data = private.as_ptr().cast();
    param.private_data_len = Offer::LENGTH as u8;
    param.responder_resources = READS;
    param.initiator_depth = READS;
    param.retry_count = 7;
    param.rnr_retry_count = 7;
    param
}

/// A socket address in the form of C.
#[repr(C)]
pub union SocketAddress {
    v4: libc::sockaddr_in,
    v6: libc::sockaddr_in6,
}

impl SocketAddress {
    pub fn new(address: SocketAddr) -> SocketAddress {
        match address {
            SocketAddr::V4(address) => {
                // SAFETY: integers only, for which zero is a value.
                let mut v4: libc::sockaddr_in = unsafe { mem::zeroed() };
                v4.sin_family = libc::AF_INET as u16;
                v4.sin_port = address.port().to_be();
                v4.sin_addr.s_addr = u32::from_ne_bytes(address.ip().octets());
                SocketAddress { v4 }
            }
            SocketAddr::V6(address) => {
                // SAFETY: as above.
                let mut v6: libc::sockaddr_in6 = unsafe { mem::zeroed() };
                v6.sin6_family = libc::AF_INET6 as u16;
                v6.sin6_port = address.port().to_be();
                v6.sin6_addr.s6_addr = address.ip().octets();
                v6.sin6_scope_id = address.scope_id();
                SocketAddress { v6 }
            }
        }
    }

    pub fn as_mut_ptr(&mut self) -> *mut libc::sockaddr {
        ptr::from_mut(self).cast()
    }

    /// The port in it.
    pub fn port(&self) -> u16 {
        // SAFETY: integers only, and the port is at the same place in both.
        u16::from_be(unsafe { self.v4.sin_port })
    }
}

/// Zero is success; else the verbs return the error number and librdmacm returns -1 and sets `errno`.
pub fn check(function: &'static str, status: c_int) -> Result<()> {
    match status {
        0 => Ok(()),
        1.. => Err(call_failed(function, io::Error::from_raw_os_error(status))),
        _ => Err(last(function)),
    }
}

#[cold]
pub fn last(function: &'static str) -> Failure {
    call_failed(function, io::Error::last_os_error())
}

#[cold]
fn call_failed(function: &'static str, words: impl fmt::Display) -> Failure {
    Failure(format!("{function}: {words}"))
}

#[cold]
fn absent(function: &'static str) -> Failure {
    Failure(format!("the library has no {function}"))
}

/// # Safety
/// `T` must be the type of a pointer to the function of that name.
pub unsafe fn symbol<T: Copy>(library: &'static Library, name: &CStr) -> Result<T> {
    // SAFETY: as the caller vouches for.
    unsafe { library.get::<T>(name.to_bytes_with_nul()) }
        .map(|symbol| *symbol)
        .map_err(Failure::of("the library"))
}
