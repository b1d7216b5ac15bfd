//! Datagram-iWARP against its specification: the bytes of the appendix of docs/datagram-iwarp.md, the sizes
//! it gives, and what Error Messages and lookups refuse.

use proptest::prelude::*;
use uwarp_wire::datagram::error::{self, ErrorMessage};
use uwarp_wire::datagram::lookup::{self, Reply, Request, Status};
use uwarp_wire::datagram::memory::{Memory, Says};
use uwarp_wire::datagram::part::{Offer, Part, PartHead};
use uwarp_wire::datagram::proof::Proof;
use uwarp_wire::datagram::{self, Datagram, FLAG_IMMEDIATE, FLAG_RELIABLE, Header, QPN_MULTICAST, record};
use uwarp_wire::ddp::{QN_SEND, Untagged};
use uwarp_wire::grh::Grh;
use uwarp_wire::introduction::Cookie;
use uwarp_wire::rdmap::{Control, Opcode};
use uwarp_wire::terminate::{TerminateError, UntaggedBuffer};
use uwarp_wire::{crc, text};

const SPECIFICATION: &str = include_str!("../../../docs/datagram-iwarp.md");

const TO_ONE: Header = Header {
    flags: 0,
    source_qpn: 0x4E_2103,
    destination_qpn: 0x4E_2007,
    qkey: 0x1111_1111,
    immediate: 0,
    incarnation: 0xCAFE_F00D,
};
const TO_GROUP: Header = Header {
    flags: FLAG_IMMEDIATE,
    destination_qpn: QPN_MULTICAST,
    qkey: 0x0123_4567,
    immediate: 0x0102_0304,
    ..TO_ONE
};
const ASK: Memory = Memory {
    source_qpn: TO_ONE.source_qpn,
    destination_qpn: TO_ONE.destination_qpn,
    says: Says::Request { token: [0x5E; 16] },
};
const OFFER: Memory = Memory {
    source_qpn: TO_ONE.destination_qpn,
    destination_qpn: TO_ONE.source_qpn,
    says: Says::Offer { token: [0x5E; 16], name: [0x11; 16], word: [0x22; 16] },
};
const BEGINS: Memory = Memory { says: Says::Begins { word: [0x22; 16] }, ..ASK };
const PIECE: record::Head = record::Head {
    source_qpn: TO_ONE.source_qpn,
    destination_qpn: TO_ONE.destination_qpn,
    qkey: TO_ONE.qkey,
    immediate: [0, 0, 0, 7],
    solicited: false,
    incarnation: TO_ONE.incarnation,
    message: 5,
    offset: 12,
    message_len: 24,
    job_key: 0x0123_4567_89AB_CDEF,
    stag: 0x1234,
    to: 0x7000,
};
const TOO_LONG: TerminateError = TerminateError::UntaggedBuffer(UntaggedBuffer::TooLong);
const COMPLAINT: ErrorMessage = ErrorMessage {
    source_qpn: TO_ONE.destination_qpn,
    destination_qpn: TO_ONE.source_qpn,
    qkey: TO_ONE.qkey,
    incarnation: TO_ONE.incarnation,
    msn: 1,
    error: TOO_LONG,
};
const REQUEST: Request<'_> = Request {
    transaction: 0x5EED_0001,
    port_space: 0x0111,
    service_port: 7174,
    cookie: 0,
    private_data: b"hi",
};
const REPLY: Reply<'_> = Reply {
    transaction: REQUEST.transaction,
    qpn: TO_ONE.destination_qpn,
    qkey: 0x0123_4567,
    status: Status::Success,
    cookie: 0,
    private_data: b"welcome",
};
const ASK_AGAIN: Reply<'_> = Reply {
    qpn: 0,
    qkey: 0,
    status: Status::CookieRequired,
    cookie: 0x1020_3040_5060_7080,
    private_data: b"",
    ..REPLY
};
/// The larger number connects, so it asks.
const PROOF_REQUEST: Proof = Proof {
    source_qpn: TO_ONE.source_qpn,
    destination_qpn: TO_ONE.destination_qpn,
    token: 0x5EED_0002_5EED_0003,
    cookie: None,
};
const PROOF_REPLY: Proof = Proof {
    source_qpn: PROOF_REQUEST.destination_qpn,
    destination_qpn: PROOF_REQUEST.source_qpn,
    cookie: Some(Cookie { made: 0x1122_3344, hash: 0x5566_7788_99AA_BBCC }),
    ..PROOF_REQUEST
};

/// Half of A.1, which has 53 bytes.
const PART: PartHead = PartHead {
    source_qpn: TO_ONE.source_qpn,
    destination_qpn: TO_ONE.destination_qpn,
    qkey: TO_ONE.qkey,
    number: 9,
    length: 53,
    offset: 27,
};
const PARTS_REQUEST: Offer = Offer {
    source_qpn: TO_ONE.source_qpn,
    destination_qpn: TO_ONE.destination_qpn,
    token: 0x5EED_0004_5EED_0005,
    answers: false,
};

fn send(header: Header, opcode: Opcode, msn: u32, payload: &[u8]) -> Vec<u8> {
    let rsvdulp = Control::new(opcode).to_byte();
    let ddp = Untagged { last: true, rsvdulp, rsvdulp32: 0, qn: QN_SEND, msn, mo: 0 };
    seal([&header.to_bytes()[..], &ddp.to_bytes(), payload].concat())
}

fn hello() -> Vec<u8> {
    send(TO_ONE, Opcode::Send, 1, b"hello, peer")
}

/// Appends the CRC.
fn seal(mut covered: Vec<u8>) -> Vec<u8> {
    let crc = crc::to_wire(crc::crc32c(&covered));
    covered.extend(crc);
    covered
}

fn request(request: Request<'_>) -> Vec<u8> {
    let mut out = vec![0xEE; request.buffer_len()];
    assert_eq!(request.emit(&mut out), out.len());
    out
}

fn reply(reply: Reply<'_>) -> Vec<u8> {
    let mut out = vec![0xEE; reply.buffer_len()];
    assert_eq!(reply.emit(&mut out), out.len());
    out
}

fn parse(bytes: &[u8]) -> Datagram<'_> {
    let datagram = Datagram::parse(bytes).expect("a datagram");
    assert!(datagram.is_intact());
    datagram
}

/// In the form of the appendix.
fn block(bytes: &[u8]) -> String {
    let lines = bytes.chunks(16).map(|row| row.iter().map(|b| format!("{b:02x}")).collect::<Vec<_>>());
    lines.map(|row| row.join(" ")).collect::<Vec<_>>().join("\n")
}

/// Name of a datagram of the appendix: its extension header, then its body.
fn line(bytes: &[u8]) -> String {
    let datagram = parse(bytes);
    match text::Segment::parse(datagram.body()) {
        Ok(segment) => format!("{} {segment}", datagram.header()),
        Err(e) => panic!("{e}"),
    }
}

#[test]
fn the_specification_has_these_bytes() {
    let hello = hello();
    let news = send(TO_GROUP, Opcode::SendSe, 2, b"8 bytes.");
    let empty = send(TO_ONE, Opcode::Send, 3, b"");
    let rest = seal([&PIECE.to_bytes(true)[..], b"and the rest"].concat());
    let part = [&PART.to_bytes()[..], &hello[27..], &[0]].concat();
    let (asks, takes) = (PARTS_REQUEST, PARTS_REQUEST.answer());
    let grh = |source: &str, destination: &str| Grh {
        source: source.parse().unwrap(),
        destination: destination.parse().unwrap(),
        traffic_class: 0,
        hop_limit: 64,
        flow_label: 0,
        datagram_len: hello.len() as u16,
    };
    let area = |grh: Grh| {
        let mut area = [0; 40];
        grh.emit(&mut area);
        assert_eq!(Grh::parse(&area), Some(grh));
        area.to_vec()
    };
    let cases = [
        ("A.1 Send", line(&hello), hello.clone()),
        ("A.2 Send with Solicited Event and immediate, to a group", line(&news), news),
        ("A.3 Send without payload", line(&empty), empty),
        ("A.4 Error Message about A.1", COMPLAINT.to_string(), COMPLAINT.to_bytes().to_vec()),
        ("A.5 Lookup Request", REQUEST.to_string(), request(REQUEST)),
        ("A.6 Lookup Reply", REPLY.to_string(), reply(REPLY)),
        ("A.7 Lookup Reply that asks for a cookie", ASK_AGAIN.to_string(), reply(ASK_AGAIN)),
        ("A.8 GRH area of A.1 over IPv4", "GRH".into(), area(grh("192.0.2.1", "192.0.2.2"))),
        ("A.9 GRH area of A.1 over IPv6", "GRH".into(), area(grh("2001:db8::1", "2001:db8::2"))),
        ("A.10 Proof Request", PROOF_REQUEST.to_string(), PROOF_REQUEST.to_bytes().to_vec()),
        ("A.11 Proof Reply", PROOF_REPLY.to_string(), PROOF_REPLY.to_bytes().to_vec()),
        ("A.12 Memory Request", ASK.to_string(), ASK.to_bytes().to_vec()),
        ("A.13 Memory Reply", OFFER.to_string(), OFFER.to_bytes().to_vec()),
        ("A.14 Memory Begins", BEGINS.to_string(), BEGINS.to_bytes().to_vec()),
        (
            "A.15 The second and last segment of a Write-Record",
            text::DatagramLine { head: &rest, len: rest.len() }.to_string(),
            rest.clone(),
        ),
        (
            "A.16 The second of two parts of A.1",
            Part::parse(&part).expect("a part").to_string(),
            part.clone(),
        ),
        ("A.17 Parts Request", asks.to_string(), asks.to_bytes().to_vec()),
        ("A.18 Parts Reply", takes.to_string(), takes.to_bytes().to_vec()),
    ];
    let expected: String = cases
        .iter()
        .map(|(title, line, bytes)| format!("\n### {title}\n```\n{line}\n{}\n```\n", block(bytes)))
        .collect();
    let (_, written) = SPECIFICATION.split_once("## Appendix A").expect("an appendix");
    let written = written.find("\n### ").map_or("", |at| &written[at..]);
    assert!(written == expected, "appendix A needs:\n{expected}");
    assert_eq!(ErrorMessage::answer(&parse(&hello), TOO_LONG), Some(COMPLAINT));
}

#[test]
fn headers_have_the_sizes_that_the_specification_gives() {
    assert_eq!(Header::LEN + Untagged::LEN, 38);
    assert_eq!(datagram::MAX_LEN - 38 - datagram::CRC_LEN, 65_465);
    assert_eq!(ErrorMessage::LEN, 46);
    assert_eq!(Request::MIN_DATAGRAM_LEN, 176);
    assert_eq!(Request::MAX_DATAGRAM_LEN, 220);
    assert_eq!(Reply::MAX_DATAGRAM_LEN, 176);
}

/// One wrong field at a time.
#[test]
fn error_messages_with_a_wrong_field_are_dropped() {
    let complaint = COMPLAINT.to_bytes();
    assert_eq!(ErrorMessage::parse(&parse(&complaint)), Ok(COMPLAINT));
    assert_eq!(ErrorMessage::answer(&parse(&complaint), TOO_LONG), None, "no answer to an answer");
    let with = |at: usize, value: u8| {
        let mut covered = complaint[..complaint.len() - 4].to_vec();
        covered[at] = value;
        let bytes = seal(covered);
        ErrorMessage::parse(&parse(&bytes)).err()
    };
    assert_eq!(with(4, FLAG_IMMEDIATE), Some(error::Error::Flags(FLAG_IMMEDIATE)));
    assert_eq!(with(4, FLAG_RELIABLE), Some(error::Error::Flags(FLAG_RELIABLE)));
    assert_eq!(with(4, 1), Some(error::Error::Flags(1)));
    // Tagged, not the last, another DDP version, another RDMAP version, a Send, queue 3, an offset.
    for (at, value) in [(20, 0xC1), (20, 0x01), (20, 0x42), (21, 0x07), (21, 0x43), (29, 3), (37, 1)] {
        assert_eq!(with(at, value), Some(error::Error::Headers), "byte {at} = {value:#04x}");
    }
    let long = seal([&complaint[..complaint.len() - 4], &[0]].concat());
    assert_eq!(ErrorMessage::parse(&parse(&long)), Err(error::Error::Length(47)));
}

#[test]
fn an_error_message_is_never_longer_than_its_cause_and_never_about_a_group() {
    for len in 0..8 {
        let bytes = send(TO_ONE, Opcode::Send, 1, &[0; 8][..len]);
        let answer = ErrorMessage::answer(&parse(&bytes), TOO_LONG);
        assert_eq!(answer.is_some(), bytes.len() >= ErrorMessage::LEN, "{len} bytes of payload");
    }
    let to_group = send(TO_GROUP, Opcode::Send, 1, b"8 bytes.");
    assert_eq!(ErrorMessage::answer(&parse(&to_group), TOO_LONG), None);
    assert_eq!(ErrorMessage::answer(&parse(&request(REQUEST)), TOO_LONG), None);
}

#[test]
fn requests_without_padding_and_lookups_with_false_lengths() {
    let good = request(REQUEST);
    assert_eq!(good.len(), Request::MIN_DATAGRAM_LEN);
    assert_eq!(Request::parse(&parse(&good)), Ok(REQUEST));
    let short = seal(good[..good.len() - 5].to_vec());
    assert_eq!(Request::parse(&parse(&short)), Err(lookup::Error::NotPadded(175)));
    assert_eq!(Reply::parse(&parse(&good)), Err(lookup::Error::Flags(1)));
    let stub = seal(good[..35].to_vec());
    assert_eq!(Request::parse(&parse(&stub)), Err(lookup::Error::Truncated));

    let with = |at: usize, value: u8| {
        let mut covered = good[..good.len() - 4].to_vec();
        covered[at] = value;
        seal(covered)
    };
    assert_eq!(Request::parse(&parse(&with(27, 181))), Err(lookup::Error::TooMuchData(181)));
    assert_eq!(Request::parse(&parse(&with(27, 137))), Err(lookup::Error::Truncated), "more than there is");
    assert_eq!(Request::parse(&parse(&with(4, 0x81))), Err(lookup::Error::Flags(0x81)));
    assert_eq!(Request::parse(&parse(&with(24, 0xFF))), Ok(REQUEST), "reserved bytes are ignored");
    assert_eq!(Request::parse(&parse(&hello())), Err(lookup::Error::Flags(0)));
}

#[test]
fn private_data_beyond_the_limit_is_not_sent() {
    let much = [7; 300];
    let long = request(Request { private_data: &much, ..REQUEST });
    assert_eq!(long.len(), Request::MAX_DATAGRAM_LEN);
    assert_eq!(Request::parse(&parse(&long)).unwrap().private_data, &much[..180]);
    let long = reply(Reply { private_data: &much, ..REPLY });
    assert_eq!(long.len(), Reply::MAX_DATAGRAM_LEN);
    assert_eq!(Reply::parse(&parse(&long)).unwrap().private_data, &much[..136]);
}

#[test]
fn every_status_survives() {
    for code in 0..=u16::MAX {
        assert_eq!(Status::from_code(code).code(), code);
    }
}

proptest! {
    #[test]
    fn lookups(
        transaction: u32, port_space: u16, service_port: u16, cookie: u64, qpn in 0u32..1 << 24, qkey: u32,
        status in any::<u16>().prop_map(Status::from_code),
        private_data in prop::collection::vec(any::<u8>(), 0..136),
    ) {
        let private_data = &private_data[..];
        let question = Request { transaction, port_space, service_port, cookie, private_data };
        let question_bytes = request(question);
        prop_assert_eq!(Request::parse(&parse(&question_bytes)), Ok(question));
        let answer = Reply { transaction, qpn, qkey, status, cookie, private_data };
        let answer_bytes = reply(answer);
        prop_assert_eq!(Reply::parse(&parse(&answer_bytes)), Ok(answer));
        prop_assert!(answer_bytes.len() <= question_bytes.len());
    }

    /// Any single wrong bit is found, by the version or the CRC.
    #[test]
    fn a_wrong_bit_is_found(at: prop::sample::Index, bit in 0u8..8) {
        let mut bytes = hello();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        let read: Result<_, datagram::Error> = Datagram::parse(&bytes);
        prop_assert!(!read.is_ok_and(|datagram| datagram.is_intact()));
    }
}
