//! Error Messages (docs/datagram-iwarp.md section 7): who gets one, how often, and what a sender makes of it.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use uwarp_driver::{Nic, UdQp};
use uwarp_proto::datagram::{self, Head};
use uwarp_rnic::qp::{Drops, PeerError, QpModify, QpState, UdSendWr};
use uwarp_rnic::{Access, Ah, Cq, Mr, Pd, RecvWr, SendFlags, SendOp, SendWr, Sge};
use uwarp_wire::crc::crc32c;
use uwarp_wire::terminate::{TerminateError, UntaggedBuffer};

mod common;
use common::{Events, LIMIT, address, init};

const QKEY: u32 = 0x1111_1111;
const LONGEST: u32 = 65_465;
const ERROR_LEN: usize = 46;

/// The process has one rate: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

struct End {
    nic: Arc<Nic>,
    pd: Arc<Pd>,
    qp: Arc<UdQp>,
    cq: Arc<Cq>,
    events: Arc<Events>,
    mr: Arc<Mr>,
    memory: Box<[u8]>,
}

impl End {
    fn new() -> Self {
        let (nic, pd, events) = (Nic::open().unwrap(), Pd::new(), Arc::new(Events::default()));
        let cq = Cq::new(1024, 0, None, events.clone());
        let qp = UdQp::create(&nic, init(&pd, &cq, &events)).unwrap();
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            qp.modify(&QpModify { state: Some(state), qkey: Some(QKEY), ..QpModify::default() }).unwrap();
        }
        let mut memory = vec![0u8; 40 + LONGEST as usize].into_boxed_slice();
        let addr = address(&mut memory);
        let mr = Mr::register(&pd, addr, memory.len() as u64, addr, Access::LOCAL_WRITE).unwrap();
        Self { nic, pd, qp, cq, events, mr, memory }
    }

    fn sge(&self, length: u32) -> Sge {
        Sge { addr: self.mr.range().0, length, lkey: self.mr.stag() }
    }

    fn recv(&self, length: u32) {
        let sges = [self.sge(length)];
        self.qp.post_recv(std::iter::once(RecvWr { wr_id: 0, sges: &sges })).unwrap();
    }

    fn send(&self, wr_id: u64, to: &Self, ip: &str, length: u32) {
        let (sges, ah) =
            ([self.sge(length)], Ah::new(&self.pd, SocketAddr::new(ip.parse().unwrap(), 0), None));
        let op = SendOp::Send { invalidate: None };
        let wr = SendWr { wr_id, op, flags: SendFlags::empty(), sges: &sges };
        let wr = UdSendWr { wr, ah: &ah, remote_qpn: to.qp.qpn(), remote_qkey: QKEY, job_key: None };
        self.qp.post_send(std::iter::once(wr)).map_err(|(_, e)| e).unwrap();
    }

    /// Polls until it is so.
    fn until(&self, what: &str, mut is_so: impl FnMut(&Self) -> bool) {
        let end = Instant::now() + LIMIT;
        while !is_so(self) {
            assert!(Instant::now() < end, "never {what}: {:?}", self.drops());
            self.nic.poll_cq(&self.cq, 1, |_| ());
        }
    }

    fn drops(&self) -> Drops {
        self.qp.look_at().2
    }

    fn port(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, u16::try_from(self.qp.qpn() >> 8).unwrap()).into()
    }
}

#[test]
fn the_sender_of_a_dropped_message_hears_of_it_if_it_asks() {
    let _alone = ALONE.lock();
    let (a, b) = (End::new(), End::new());
    a.qp.set_extras(None, Some(true)).unwrap();
    for (wr_id, ip) in [(1, "127.0.0.1"), (2, "::1")] {
        a.send(wr_id, &b, ip, 100);
        a.until("told", |a| a.drops().by_peer == wr_id);
        let error = TerminateError::UntaggedBuffer(UntaggedBuffer::NoBuffer);
        let (msn, from) = (u32::try_from(wr_id).unwrap(), ip.parse().unwrap());
        let expected = PeerError { wr_id, msn, remote_qpn: b.qp.qpn(), from, error };
        assert_eq!((a.qp.take_error(), a.qp.take_error()), (Some(expected), None));
    }
    b.recv(100);
    a.send(3, &b, "127.0.0.1", 61);
    a.until("told that it was too long", |a| a.drops().by_peer == 3);
    let error = a.qp.take_error().map(|error| (error.wr_id, error.error));
    assert_eq!(error, Some((3, TerminateError::UntaggedBuffer(UntaggedBuffer::TooLong))));
    assert_eq!((a.events.count(), a.qp.query().state), (3, QpState::Rts));
    assert_eq!((b.events.count(), b.drops().by_peer), (0, 0));
    // The receiver has not changed either: what fits arrives.
    a.send(4, &b, "127.0.0.1", 60);
    let mut received = false;
    let end = Instant::now() + LIMIT;
    while !received {
        assert!(Instant::now() < end);
        b.nic.poll_cq(&b.cq, 1, |wc| received = wc.byte_len == 100);
    }
}

#[test]
fn the_longest_message_arrives_whole_over_both_families() {
    let _alone = ALONE.lock();
    let (mut a, mut b) = (End::new(), End::new());
    a.qp.set_extras(Some(LONGEST), None).unwrap();
    assert!(a.qp.set_extras(Some(LONGEST + 1), Some(true)).is_err());
    assert_eq!(a.qp.extras(), (LONGEST, false));
    for (i, byte) in a.memory.iter_mut().enumerate() {
        *byte = i as u8 ^ (i >> 8) as u8;
    }
    for ip in ["127.0.0.1", "::1"] {
        for length in [4097, 9000, 65_000, LONGEST] {
            b.memory.fill(0xEE);
            b.recv(40 + length);
            a.send(0, &b, ip, length);
            let mut got = None;
            let end = Instant::now() + LIMIT;
            while got.is_none() {
                assert!(Instant::now() < end, "{length} bytes over {ip}: {:?}", b.drops());
                b.nic.poll_cq(&b.cq, 1, |wc| got = Some(wc.byte_len));
            }
            assert_eq!(got, Some(40 + length));
            assert_eq!(b.memory[40..40 + length as usize], a.memory[..length as usize]);
        }
    }
}

struct Stranger(UdpSocket);

impl Stranger {
    fn new() -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        Self(socket)
    }

    fn head(&self, to: &End) -> Head {
        Head {
            source_qpn: u32::from(self.0.local_addr().unwrap().port()) << 8 | 1,
            destination_qpn: to.qp.qpn(),
            qkey: QKEY,
            immediate: None,
            solicited: false,
            msn: 7,
            incarnation: 9,
        }
    }

    fn send(&self, head: &Head, payload: &[u8], to: &End) -> usize {
        let mut bytes = [&head.to_bytes()[..], payload].concat();
        let sum = crc32c(&bytes);
        bytes.extend_from_slice(&datagram::trailer(sum));
        self.0.send_to(&bytes, to.port()).unwrap()
    }

    /// Lengths of all that comes back.
    fn answers(&self) -> Vec<usize> {
        let mut buffer = [0; 2048];
        std::iter::from_fn(|| self.0.recv(&mut buffer).ok()).collect()
    }
}

/// Whatever it sends: nothing without the right Q_Key, nothing about an Error Message, never more than it
/// sent.
#[test]
fn a_stranger_never_gets_more_bytes_than_it_sent() {
    let _alone = ALONE.lock();
    let (victim, stranger) = (End::new(), Stranger::new());
    let good = stranger.head(&victim);
    for length in 0..4 {
        stranger.send(&good, &vec![1; length], &victim);
    }
    stranger.send(&Head { qkey: QKEY ^ 1, ..good }, &[1; 100], &victim);
    stranger.send(&Head { destination_qpn: good.destination_qpn ^ 0x80, ..good }, &[1; 100], &victim);
    stranger.send(&Head { source_qpn: good.source_qpn ^ 0x100, ..good }, &[1; 100], &victim);
    stranger.send(&Head { destination_qpn: 0xFF_FFFF, ..good }, &[1; 100], &victim);
    // An Error Message to the victim, of another life.
    let error = {
        let mut bytes = good.to_bytes().to_vec();
        bytes.extend_from_slice(&[0; 8]);
        datagram::answer(&bytes, UntaggedBuffer::NoBuffer).unwrap()
    };
    let swapped = uwarp_wire::datagram::error::ErrorMessage {
        source_qpn: good.source_qpn,
        destination_qpn: good.destination_qpn,
        ..error
    };
    stranger.0.send_to(&swapped.to_bytes(), victim.port()).unwrap();
    victim.until("dropped", |victim| victim.drops().no_receive == 4);
    assert_eq!(stranger.answers(), [0; 0]);
    assert_eq!(victim.drops().by_peer, 0);
    // The shortest with an answer.
    assert_eq!(stranger.send(&good, &[1; 4], &victim), ERROR_LEN);
    victim.until("dropped", |victim| victim.drops().no_receive == 5);
    assert_eq!(stranger.answers(), [ERROR_LEN]);
}

#[test]
fn a_flood_is_answered_only_so_often() {
    let _alone = ALONE.lock();
    let (victim, stranger) = (End::new(), Stranger::new());
    let good = stranger.head(&victim);
    let start = Instant::now();
    for sent in 1..=2000 {
        stranger.send(&good, &[1; 100], &victim);
        if sent % 50 == 0 {
            victim.until("dropped", |victim| victim.drops().no_receive == sent);
        }
    }
    // A hundred in each second that has begun.
    let seconds = start.elapsed().as_secs() as usize + 2;
    let answers = stranger.answers().len();
    assert!((1..=100 * seconds).contains(&answers), "{answers} in {seconds} seconds");
}
