//! Golden traces of datagrams: what `UWARP_TRACE` shows of each (docs/datagram-iwarp.md). Incarnations are
//! random, so they are shown as `I`, and each line is broken in front of it.

use std::cell::RefCell;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Once};

use uwarp_proto::datagram;
use uwarp_rnic::qp::{Arrival, QpCaps, QpInit, QpModify, QpState, UdCore, UdSendWr};
use uwarp_rnic::{
    Access, Ah, AsyncEvent, AsyncSink, Cq, Mr, Pd, RecvWr, SendFlags, SendOp, SendWr, Sge, trace,
};
use uwarp_sim::Arena;

const QKEY: u32 = 1;
const SIZE: usize = 8192;
const GROUP: Ipv4Addr = Ipv4Addr::new(239, 1, 2, 3);
const GROUP_PORT: u16 = 18_514;

thread_local! {
    static LINES: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// What this test's thread has traced.
fn traced() -> String {
    let lines = LINES.take().into_iter().map(|line| {
        let (head, tail) = line.split_once(" inc=").expect("a datagram has an incarnation");
        let (_, rest) = tail.split_once(' ').expect("and a message");
        format!("{head}\n  inc=I {rest}")
    });
    lines.collect::<Vec<_>>().join("\n")
}

struct NoEvents;

impl AsyncSink for NoEvents {
    fn async_event(&self, event: AsyncEvent) {
        panic!("{event:?}");
    }
}

struct End {
    core: UdCore,
    pd: Arc<Pd>,
    memory: Arena,
    mr: Arc<Mr>,
    address: Ipv4Addr,
}

impl End {
    fn new(qpn: u32) -> Self {
        static START: Once = Once::new();
        START.call_once(|| {
            trace::start(|passing| {
                if let trace::Passing::Datagram(datagram) = passing {
                    let line = format!("{:#x} {datagram}", datagram.qpn.unwrap_or(0));
                    LINES.with_borrow_mut(|lines| lines.push(line));
                }
            });
        });
        let (pd, events): (_, Arc<dyn AsyncSink>) = (Pd::new(), Arc::new(NoEvents));
        let cq = Cq::new(64, 0, None, events.clone());
        let caps =
            QpCaps { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
        let init = QpInit {
            pd: pd.clone(),
            send_cq: cq.clone(),
            recv_cq: cq,
            srq: None,
            caps,
            sq_sig_all: false,
            cookie: 0,
            async_sink: events,
        };
        let mut core = UdCore::new(qpn, init).unwrap();
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            core.modify(&QpModify { state: Some(state), qkey: Some(QKEY), ..QpModify::default() }).unwrap();
        }
        let memory = Arena::new(SIZE);
        let mr = memory.register(&pd, 0, SIZE, Access::LOCAL_WRITE);
        Self { core, pd, memory, mr, address: Ipv4Addr::new(10, 0, 0, qpn as u8) }
    }

    fn sge(&self, length: u32) -> Sge {
        Sge { addr: self.memory.addr(0), length, lkey: self.mr.stag() }
    }

    fn recv(&mut self, length: u32) {
        let sges = [self.sge(length)];
        self.core.post_recv(&RecvWr { wr_id: 0, sges: &sges }).unwrap();
    }

    fn post(&mut self, op: SendOp, flags: SendFlags, length: u32, (to, qpn, qkey): (Arc<Ah>, u32, u32)) {
        let sges = [self.sge(length)];
        let wr = SendWr { wr_id: 0, op, flags, sges: &sges };
        self.core
            .post_send(&UdSendWr { wr, ah: &to, remote_qpn: qpn, remote_qkey: qkey, job_key: None })
            .unwrap();
    }

    fn to(&self, peer: &Self) -> Arc<Ah> {
        Ah::new(&self.pd, (peer.address, 0).into(), None)
    }

    /// The lower layer takes all that waits.
    fn taken(&mut self) -> Vec<Vec<u8>> {
        let all: Vec<Vec<u8>> = self.core.outgoing().map(|(_, bytes)| bytes.to_vec()).collect();
        self.core.sent(all.len());
        all
    }

    fn arrives(&mut self, from: &Self, to: Ipv4Addr, bytes: &[u8]) {
        let arrival = Arrival { from: IpAddr::from(from.address), to: to.into(), slid: 0 };
        let _ = self.core.deliver(&datagram::parse(bytes).unwrap(), &arrival);
    }
}

fn ends() -> (End, End) {
    (End::new(0x2103), End::new(0x2007))
}

const SEND: SendOp = SendOp::Send { invalidate: None };

#[test]
fn sends() {
    let (mut a, mut b) = ends();
    let to = (a.to(&b), 0x2007, QKEY);
    a.post(SEND, SendFlags::empty(), 11, to.clone());
    let immediate = SendOp::SendImmediate { imm: [1, 2, 3, 4] };
    a.post(immediate, SendFlags::SOLICITED, 0, to);
    for bytes in a.taken() {
        b.recv(100);
        b.arrives(&a, b.address, &bytes);
    }
    insta::assert_snapshot!(traced(), @r"
    0x2103 -> 10.0.0.7:32 UD src=0x2103 dst=0x2007 qkey=0x1
      inc=I Send L qn=0 msn=1 mo=0 len=11
    0x2103 -> 10.0.0.7:32 UD src=0x2103 dst=0x2007 qkey=0x1 imm=0x1020304
      inc=I SendSE L qn=0 msn=2 mo=0 len=0
    0x2007 <- 10.0.0.3:33 UD src=0x2103 dst=0x2007 qkey=0x1
      inc=I Send L qn=0 msn=1 mo=0 len=11
    0x2007 <- 10.0.0.3:33 UD src=0x2103 dst=0x2007 qkey=0x1 imm=0x1020304
      inc=I SendSE L qn=0 msn=2 mo=0 len=0
    ");
}

#[test]
fn a_datagram_that_is_dropped_says_why() {
    let (mut a, mut b) = ends();
    let to = (a.to(&b), 0x2007, QKEY);
    a.post(SEND, SendFlags::empty(), 70, to.clone());
    a.post(SEND, SendFlags::empty(), 9, (to.0, to.1, 2));
    let [long, other_key] = <[_; 2]>::try_from(a.taken()).unwrap();
    b.arrives(&a, b.address, &long);
    b.recv(100);
    b.arrives(&a, b.address, &long);
    b.arrives(&a, b.address, &other_key);
    b.core.modify(&QpModify { state: Some(QpState::Err), ..QpModify::default() }).unwrap();
    b.arrives(&a, b.address, &long);
    insta::assert_snapshot!(traced(), @r"
    0x2103 -> 10.0.0.7:32 UD src=0x2103 dst=0x2007 qkey=0x1
      inc=I Send L qn=0 msn=1 mo=0 len=70
    0x2103 -> 10.0.0.7:32 UD src=0x2103 dst=0x2007 qkey=0x2
      inc=I Send L qn=0 msn=2 mo=0 len=9
    0x2007 <- 10.0.0.3:33 UD src=0x2103 dst=0x2007 qkey=0x1
      inc=I Send L qn=0 msn=1 mo=0 len=70, dropped: no receive
    0x2007 <- 10.0.0.3:33 UD src=0x2103 dst=0x2007 qkey=0x1
      inc=I Send L qn=0 msn=1 mo=0 len=70, dropped: too long
    0x2007 <- 10.0.0.3:33 UD src=0x2103 dst=0x2007 qkey=0x2
      inc=I Send L qn=0 msn=2 mo=0 len=9, dropped: Q_Key
    0x2007 <- 10.0.0.3:33 UD src=0x2103 dst=0x2007 qkey=0x1
      inc=I Send L qn=0 msn=1 mo=0 len=70, dropped: state
    ");
}

#[test]
fn a_datagram_that_the_system_refuses() {
    let (mut a, b) = ends();
    for too_long in [false, true] {
        a.post(SEND, SendFlags::empty(), 5, (a.to(&b), 0x2007, QKEY));
        a.core.refused(too_long);
    }
    insta::assert_snapshot!(traced(), @r"
    0x2103 -> 10.0.0.7:32 UD src=0x2103 dst=0x2007 qkey=0x1
      inc=I Send L qn=0 msn=1 mo=0 len=5, dropped: unsent
    0x2103 -> 10.0.0.7:32 UD src=0x2103 dst=0x2007 qkey=0x1
      inc=I Send L qn=0 msn=2 mo=0 len=5, dropped: too long for IP
    ");
}

#[test]
fn a_group() {
    let (mut a, mut b) = ends();
    let group = Ah::group(&a.pd, (GROUP, GROUP_PORT).into(), None);
    a.post(SEND, SendFlags::empty(), 8, (group, 0xFF_FFFF, QKEY));
    let bytes = a.taken().remove(0);
    b.recv(100);
    b.arrives(&a, GROUP, &bytes);
    End::new(0x2008).arrives(&a, GROUP, &bytes);
    insta::assert_snapshot!(traced(), @r"
    0x2103 -> 239.1.2.3:18514 UD src=0x2103 dst=0xffffff qkey=0x1
      inc=I Send L qn=0 msn=1 mo=0 len=8
    0x2007 <- 10.0.0.3:33 group=239.1.2.3 UD src=0x2103 dst=0xffffff qkey=0x1
      inc=I Send L qn=0 msn=1 mo=0 len=8
    0x2008 <- 10.0.0.3:33 group=239.1.2.3 UD src=0x2103 dst=0xffffff qkey=0x1
      inc=I Send L qn=0 msn=1 mo=0 len=8, dropped: no receive
    ");
}
