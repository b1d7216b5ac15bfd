//! Ends of connections for the tests, and a peer that speaks by hand.

#![allow(missing_docs, dead_code)]

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use uwarp_driver::{Channel, Disconnect, Nic, Qp, Rtr, StreamObserver, StreamParams};
use uwarp_proto::framing::Framing;
use uwarp_rnic::qp::{QpCaps, QpInit, QpModify, QpState};
use uwarp_rnic::{
    Access, AsyncEvent, AsyncSink, CompletionSink, Cq, Mr, Pd, RecvWr, SendFlags, SendOp, SendWr, Sge,
    VerbsError, Wc,
};

/// Nothing that works takes nearly as long, on any machine.
pub const LIMIT: Duration = Duration::from_secs(60);

#[derive(Default)]
pub struct Events(AtomicUsize);
impl Events {
    pub fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}
impl AsyncSink for Events {
    fn async_event(&self, _: AsyncEvent) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// As the library's own, over C.
pub struct ToChannel(Arc<Channel>, OnceLock<Weak<Cq>>);
impl CompletionSink for ToChannel {
    fn completion_event(&self, cookie: u64) {
        self.0.push(cookie);
    }

    fn armed(&self) -> bool {
        self.0.armed(self.1.get().unwrap())
    }

    fn fed_by(&self, source: Option<u64>) {
        self.0.fed_by(source, self.1.get().unwrap());
    }
}

/// A completion queue with events.
pub fn evented(depth: u32, cookie: u64, channel: &Arc<Channel>, events: &Arc<Events>) -> Arc<Cq> {
    let sink = Arc::new(ToChannel(channel.clone(), OnceLock::new()));
    let cq = Cq::new(depth, cookie, Some(sink.clone()), events.clone());
    sink.1.set(Arc::downgrade(&cq)).unwrap();
    cq
}

#[derive(Default)]
pub struct Watch {
    state: Mutex<(bool, Option<Disconnect>)>,
    changed: Condvar,
}
impl StreamObserver for Watch {
    fn established(&self) {
        self.state.lock().0 = true;
        self.changed.notify_all();
    }
    fn disconnected(&self, why: Disconnect) {
        assert!(self.state.lock().1.replace(why).is_none());
        self.changed.notify_all();
    }
}
impl Watch {
    pub fn wait_end(&self) -> Disconnect {
        let mut state = self.state.lock();
        let result = self.changed.wait_while_for(&mut state, |s| s.1.is_none(), LIMIT);
        assert!(!result.timed_out(), "no disconnect");
        state.1.unwrap()
    }

    pub fn has_begun(&self) -> bool {
        self.state.lock().0
    }

    pub fn ended(&self) -> Option<Disconnect> {
        self.state.lock().1
    }
}

pub const CAPS: QpCaps =
    QpCaps { max_send_wr: 128, max_recv_wr: 128, max_send_sge: 32, max_recv_sge: 32, max_inline_data: 64 };

pub fn all_rights() -> Access {
    Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ
}

pub fn address(memory: &mut [u8]) -> u64 {
    memory.as_mut_ptr().expose_provenance() as u64
}

/// A queue pair with all it needs.
pub struct End {
    pub nic: Arc<Nic>,
    pub pd: Arc<Pd>,
    pub qp: Arc<Qp>,
    pub cq: Arc<Cq>,
    pub channel: Arc<Channel>,
    pub watch: Arc<Watch>,
    pub events: Arc<Events>,
    pub mr: Arc<Mr>,
    // Last: freed after everything that may use it.
    pub memory: Box<[u8]>,
}

impl End {
    pub fn new(size: usize) -> Self {
        let nic = Nic::open().unwrap();
        let pd = Pd::new();
        let channel = Channel::new(nic.engine()).unwrap();
        let events = Arc::new(Events::default());
        let cq = evented(1024, 7, &channel, &events);
        let qp = queue_pair(&nic, &pd, &cq, &events);
        let mut memory = vec![0u8; size].into_boxed_slice();
        let addr = address(&mut memory);
        let mr = Mr::register(&pd, addr, size as u64, addr, all_rights()).unwrap();
        Self { nic, pd, qp, cq, channel, watch: Arc::default(), events, mr, memory }
    }

    /// Another queue pair with the same domain and memory, and a completion queue of its own.
    pub fn beside(&self) -> Self {
        let channel = Channel::new(self.nic.engine()).unwrap();
        let events = Arc::new(Events::default());
        let cq = evented(1024, 7, &channel, &events);
        let qp = queue_pair(&self.nic, &self.pd, &cq, &events);
        let (nic, pd, mr) = (self.nic.clone(), self.pd.clone(), self.mr.clone());
        Self { nic, pd, qp, cq, channel, watch: Arc::default(), events, mr, memory: Box::default() }
    }

    pub fn addr(&self) -> u64 {
        self.mr.range().0
    }

    pub fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge { addr: self.addr() + offset, length, lkey: self.mr.stag() }
    }

    pub fn send(&self, op: SendOp, sges: &[Sge]) {
        self.try_send(1, op, sges).unwrap();
    }

    pub fn try_send(&self, wr_id: u64, op: SendOp, sges: &[Sge]) -> Result<(), VerbsError> {
        let wr = SendWr { wr_id, op, flags: SendFlags::SIGNALED, sges };
        self.qp.post_send(std::iter::once(wr)).map_err(|(_, e)| e)
    }

    pub fn recv(&self, sges: &[Sge]) {
        self.try_recv(2, sges).unwrap();
    }

    pub fn try_recv(&self, wr_id: u64, sges: &[Sge]) -> Result<(), VerbsError> {
        self.qp.post_recv(std::iter::once(RecvWr { wr_id, sges })).map_err(|(_, e)| e)
    }

    /// The next completion, found by polling.
    pub fn poll(&self) -> Wc {
        let end = Instant::now() + LIMIT;
        loop {
            let mut got = None;
            self.nic.poll_cq(&self.cq, 1, |wc| got = Some(wc));
            if let Some(wc) = got {
                return wc;
            }
            assert!(Instant::now() < end, "no completion");
        }
    }

    /// The next completion; blocks on the channel.
    pub fn wait(&self) -> Wc {
        loop {
            let mut got = None;
            self.cq.arm(false);
            self.nic.poll_cq(&self.cq, 1, |wc| got = Some(wc));
            if let Some(wc) = got {
                return wc;
            }
            assert_eq!(self.channel.get(), Ok(7));
        }
    }

    /// The next completion, without making any progress here.
    pub fn look_only(&self) -> Wc {
        let end = Instant::now() + LIMIT;
        loop {
            let mut got = None;
            self.cq.poll(1, |wc| got = Some(wc));
            if let Some(wc) = got {
                return wc;
            }
            assert!(Instant::now() < end, "no completion");
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.qp.destroy();
        self.mr.deregister();
    }
}

pub fn init(pd: &Arc<Pd>, cq: &Arc<Cq>, events: &Arc<Events>) -> QpInit {
    QpInit {
        pd: pd.clone(),
        send_cq: cq.clone(),
        recv_cq: cq.clone(),
        srq: None,
        caps: CAPS,
        sq_sig_all: false,
        cookie: 1,
        async_sink: events.clone(),
    }
}

pub fn queue_pair(nic: &Arc<Nic>, pd: &Arc<Pd>, cq: &Arc<Cq>, events: &Arc<Events>) -> Arc<Qp> {
    let qp = Qp::create(nic, init(pd, cq, events)).unwrap();
    qp.modify(&to(QpState::Init)).unwrap();
    qp
}

pub fn to(state: QpState) -> QpModify {
    QpModify { state: Some(state), ..QpModify::default() }
}

/// Two connected sockets.
pub fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (b, _) = listener.accept().unwrap();
    for s in [&a, &b] {
        s.set_nodelay(true).unwrap();
        s.set_read_timeout(Some(LIMIT)).unwrap();
        s.set_write_timeout(Some(LIMIT)).unwrap();
    }
    (a, b)
}

pub fn attach(end: &End, socket: TcpStream, params: StreamParams) {
    socket.set_nonblocking(true).unwrap();
    end.qp.attach(socket.into(), params, end.watch.clone()).unwrap();
}

/// Two queue pairs, connected.
pub fn connect(params: StreamParams, size: usize) -> (End, End) {
    let (left, right) = (End::new(size), End::new(size));
    join(&left, &right, params);
    (left, right)
}

pub fn join(left: &End, right: &End, params: StreamParams) {
    let (a, b) = sockets();
    attach(left, a, StreamParams { initiator: true, rtr: Rtr::SendWrite, ..params });
    attach(right, b, StreamParams { initiator: false, rtr: Rtr::Expect, wait_first_frame: true, ..params });
}

pub fn uwarp() -> StreamParams {
    StreamParams { peer_is_uwarp: true, ..StreamParams::default() }
}

/// A queue pair whose peer is the test itself. No CRCs, so that FPDUs can be written by hand.
pub fn with_raw_peer(params: StreamParams, size: usize) -> (End, TcpStream) {
    let end = End::new(size);
    let (a, b) = sockets();
    // Small, so that a peer that does not read is soon felt.
    rustix::net::sockopt::set_socket_send_buffer_size(&b, 100_000).unwrap();
    rustix::net::sockopt::set_socket_recv_buffer_size(&a, 100_000).unwrap();
    attach(&end, b, StreamParams { framing: Framing::PLAIN, emss: 0, ..params });
    (end, a)
}

/// A ULPDU as an FPDU without CRC.
pub fn fpdu(ulpdu: &[u8]) -> Vec<u8> {
    let mut out = u16::try_from(ulpdu.len()).unwrap().to_be_bytes().to_vec();
    out.extend_from_slice(ulpdu);
    out.resize(out.len().next_multiple_of(4) + 4, 0);
    out
}

/// A single-segment untagged message (RFC 5041 figure 4, RFC 5040 figure 4).
pub fn untagged(opcode: u8, qn: u32, msn: u32, payload: &[u8]) -> Vec<u8> {
    let mut ulpdu = vec![0x41, 0x40 | opcode, 0, 0, 0, 0];
    for word in [qn, msn, 0] {
        ulpdu.extend_from_slice(&word.to_be_bytes());
    }
    ulpdu.extend_from_slice(payload);
    fpdu(&ulpdu)
}

pub fn send_message(msn: u32, payload: &[u8]) -> Vec<u8> {
    untagged(3, 0, msn, payload)
}

pub fn read_request(msn: u32, size: u32, stag: u32, to: u64) -> Vec<u8> {
    let mut payload = 0x5151_5151u32.to_be_bytes().to_vec();
    payload.extend_from_slice(&0u64.to_be_bytes());
    payload.extend_from_slice(&size.to_be_bytes());
    payload.extend_from_slice(&stag.to_be_bytes());
    payload.extend_from_slice(&to.to_be_bytes());
    untagged(1, 1, msn, &payload)
}

pub fn write_all(mut socket: &TcpStream, bytes: &[u8]) {
    socket.write_all(bytes).unwrap();
}
