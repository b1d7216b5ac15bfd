//! Peers that are not uwarp: what they answer, and what the stream then begins with.

use uwarp_rnic::{SendFlags, SendOp, SendWr};
use uwarp_wire::mpa::FLAG_R;

use super::*;

/// A responder of the test's own.
struct Stranger {
    listener: TcpListener,
}

impl Stranger {
    fn new() -> Self {
        Self { listener: TcpListener::bind(local(0)).unwrap() }
    }

    fn address(&self) -> SocketAddr {
        self.listener.local_addr().unwrap()
    }

    /// Takes a request and answers it.
    fn answer(&self, reply: &[u8]) -> (TcpStream, Vec<u8>) {
        let (mut stream, _) = self.listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let request = take_request(&mut stream);
        stream.write_all(&KEY_REP).unwrap();
        stream.write_all(reply).unwrap();
        (stream, request)
    }
}

/// The next FPDU's ULPDU.
fn ulpdu(stream: &mut TcpStream) -> Vec<u8> {
    let mut length = [0; 2];
    stream.read_exact(&mut length).unwrap();
    let length = usize::from(u16::from_be_bytes(length));
    let mut rest = vec![0; (2 + length).next_multiple_of(4) - 2 + 4];
    stream.read_exact(&mut rest).unwrap();
    rest.truncate(length);
    rest
}

/// A zero-length Write and a zero-length Read Request of ours.
const WRITE: &[u8] = &[0xC1, 0x40, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
fn read(msn: u8) -> Vec<u8> {
    let mut request = vec![0x41, 0x41, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, msn, 0, 0, 0, 0];
    // Sink, size, source: both name STag 1.
    request.extend([0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
    request.extend([0, 0, 0, 0]);
    request.extend([0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
    request
}

/// Chelsio's driver agrees to the Read indication only, and a program without Reads of its own asks for no
/// depth: the two did not come together.
#[test]
fn a_program_that_reads_nothing_meets_a_responder_that_waits_for_a_read() {
    let cm = cm(Timeouts::default());
    let (client, stranger) = (channel(), Stranger::new());
    let active = resolved(&cm, &client, stranger.address());
    let queue_pair = qp();
    active.connect(&queue_pair, ConnParam { initiator_depth: 0, ..ConnParam::DEFAULT }, b"").unwrap();
    let (mut stream, request) = stranger.answer(&[FLAG_C | FLAG_S, 2, 0, 4, 0x80, 1, 0x40, 4]);
    assert_eq!(request[20..24], [0x80, 128, 0xC0, 0], "both indications are offered");
    assert_eq!(ulpdu(&mut stream), read(1));
    // Established when the Read is answered.
    let response = [0xC1, 0x42, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
    let mut fpdu = vec![0, 14];
    fpdu.extend(response);
    let sum = uwarp_wire::crc::to_wire(uwarp_wire::crc::crc32c(&fpdu));
    fpdu.extend(sum);
    stream.write_all(&fpdu).unwrap();
    let established = expect(&client, EventKind::Established);
    assert_eq!((established.param.initiator_depth, established.param.responder_resources), (0, 128));
    established.acknowledge();
    assert_eq!(queue_pair.query().max_rd_atomic, 0);
}

/// A server that speaks first waited for ever if it had not agreed to the peer-to-peer model.
#[test]
fn the_first_fpdu_is_a_write_where_nobody_waits_for_one() {
    let cm = cm(Timeouts::default());
    let (client, stranger) = (channel(), Stranger::new());
    let active = resolved(&cm, &client, stranger.address());
    active.connect(&qp(), ConnParam::DEFAULT, b"").unwrap();
    let (mut stream, _) = stranger.answer(&[FLAG_C | FLAG_S, 2, 0, 4, 0, 1, 0, 1]);
    assert_eq!(ulpdu(&mut stream), WRITE);
    expect(&client, EventKind::Established).acknowledge();
}

/// The peer's depths were lost when it rejected (RFC 6581 section 9.1).
#[test]
fn a_rejection_says_what_depths_the_peer_has() {
    for (enhanced, depths) in [([0x80, 3, 0xC0, 9], (9, 3)), ([0xBF, 0xFF, 0xFF, 0xFF], (0, 0))] {
        let cm = cm(Timeouts::default());
        let (client, stranger) = (channel(), Stranger::new());
        let active = resolved(&cm, &client, stranger.address());
        active.connect(&qp(), ConnParam::DEFAULT, b"").unwrap();
        let [a, b, c, d] = enhanced;
        stranger.answer(&[FLAG_C | FLAG_S | FLAG_R, 2, 0, 6, a, b, c, d, b'n', b'o']);
        let rejected = expect(&client, EventKind::Rejected);
        assert_eq!((rejected.param.responder_resources, rejected.param.initiator_depth), depths);
        assert_eq!(rejected.private_data, b"no");
        rejected.acknowledge();
    }
}

fn in_error() -> Arc<uwarp_driver::Qp> {
    let queue_pair = qp();
    queue_pair.modify(&QpModify { state: Some(QpState::Err), ..QpModify::default() }).unwrap();
    queue_pair
}

/// Layer 2, type 0, code 5 (RFC 6581 section 9.3).
const LOCAL_ERROR: [u8; 4] = [0x20, 5, 0, 0];

#[test]
fn a_queue_pair_that_cannot_take_the_connection_is_told_of_by_the_initiator() {
    let cm = cm(Timeouts::default());
    let (client, stranger) = (channel(), Stranger::new());
    let active = resolved(&cm, &client, stranger.address());
    active.connect(&in_error(), ConnParam::DEFAULT, b"").unwrap();
    let (mut stream, _) = stranger.answer(&[FLAG_C | FLAG_S, 2, 0, 4, 0x80, 1, 0x80, 1]);
    assert_eq!(ulpdu(&mut stream)[18..22], LOCAL_ERROR);
    expect(&client, EventKind::ConnectError).acknowledge();
    assert_eq!(stream.read(&mut [0]).unwrap(), 0, "and that is all");
}

#[test]
fn a_queue_pair_that_cannot_take_the_connection_is_told_of_by_the_responder() {
    let cm = cm(Timeouts::default());
    let server = channel();
    let listener = listening(&cm, &server, local(0), 0);
    let mut stranger =
        stranger(listener.local_address().unwrap(), &[FLAG_C | FLAG_S, 2, 0, 4, 0x80, 1, 0x80, 1]);
    let passive = requested(&server);
    assert!(passive.accept(&in_error(), None, b"").is_err());
    take_request(&mut stranger);
    assert_eq!(ulpdu(&mut stranger)[18..22], LOCAL_ERROR);
}

/// siw answers some Reads of no bytes wrongly, and is recognised by our flag in its reply; adapters must
/// confirm placement.
#[test]
fn a_stranger_is_asked_what_it_has_placed_unless_it_may_be_siw() {
    let plain = FLAG_C | FLAG_S;
    for (what, flags, ird, ord, asked) in [
        ("an adapter", plain, 4, 128, true),
        ("siw", plain | FLAG_UWARP_A, 4, 128, false),
        ("one that takes no Reads", plain, 0, 128, false),
        ("one that does not say how many it takes", plain, 0x3FFF, 128, false),
        ("an adapter, of a program without Reads", plain, 1, 0, true),
    ] {
        let cm = cm(Timeouts::default());
        let (client, stranger) = (channel(), Stranger::new());
        let active = resolved(&cm, &client, stranger.address());
        let queue_pair = qp();
        active.connect(&queue_pair, ConnParam { initiator_depth: ord, ..ConnParam::DEFAULT }, b"").unwrap();
        let [high, low] = (0x8000 | ird as u16).to_be_bytes();
        let (mut stream, _) = stranger.answer(&[flags, 2, 0, 4, high, low, 0x80, 1]);
        assert_eq!(ulpdu(&mut stream), WRITE, "{what}");
        expect(&client, EventKind::Established).acknowledge();
        let op = SendOp::Send { invalidate: None };
        let wr = SendWr { wr_id: 1, op, flags: SendFlags::SIGNALED, sges: &[] };
        queue_pair.post_send(std::iter::once(wr)).unwrap();
        assert_eq!(ulpdu(&mut stream)[..2], [0x41, 0x43], "{what}: the Send");
        if asked {
            assert_eq!(ulpdu(&mut stream), read(1), "{what}");
        } else {
            active.disconnect().unwrap();
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest).unwrap();
            assert!(rest.is_empty(), "{what}: {rest:x?}");
        }
    }
}
