//! What must hold for any bytes: framing and the set-up machines do not panic, and their results do not
//! depend on how the bytes arrive; a datagram that is accepted is what a sender would make. Shared by
//! `tests/any_bytes.rs` and the fuzz targets `framer`, `mpa_setup` and `datagram`.

use uwarp_proto::datagram;
use uwarp_proto::framing::{Framing, Mpa, Step};
use uwarp_proto::setup::{
    AcceptParams, Depths, Initiator, InitiatorConfig, Negotiated, Outcome, PeerData, Responder,
    ResponderPolicy, Revision, Rtr, SetupError,
};
use uwarp_proto::tx::OutSegment;
use uwarp_wire::datagram::proof::Proof;
use uwarp_wire::datagram::record;
use uwarp_wire::ddp::{Header, Tagged};
use uwarp_wire::mpa;

/// The longest FPDU with its markers.
const LONGEST: usize = 2 + 65_535 + 3 + 4 + 4 * (65_544 / 512 + 2);

/// The first byte chooses CRC, markers and how the rest, which is the stream, arrives.
pub fn framer(bytes: &[u8]) {
    let Some((flags, stream)) = bytes.split_first() else { return };
    let (crc, markers) = (flags & 1 != 0, flags & 2 != 0);
    let whole = frames(crc, markers, stream, usize::MAX);
    let pieces = frames(crc, markers, stream, usize::from(flags >> 2) + 1);
    assert_eq!(whole, pieces, "the result depends on how the bytes arrive");
    if flags & 4 == 0 {
        there_and_back(crc, markers, stream);
    }
}

/// `bytes` as a datagram, and also with the correct headers and CRC, which a fuzzer seldom finds.
pub fn datagram(bytes: &[u8]) {
    one_datagram(bytes);
    let mut covered = bytes.to_vec();
    for (at, value) in [(0, 1), (20, 0x41), (21, 0x43)] {
        one_datagram(&sealed(&covered));
        if let Some(byte) = covered.get_mut(at) {
            *byte = value;
        }
    }
    for at in [4].into_iter().chain(26..30).chain(34..38) {
        if let Some(byte) = covered.get_mut(at) {
            *byte &= 0x80 * u8::from(at == 4);
        }
    }
    proof(bytes);
    record(bytes);
    let good = sealed(&covered);
    one_datagram(&good);
    assert_eq!(datagram::parse(&good).is_ok(), bytes.len() >= datagram::HEAD_LEN, "{good:02x?}");
}

/// The same as a request for a cookie and as its answer, with the right length and CRC.
fn proof(bytes: &[u8]) {
    for kind in [3, 4] {
        let mut covered = bytes.to_vec();
        covered.resize(Proof::LEN - 4, 0);
        (covered[0], covered[4]) = (1, kind);
        let bytes = sealed(&covered);
        let proof = datagram::parse_proof(&bytes).expect("a proof");
        assert_eq!((proof.source_qpn, proof.cookie.is_some()), (be24(&bytes[1..]), kind == 4));
        assert_eq!(datagram::parse_proof(&proof.to_bytes()), Some(proof));
        assert!(datagram::parse(&bytes).is_err(), "it is no message");
        let mut wrong = bytes;
        let at = usize::from(wrong[24]) % wrong.len();
        wrong[at] ^= 1 << (wrong[25] & 7);
        assert_eq!(datagram::parse_proof(&wrong), None, "with a bit flipped");
    }
}

/// The same as a segment of an RDMA Write-Record: as it is, and with headers that may be right.
fn record(bytes: &[u8]) {
    let mut covered = bytes.to_vec();
    for (at, value) in [(0, 1), (4, 0x88), (40, 0x81), (41, 0x4C), (24, 0), (28, 0)] {
        let sealed = sealed(&covered);
        if let Some(record::Segment { head, payload }) = datagram::parse_record(&sealed) {
            assert!(head.message_len <= record::MOST);
            let end = u64::from(head.offset) + payload.len() as u64;
            assert!(end <= u64::from(head.message_len), "nothing beyond the message");
            let last = end == u64::from(head.message_len);
            let again = [&head.to_bytes(last)[..], payload].concat();
            let again = self::sealed(&again);
            assert_eq!(datagram::parse_record(&again), Some(record::Segment { head, payload }));
            assert!(datagram::parse(&sealed).is_err(), "it is no message");
        }
        if let Some(byte) = covered.get_mut(at) {
            *byte = value;
        }
    }
    let payload = bytes.get(record::Head::LEN..).unwrap_or(&[]);
    let (Some(own), Ok(len)) = (bytes.get(..8), u32::try_from(payload.len())) else { return };
    let word = |at: usize| u32::from_be_bytes([own[at], own[at + 1], own[at + 2], own[at + 3]]);
    let head = record::Head {
        source_qpn: word(0) >> 8,
        destination_qpn: word(4) >> 8,
        qkey: word(1),
        immediate: [own[0], own[7], own[3], own[5]],
        solicited: own[6] & 1 == 1,
        incarnation: word(2),
        message: word(3),
        offset: word(2) % 1000,
        message_len: word(2) % 1000 + len,
        job_key: u64::from(word(0)) << 32 | u64::from(word(4)),
        stag: word(4),
        to: u64::from(word(1)) << 20,
    };
    let whole = sealed(&[&head.to_bytes(true)[..], payload].concat());
    let is_good = len > 0 || head.message_len == 0;
    assert_eq!(datagram::parse_record(&whole), is_good.then_some(record::Segment { head, payload }));
}

fn be24(bytes: &[u8]) -> u32 {
    u32::from_be_bytes([0, bytes[0], bytes[1], bytes[2]])
}

fn sealed(covered: &[u8]) -> Vec<u8> {
    [covered, &datagram::trailer(uwarp_wire::crc::crc32c(covered))].concat()
}

fn one_datagram(bytes: &[u8]) {
    if let Some(proof) = datagram::parse_proof(bytes) {
        assert_eq!((proof.to_bytes().len(), datagram::parse(bytes).is_err()), (bytes.len(), true));
    }
    let Ok(message) = datagram::parse(bytes) else { return };
    assert_eq!(message.payload.len() + datagram::OVERHEAD, bytes.len());
    assert_eq!(datagram::destination(bytes), Ok(message.head.destination_qpn));
    // A datagram that a sender makes of the same message parses as the same message. The bytes may differ in
    // reserved fields.
    let again = sealed(&[&message.head.to_bytes()[..], message.payload].concat());
    assert_eq!(datagram::parse(&again), Ok(message));
}

fn framing(crc: bool, markers: bool) -> Framing {
    Framing::Mpa(Mpa { crc, send_markers: markers, receive_markers: markers })
}

/// ULPDUs found, bytes consumed, and the error at the end if there was one.
fn frames(crc: bool, markers: bool, stream: &[u8], piece: usize) -> (Vec<Vec<u8>>, usize, bool) {
    let mut receiver = framing(crc, markers).receiver();
    let (mut found, mut start, mut end) = (Vec::new(), 0, piece.min(stream.len()));
    loop {
        let input = &stream[start..end];
        match receiver.next(input, &mut Vec::new()) {
            Ok(Step::Ulpdu { ulpdu, consumed }) => {
                assert!(ulpdu.len() < consumed && consumed <= input.len());
                found.push(ulpdu.to_vec());
                start += consumed;
                // After a rewind, the next call finds the same.
                let again = found.last().cloned();
                receiver.rewind(consumed);
                let mut scratch = Vec::new();
                let Ok(Step::Ulpdu { ulpdu, consumed: n }) = receiver.next(input, &mut scratch) else {
                    panic!("an FPDU is lost after a rewind");
                };
                assert_eq!((Some(ulpdu.to_vec()), n), (again, consumed));
            }
            Ok(Step::Incomplete { need }) => {
                assert!(need > input.len() && need <= LONGEST, "needs {need} bytes, has {}", input.len());
                if end == stream.len() {
                    return (found, start, false);
                }
                end = (end + piece.min(stream.len())).min(stream.len());
            }
            Err(_) => return (found, start, true),
        }
    }
}

/// The bytes as payload of segments (the byte before each is its length in fours): after sending and
/// receiving they are the same.
fn there_and_back(crc: bool, markers: bool, bytes: &[u8]) {
    let mut sender = framing(crc, markers).sender();
    let (mut sent, mut stream) = (Vec::new(), Vec::new());
    let mut rest = bytes;
    while let Some((len, tail)) = rest.split_first() {
        let (payload, tail) = tail.split_at((usize::from(*len) * 4).min(tail.len()));
        rest = tail;
        let header = Tagged { last: true, stag: 1, to: stream.len() as u64, rsvdulp: 0x40 };
        sent.push([&header.to_bytes(), payload].concat());
        let len = u32::try_from(payload.len()).unwrap();
        let segment = OutSegment { header: Header::Tagged(header), offset: 0, len };
        // Neither a segment that cannot be copied nor one that is dropped again has an effect.
        let before = stream.len();
        let failed = sender.stage(&mut stream, &segment, |buf, _| {
            buf.push(0);
            Err(())
        });
        assert_eq!(failed, Err(()));
        assert_eq!(stream.len(), before);
        sender.stage_bytes(&mut stream, &segment, payload);
        sender.unsend(stream.len() - before);
        stream.truncate(before);
        sender.stage_bytes(&mut stream, &segment, payload);
    }
    assert_eq!(frames(crc, markers, &stream, 700), (sent, stream.len(), false));
}

/// The first bytes choose the configuration of the two machines. The rest is what an initiator and a
/// responder receive, with the key put before it. Also checks whether the two machines agree when they talk
/// to each other.
pub fn setup(bytes: &[u8]) {
    let Some(([a, b, c, d], rest)) = bytes.split_first_chunk::<4>() else { return };
    let bit = |byte: &u8, n: u8| byte >> n & 1 == 1;
    let revision = |two: bool| if two { Revision::Two } else { Revision::One };
    let peer = PeerData { qpn: 0x10203, ..PeerData::new() };
    let depths = |n: u8| Depths { ird: u16::from(n & 15), ord: u16::from(n >> 4), negotiate: !bit(c, 7) };
    let config = InitiatorConfig {
        revision: revision(bit(a, 0)),
        crc: bit(a, 1),
        markers: bit(a, 2),
        depths: depths(*b),
        max_ird: 32,
        peer: bit(a, 3).then_some(peer),
        peer_in_request: bit(a, 4),
    };
    let policy = ResponderPolicy {
        max_revision: revision(bit(c, 0)),
        crc: bit(c, 1),
        markers: bit(c, 2),
        know_peers: bit(c, 3),
        max_ird: 32,
        host: None,
    };
    let params = AcceptParams { depths: depths(*d), peer };
    let piece = usize::from(a >> 5) + 1;
    reply(config, rest, piece);
    request(policy, params, rest, piece);
    conversation(config, policy, params, rest);
}

/// Feeds a machine no more than it wants, in small pieces, and with a key before the bytes.
macro_rules! feed {
    ($machine:expr, $bytes:expr, $piece:expr) => {{
        let mut rest: &[u8] = $bytes;
        loop {
            let want = $machine.want();
            if want == 0 || rest.is_empty() {
                break None;
            }
            assert!(want <= mpa::FRAME_LEN + mpa::MAX_PRIVATE_DATA);
            let (now, later) = rest.split_at(want.min($piece).min(rest.len()));
            rest = later;
            match $machine.handle_input(now) {
                Ok(None) => {}
                Ok(Some(done)) => break Some(Ok(done)),
                Err(e) => break Some(Err(e)),
            }
        }
    }};
}

fn keyed(key: [u8; 16], rest: &[u8]) -> Vec<u8> {
    let mut out = key.to_vec();
    out.extend(rest);
    out
}

fn reply(config: InitiatorConfig, rest: &[u8], piece: usize) {
    let Ok(mut machine) = Initiator::new(config, b"hello") else { return };
    assert!(machine.poll_transmit().is_some());
    let result = feed!(machine, &keyed(mpa::KEY_REP, rest), piece);
    if result.is_some() {
        assert_eq!(machine.want(), 0);
        assert_eq!(machine.handle_input(&[1]), Err(SetupError::Misuse));
    }
    if let Some(Ok(Outcome::Accepted(negotiated))) = &result {
        sane(negotiated, true);
    }
    let mut whole = Initiator::new(config, b"hello").expect("as before");
    let again = feed!(whole, &keyed(mpa::KEY_REP, rest), usize::MAX);
    assert_eq!(result, again, "the answer depends on how the bytes arrive");
    let _ = feed!(Initiator::new(config, b"").expect("shorter"), rest, piece);
}

fn request(policy: ResponderPolicy, params: AcceptParams, rest: &[u8], piece: usize) {
    let mut machine = Responder::new(policy);
    let result = feed!(machine, &keyed(mpa::KEY_REQ, rest), piece);
    if result.is_some() {
        assert_eq!(machine.want(), 0);
    }
    match &result {
        Some(Ok(request)) => {
            assert!(request.private_data.len() <= mpa::MAX_PRIVATE_DATA);
            let limit = machine.private_data_limit();
            let negotiated = machine.accept(params, &vec![7; limit]).expect("the limit fits");
            sane(&negotiated, false);
            let frame = machine.poll_transmit().expect("a reply");
            assert!(frame.len() <= mpa::FRAME_LEN + mpa::MAX_PRIVATE_DATA);
        }
        Some(Err(_)) => assert_eq!(machine.poll_transmit(), None, "an answer to a bad request"),
        None => {}
    }
    let mut whole = Responder::new(policy);
    let again = feed!(whole, &keyed(mpa::KEY_REQ, rest), usize::MAX);
    assert_eq!(result, again, "the answer depends on how the bytes arrive");
    let _ = feed!(Responder::new(policy), rest, piece);
}

fn sane(negotiated: &Negotiated, initiator: bool) {
    assert_eq!(negotiated.initiator, initiator);
    let mine = if initiator {
        [Rtr::SendWrite, Rtr::SendWrite, Rtr::SendRead]
    } else {
        [Rtr::None, Rtr::Expect, Rtr::Expect]
    };
    assert!(mine.contains(&negotiated.rtr));
    assert!(negotiated.ird <= 0x3FFF && negotiated.ord <= 0x3FFF);
}

/// Connects the two machines to each other: both must negotiate the same.
fn conversation(config: InitiatorConfig, policy: ResponderPolicy, params: AcceptParams, data: &[u8]) {
    let data = &data[..data.len().min(400)];
    let Ok(mut initiator) = Initiator::new(config, data) else { return };
    let mut responder = Responder::new(policy);
    let Some(Ok(request)) = feed!(responder, &initiator.poll_transmit().expect("a request"), 7) else {
        return;
    };
    // A responder that does not recognize uwarp sees the initiator's introduction after the program's data.
    let extra = if config.peer_in_request && !request.peer_is_uwarp { PeerData::LEN } else { 0 };
    let seen = request.private_data.strip_prefix(data);
    assert!(seen.is_some_and(|more| more.is_empty() || more.len() == extra), "{request:?}");
    let Ok(b) = responder.accept(params, data) else { return };
    let Some(Ok(outcome)) = feed!(initiator, &responder.poll_transmit().expect("a reply"), 7) else { return };
    let Outcome::Accepted(a) = outcome else { panic!("rejected") };
    assert_eq!(a.private_data, data);
    assert_eq!((a.crc, a.send_markers, a.receive_markers), (b.crc, b.receive_markers, b.send_markers));
    assert_eq!((a.revision, a.peer_is_uwarp), (b.revision, b.peer_is_uwarp));
    // An end that expects the indication gets it.
    assert!(a.rtr == Rtr::SendWrite || b.rtr == Rtr::Expect);
    // Revision 1 does not negotiate depths.
    if a.peer_enhanced.is_some() && config.depths.negotiate && params.depths.negotiate {
        assert!(a.ord <= b.ird && b.ord <= a.ird, "{a:?} {b:?}");
    }
}
