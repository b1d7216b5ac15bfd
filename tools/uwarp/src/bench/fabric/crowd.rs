//! Many connections between two processes, with one event channel, one protection domain and one pair of
//! completion queues, as in servers.

use std::ffi::c_void;
use std::time::{Duration, Instant};

use uwarp_abi_types::rdmacm::{
    RDMA_CM_EVENT_DISCONNECTED, RDMA_CM_EVENT_REJECTED, RDMA_CM_EVENT_TIMEWAIT_EXIT,
};

use super::*;
use crate::bench::protocol::{Figure, Spread};
use crate::bench::raw::{half, ping_figure};

/// Work requests of each queue pair in each direction, as the memory figure is defined.
pub const DEPTH: u32 = 16;
/// Bytes of a small message. Every connection has one place for them, in either direction.
const MESSAGE: u32 = 64;
/// Room for the Writes of one connection, source and target, in front of the places of small messages.
const BULK: u32 = 1024 * 1024;

/// One end of many connections.
pub struct Crowd {
    libraries: &'static Libraries,
    channel: *mut rdma_event_channel,
    listener: *mut rdma_cm_id,
    /// 0 if nothing listens.
    pub port: u16,
    shared: Option<Shared>,
    members: Vec<Member>,
    /// When each one that is being set up began.
    begun: Vec<Instant>,
    most: u32,
    /// Receives are posted to a shared receive queue.
    shared_receives: bool,
}

/// What the connections share.
pub(super) struct Shared {
    ops: ibv_context_ops,
    pub(super) pd: *mut ibv_pd,
    mr: *mut ibv_mr,
    pub(super) send_cq: *mut ibv_cq,
    pub(super) receive_cq: *mut ibv_cq,
    /// Null: each has receives of its own.
    srq: *mut ibv_srq,
    memory: &'static [Line],
}

#[derive(Clone, Copy)]
struct Member {
    id: *mut rdma_cm_id,
    qp: *mut ibv_qp,
    remote: Offer,
}

struct CmEvent {
    kind: rdma_cm_event_type,
    status: c_int,
    id: *mut rdma_cm_id,
    offer: Option<Offer>,
}

impl Crowd {
    /// For up to `most` connections at a time; listens if an address is given.
    pub fn new(
        libraries: &'static Libraries,
        listen: Option<IpAddr>,
        most: u32,
        shared_receives: bool,
    ) -> Result<Crowd> {
        // SAFETY: takes nothing.
        let channel = unsafe { (libraries.create_event_channel)() };
        if channel.is_null() {
            return Err(last("rdma_create_event_channel"));
        }
        let mut crowd = Crowd {
            libraries,
            channel,
            listener: ptr::null_mut(),
            port: 0,
            shared: None,
            // Made once: what grows afterwards is the library's.
            members: Vec::with_capacity(most as usize),
            begun: Vec::with_capacity(most as usize),
            most,
            shared_receives,
        };
        if let Some(address) = listen {
            let id = crowd.new_id(0)?;
            let mut address = SocketAddress::new(SocketAddr::new(address, 0));
            // SAFETY: the id is new; the address outlives the call.
            check("rdma_bind_addr", unsafe { (libraries.bind_addr)(id, address.as_mut_ptr()) })?;
            // SAFETY: the id is bound.
            check("rdma_listen", unsafe { (libraries.listen)(id, 0) })?;
            // SAFETY: the id is bound. The port is in network byte order.
            crowd.port = u16::from_be(unsafe { (libraries.get_src_port)(id) });
            crowd.listener = id;
        }
        Ok(crowd)
    }

    /// Established connections.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Makes `count` more connections, up to `at_once` of them at a time; the figure is connections a second
    /// until all are established.
    pub fn connect(&mut self, to: SocketAddr, count: u32, at_once: u32) -> Result<Figure> {
        const PATIENCE_MS: c_int = 30_000;
        let mut address = SocketAddress::new(to);
        let mut halves = Vec::with_capacity(count as usize);
        let start = Instant::now();
        let (mut begun, mut established) = (0, 0);
        while established < count {
            while begun < count && begun - established < at_once {
                let index = self.members.len();
                let id = self.new_id(index)?;
                self.members.push(Member { id, qp: ptr::null_mut(), remote: Offer { address: 0, key: 0 } });
                self.begun.push(Instant::now());
                // SAFETY: the id is new; the address outlives the call.
                let status = unsafe {
                    (self.libraries.resolve_addr)(id, ptr::null_mut(), address.as_mut_ptr(), PATIENCE_MS)
                };
                check("rdma_resolve_addr", status)?;
                begun += 1;
            }
            let event = self.event()?;
            match event.kind {
                RDMA_CM_EVENT_ADDR_RESOLVED => {
                    // SAFETY: the address is resolved.
                    let status = unsafe { (self.libraries.resolve_route)(event.id, PATIENCE_MS) };
                    check("rdma_resolve_route", status)?;
                }
                RDMA_CM_EVENT_ROUTE_RESOLVED => {
                    let index = index_of(event.id);
                    let offer = self.create_qp(event.id, index)?.to_bytes();
                    let mut param = parameters(&offer);
                    // SAFETY: the route is resolved, the queue pair is made; `offer` outlives the call.
                    check("rdma_connect", unsafe { (self.libraries.connect)(event.id, &mut param) })?;
                }
                RDMA_CM_EVENT_ESTABLISHED => {
                    let index = index_of(event.id);
                    if let (Some(member), Some(offer)) = (self.members.get_mut(index), event.offer) {
                        member.remote = offer;
                    }
                    if let Some(begun) = self.begun.get(index) {
                        // Twice, because the summary is of halves.
                        halves.push(half(begun.elapsed() * 2));
                    }
                    established += 1;
                }
                _ => return Err(self.unexpected(&event)),
            }
        }
        let seconds = start.elapsed().as_secs_f64();
        let p99 = ping_figure(&mut halves)?.p99;
        Ok(Figure { value: f64::from(count) / seconds, p99, operations: count.into() })
    }

    /// Takes connections until `count` more are established.
    pub fn accept(&mut self, count: u32) -> Result<()> {
        let mut established = 0;
        while established < count {
            let event = self.event()?;
            match event.kind {
                RDMA_CM_EVENT_CONNECT_REQUEST => {
                    let index = self.members.len();
                    let remote = event.offer.unwrap_or(Offer { address: 0, key: 0 });
                    // SAFETY: the id is new and ours.
                    unsafe { (*event.id).context = ptr::without_provenance_mut(index) };
                    self.members.push(Member { id: event.id, qp: ptr::null_mut(), remote });
                    let offer = self.create_qp(event.id, index)?.to_bytes();
                    let mut param = parameters(&offer);
                    // SAFETY: the id is that of the request, its queue pair is made; `offer` outlives the
                    // call.
                    check("rdma_accept", unsafe { (self.libraries.accept)(event.id, &mut param) })?;
                }
                RDMA_CM_EVENT_ESTABLISHED => established += 1,
                _ => return Err(self.unexpected(&event)),
            }
        }
        Ok(())
    }

    /// Ends all connections from this side, and drops them once the library has reported their end.
    /// The figure is connections a second.
    pub fn disconnect(&mut self) -> Result<Figure> {
        let start = Instant::now();
        for member in &self.members {
            // SAFETY: the id is connected.
            check("rdma_disconnect", unsafe { (self.libraries.disconnect)(member.id) })?;
        }
        let count = self.leave()?;
        let seconds = start.elapsed().as_secs_f64();
        Ok(Figure { value: count as f64 / seconds, p99: None, operations: count })
    }

    /// Waits until the peer has ended all connections, and drops them.
    pub fn leave(&mut self) -> Result<u64> {
        let mut gone = 0;
        while gone < self.members.len() {
            let event = self.event()?;
            match event.kind {
                RDMA_CM_EVENT_DISCONNECTED => gone += 1,
                RDMA_CM_EVENT_TIMEWAIT_EXIT => {}
                _ => return Err(self.unexpected(&event)),
            }
        }
        // Flushed work requests are ignored; no completion of these queue pairs follows.
        for member in self.members.drain(..) {
            // SAFETY: the connection is over, and its id is used by nobody else.
            unsafe {
                (self.libraries.destroy_qp)(member.id);
                check("rdma_destroy_id", (self.libraries.destroy_id)(member.id))?;
            }
        }
        self.begun.clear();
        if let Some(shared) = &self.shared {
            while shared.reap(shared.send_cq, |_| Ok(()))? + shared.reap(shared.receive_cq, |_| Ok(()))? > 0 {
            }
        }
        Ok(gone as u64)
    }

    /// Sends as many small messages on every connection as its queues hold, and receives as many.
    pub fn traffic(&mut self) -> Result<()> {
        let Some(shared) = &self.shared else { return Err(Failure::new("no connections")) };
        let wanted = self.members.len() * DEPTH as usize;
        let (mut sent, mut received) = (0, 0);
        for (index, member) in self.members.iter().enumerate() {
            for _ in 0..DEPTH {
                shared.send(member.qp, index)?;
            }
            sent += shared.reap(shared.send_cq, done)?;
            received += self.take(shared)?;
        }
        while sent < wanted || received < wanted {
            sent += shared.reap(shared.send_cq, done)?;
            received += self.take(shared)?;
        }
        Ok(())
    }

    /// One message on this connection, signalled.
    pub fn send_on(&self, one: u32) -> Result<()> {
        let (shared, member) = self.member(one)?;
        shared.send(member.qp, one as usize)
    }

    /// Takes a received message, if there is one, and posts its receive again.
    pub fn take_one(&self) -> Result<bool> {
        let (shared, _) = self.member(0)?;
        Ok(self.take(shared)? > 0)
    }

    /// Takes completions of Sends, if there are some.
    pub fn poll_sends(&self) -> Result<()> {
        let (shared, _) = self.member(0)?;
        shared.reap(shared.send_cq, done).map(drop)
    }

    fn take(&self, shared: &Shared) -> Result<usize> {
        shared.reap(shared.receive_cq, |completion| {
            done(completion)?;
            let index = completion.wr_id as usize;
            let member = self.members.get(index).ok_or_else(|| Failure::new("an unknown connection"))?;
            shared.receive(member.qp, index)
        })
    }

    /// The active side of a ping-pong on one of the connections, both ends polling the shared queues.
    pub fn ping(&self, raw: &mut crate::bench::raw::Raw, one: u32, time: Duration) -> Result<Figure> {
        let (shared, member) = self.member(one)?;
        let mut halves = Vec::with_capacity(1 << 20);
        raw.receive_number()?;
        let start = Instant::now();
        let mut begin = start;
        while begin - start < time {
            self.exchange(shared, member, one as usize)?;
            let now = Instant::now();
            halves.push(half(now - begin));
            begin = now;
        }
        raw.send_number(halves.len() as u64)?;
        ping_figure(&mut halves)
    }

    fn exchange(&self, shared: &Shared, member: &Member, one: usize) -> Result<()> {
        shared.send(member.qp, one)?;
        while shared.reap(shared.send_cq, done)? == 0 {}
        while self.take(shared)? == 0 {}
        Ok(())
    }

    /// Answers every message on its connection, until `over` returns true.
    pub fn answer(&self, raw: &mut crate::bench::raw::Raw) -> Result<()> {
        let (shared, _) = self.member(0)?;
        raw.send_number(0)?;
        let mut answered = 0;
        let mut looks = 0_u32;
        loop {
            shared.reap(shared.send_cq, done)?;
            answered += shared.reap(shared.receive_cq, |completion| {
                done(completion)?;
                let index = completion.wr_id as usize;
                let member = self.members.get(index).ok_or_else(|| Failure::new("an unknown connection"))?;
                shared.receive(member.qp, index)?;
                shared.send(member.qp, index)
            })?;
            looks = looks.wrapping_add(1);
            // The peer has had all its answers when it sends their number.
            if looks.is_multiple_of(1024)
                && let Some(wanted) = raw.number_if_there()?
            {
                while shared.reap(shared.send_cq, done)? > 0 {}
                return match answered as u64 == wanted {
                    true => Ok(()),
                    false => Err(Failure(format!("{answered} messages answered, {wanted} sent"))),
                };
            }
        }
    }

    /// One message in flight on each of the first `count` connections, for about `time`: round trips on each.
    pub fn serve(&self, raw: &mut crate::bench::raw::Raw, count: u32, time: Duration) -> Result<Spread> {
        let (shared, _) = self.member(0)?;
        raw.receive_number()?;
        let busy = self.members.get(..count as usize).ok_or_else(|| Failure::new("too few connections"))?;
        let mut served = vec![0_u64; busy.len()];
        for (index, member) in busy.iter().enumerate() {
            shared.send(member.qp, index)?;
            shared.reap(shared.send_cq, done)?;
        }
        let start = Instant::now();
        let mut under_way = busy.len();
        while under_way > 0 {
            let over = start.elapsed() >= time;
            shared.reap(shared.send_cq, done)?;
            shared.reap(shared.receive_cq, |completion| {
                done(completion)?;
                let index = completion.wr_id as usize;
                let (Some(member), Some(served)) = (busy.get(index), served.get_mut(index)) else {
                    return Err(Failure::new("an unknown connection"));
                };
                *served += 1;
                shared.receive(member.qp, index)?;
                if over {
                    under_way -= 1;
                    return Ok(());
                }
                shared.send(member.qp, index)
            })?;
        }
        while shared.reap(shared.send_cq, done)? > 0 {}
        let seconds = start.elapsed().as_secs_f64();
        raw.send_number(served.iter().sum())?;
        served.sort_unstable();
        let at = |index: usize| served.get(index).map_or(0.0, |&n| n as f64 / seconds);
        Ok(Spread { least: at(0), median: at(served.len() / 2), most: at(served.len().saturating_sub(1)) })
    }

    /// Writes of 1 MiB on one of the connections, for about `time`; bytes a second.
    pub fn stream(&self, raw: &mut crate::bench::raw::Raw, one: u32, time: Duration) -> Result<Figure> {
        const WINDOW: u32 = 8;
        let (shared, member) = self.member(one)?;
        raw.receive_number()?;
        let start = Instant::now();
        let (mut posted, mut under_way) = (0_u64, 0);
        while start.elapsed() < time {
            while under_way < WINDOW {
                shared.write(member, one as usize)?;
                posted += 1;
                under_way += 1;
            }
            under_way -= u32::try_from(shared.reap(shared.send_cq, done)?).unwrap_or(under_way);
        }
        while under_way > 0 {
            under_way -= u32::try_from(shared.reap(shared.send_cq, done)?).unwrap_or(under_way);
        }
        // Its answer comes when the Writes before it are placed.
        self.exchange(shared, member, one as usize)?;
        let seconds = start.elapsed().as_secs_f64();
        raw.send_number(1)?;
        Ok(Figure { value: posted as f64 * f64::from(BULK) / seconds, p99: None, operations: posted })
    }

    fn member(&self, index: u32) -> Result<(&Shared, &Member)> {
        self.shared
            .as_ref()
            .zip(self.members.get(index as usize))
            .ok_or_else(|| Failure::new("no such connection"))
    }

    fn new_id(&self, index: usize) -> Result<*mut rdma_cm_id> {
        let mut id = ptr::null_mut();
        let context: *mut c_void = ptr::without_provenance_mut(index);
        // SAFETY: the channel is never destroyed, and `id` outlives the call.
        let status = unsafe { (self.libraries.create_id)(self.channel, &mut id, context, RDMA_PS_TCP) };
        check("rdma_create_id", status)?;
        Ok(id)
    }

    /// Creates the queue pair of an id and posts its receives; returns the description of our memory for the
    /// peer.
    fn create_qp(&mut self, id: *mut rdma_cm_id, index: usize) -> Result<Offer> {
        if self.shared.is_none() {
            // SAFETY: an id that is resolved or requested has an open context.
            let mut shared = Shared::new(self.libraries, unsafe { (*id).verbs }, self.most)?;
            if self.shared_receives {
                shared.share_receives(self.libraries, self.most)?;
            }
            self.shared = Some(shared);
        }
        let Some(shared) = &self.shared else { return Err(Failure::new("no context")) };
        let mut init = shared.wanted_queue_pair();
        // SAFETY: id and domain are of one context; `init` outlives the call.
        check("rdma_create_qp", unsafe { (self.libraries.create_qp)(id, shared.pd, &mut init) })?;
        // SAFETY: the id has a queue pair now.
        let qp = unsafe { (*id).qp };
        if let Some(member) = self.members.get_mut(index) {
            member.qp = qp;
        }
        (0..DEPTH).try_for_each(|_| shared.receive(qp, index))?;
        // SAFETY: the region is registered.
        Ok(Offer { address: shared.address(0), key: unsafe { (*shared.mr).rkey } })
    }

    fn event(&self) -> Result<CmEvent> {
        let mut event = ptr::null_mut();
        // SAFETY: the channel is never destroyed, and `event` outlives the call.
        check("rdma_get_cm_event", unsafe { (self.libraries.get_cm_event)(self.channel, &mut event) })?;
        // SAFETY: the event is valid until it is acknowledged, below; its private data is as long as it says.
        let copy = unsafe {
            let conn = (*event).param.conn;
            let private: &[u8] = match conn.private_data.is_null() {
                true => &[],
                false => std::slice::from_raw_parts(conn.private_data.cast(), conn.private_data_len.into()),
            };
            let offer = Offer::parse(private);
            CmEvent { kind: (*event).event, status: (*event).status, id: (*event).id, offer }
        };
        // SAFETY: acknowledged once, and used no more.
        unsafe { (self.libraries.ack_cm_event)(event) };
        Ok(copy)
    }

    #[cold]
    fn unexpected(&self, event: &CmEvent) -> Failure {
        // SAFETY: the function returns a constant string for every number.
        let words = unsafe { CStr::from_ptr((self.libraries.event_str)(event.kind)) };
        let hint = match event.kind {
            RDMA_CM_EVENT_REJECTED => ", the listener may have been flooded",
            _ => "",
        };
        Failure(format!(
            "with {} connections: {} ({}{hint})",
            self.members.len(),
            words.to_string_lossy(),
            event.status
        ))
    }
}

impl Shared {
    pub(super) fn new(libraries: &'static Libraries, context: *mut ibv_context, most: u32) -> Result<Shared> {
        // SAFETY: the context is open.
        let pd = unsafe { (libraries.alloc_pd)(context) };
        let entries = most.saturating_mul(DEPTH).max(DEPTH).cast_signed();
        let cq = || {
            // SAFETY: as above.
            unsafe { (libraries.create_cq)(context, entries, ptr::null_mut(), ptr::null_mut(), 0) }
        };
        let (send_cq, receive_cq) = (cq(), cq());
        if pd.is_null() || send_cq.is_null() || receive_cq.is_null() {
            return Err(last("ibv_alloc_pd or ibv_create_cq"));
        }
        let bytes = BULK as usize + most as usize * 2 * MESSAGE as usize;
        let zeros = || Line([const { AtomicU64::new(0) }; 512]);
        let memory: &'static [Line] =
            Box::leak((0..bytes.div_ceil(size_of::<Line>())).map(|_| zeros()).collect());
        let rights = (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE).cast_signed();
        let start: *mut c_void = ptr::from_ref(memory).cast_mut().cast();
        // SAFETY: the memory is never freed, and looked at through atomics only.
        let mr = unsafe { (libraries.reg_mr)(pd, start, bytes, rights) };
        if mr.is_null() {
            return Err(last("ibv_reg_mr"));
        }
        // SAFETY: the context is open, and has its table of functions.
        let ops = unsafe { (*context).ops };
        Ok(Shared { ops, pd, mr, send_cq, receive_cq, srq: ptr::null_mut(), memory })
    }

    fn share_receives(&mut self, libraries: &Libraries, most: u32) -> Result<()> {
        // SAFETY: null pointers and zeros are values of all fields.
        let mut init: ibv_srq_init_attr = unsafe { mem::zeroed() };
        init.attr.max_wr = most.saturating_mul(DEPTH);
        init.attr.max_sge = 1;
        // SAFETY: the domain is ours; `init` outlives the call.
        self.srq = unsafe { (libraries.create_srq)(self.pd, &mut init) };
        if self.srq.is_null() { Err(last("ibv_create_srq")) } else { Ok(()) }
    }

    pub(super) fn wanted_queue_pair(&self) -> ibv_qp_init_attr {
        // SAFETY: null pointers and zeros are values of all fields.
        let mut init: ibv_qp_init_attr = unsafe { mem::zeroed() };
        init.send_cq = self.send_cq;
        init.recv_cq = self.receive_cq;
        init.srq = self.srq;
        init.qp_type = IBV_QPT_RC;
        init.cap.max_send_wr = DEPTH;
        init.cap.max_recv_wr = DEPTH;
        init.cap.max_send_sge = 1;
        init.cap.max_recv_sge = 1;
        init
    }

    fn address(&self, offset: usize) -> u64 {
        self.memory.as_ptr().expose_provenance() as u64 + offset as u64
    }

    fn element(&self, offset: usize, length: u32) -> ibv_sge {
        // SAFETY: the region is registered.
        ibv_sge { addr: self.address(offset), length, lkey: unsafe { (*self.mr).lkey } }
    }

    pub(super) fn send(&self, qp: *mut ibv_qp, index: usize) -> Result<()> {
        let element = self.element(BULK as usize + (2 * index) * MESSAGE as usize, MESSAGE);
        self.post(qp, element, index, IBV_WR_SEND, Offer { address: 0, key: 0 })
    }

    fn write(&self, member: &Member, index: usize) -> Result<()> {
        self.post(member.qp, self.element(0, BULK), index, IBV_WR_RDMA_WRITE, member.remote)
    }

    fn post(
        &self,
        qp: *mut ibv_qp,
        mut element: ibv_sge,
        index: usize,
        opcode: u32,
        to: Offer,
    ) -> Result<()> {
        // SAFETY: null pointers and zeros are values of all fields.
        let mut request: ibv_send_wr = unsafe { mem::zeroed() };
        request.wr_id = index as u64;
        request.sg_list = &mut element;
        request.num_sge = 1;
        request.opcode = opcode;
        request.send_flags = IBV_SEND_SIGNALED;
        request.wr.rdma.remote_addr = to.address;
        request.wr.rdma.rkey = to.key;
        let mut bad = ptr::null_mut();
        let Some(post_send) = self.ops.post_send else { return Err(absent("post_send")) };
        // SAFETY: request and element outlive the call; the memory they name is never freed.
        check("ibv_post_send", unsafe { post_send(qp, &mut request, &mut bad) })
    }

    pub(super) fn receive(&self, qp: *mut ibv_qp, index: usize) -> Result<()> {
        let mut element = self.element(BULK as usize + (2 * index + 1) * MESSAGE as usize, MESSAGE);
        let mut request =
            ibv_recv_wr { wr_id: index as u64, next: ptr::null_mut(), sg_list: &mut element, num_sge: 1 };
        let mut bad = ptr::null_mut();
        if !self.srq.is_null() {
            let Some(post_srq_recv) = self.ops.post_srq_recv else { return Err(absent("post_srq_recv")) };
            // SAFETY: as above.
            return check("ibv_post_srq_recv", unsafe { post_srq_recv(self.srq, &mut request, &mut bad) });
        }
        let Some(post_recv) = self.ops.post_recv else { return Err(absent("post_recv")) };
        // SAFETY: as above.
        check("ibv_post_recv", unsafe { post_recv(qp, &mut request, &mut bad) })
    }

    /// `ibv_poll_cq`; calls back with each completion and returns how many there were.
    pub(super) fn reap(&self, cq: *mut ibv_cq, mut each: impl FnMut(&ibv_wc) -> Result<()>) -> Result<usize> {
        const MOST: usize = 16;
        let mut completions = [const { MaybeUninit::<ibv_wc>::uninit() }; MOST];
        let Some(poll_cq) = self.ops.poll_cq else { return Err(absent("poll_cq")) };
        // SAFETY: the queue is ours and the array has room for MOST, which is small.
        let count = unsafe { poll_cq(cq, MOST as c_int, completions.as_mut_ptr().cast()) };
        let count = usize::try_from(count).map_err(|_| Failure(format!("ibv_poll_cq answers {count}")))?;
        for completion in completions.iter().take(count) {
            // SAFETY: the function filled as many as it says.
            each(unsafe { completion.assume_init_ref() })?;
        }
        Ok(count)
    }
}

pub(super) fn done(completion: &ibv_wc) -> Result<()> {
    match completion.status {
        IBV_WC_SUCCESS => Ok(()),
        status => Err(Failure(format!("a work request ended with status {status}"))),
    }
}

fn index_of(id: *mut rdma_cm_id) -> usize {
    // SAFETY: the id is one of ours and alive.
    unsafe { (*id).context.addr() }
}
