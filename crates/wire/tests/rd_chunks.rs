//! Chunks of reliable datagrams: golden bytes, every value there and back, and any bytes.

#[path = "roundtrip/reliable.rs"]
mod reliable;

use proptest::prelude::*;
use uwarp_wire::ddp::{self, Tagged, Untagged};
use uwarp_wire::rd::Packet;
use uwarp_wire::rd::ack;
use uwarp_wire::rd::chunk::{
    self, Abandon, Chunk, Claim, Close, Error, Ready, Reason, Stream, StreamCredit, StreamReset, Verdict,
    chunks,
};
use uwarp_wire::rd::contact::Cookie;
use uwarp_wire::rd::segment::{First, Head, Segment};

const SEND: ddp::Header = ddp::Header::Untagged(Untagged {
    last: true,
    rsvdulp: 0x43,
    rsvdulp32: 0,
    qn: 0,
    msn: 0x0D0E_0F10,
    mo: 0,
});
const HEAD: Head = Head {
    source_qpn: 0x02_0304,
    destination_qpn: 0x06_0708,
    message: 0x0D0E_0F10,
    behind: Some(0x0105),
    offset: 0,
    message_len: None,
    first: Some(First { qkey: 0x2122_2324, immediate: None, job_key: None }),
    acknowledge: true,
    idempotent: false,
    not_repeated: false,
};

fn bytes_of(segment: &Segment<'_>) -> Vec<u8> {
    let mut bytes = vec![0xEE; segment.head_len()];
    assert_eq!(segment.emit_head(&mut bytes), bytes.len());
    bytes.extend(segment.payload);
    bytes
}

fn only(bytes: &[u8]) -> Result<Chunk<'_>, Error> {
    let mut all = chunks(bytes);
    let chunk = all.next().expect("a chunk");
    assert_eq!(all.next(), None);
    chunk
}

/// The examples of docs/rd.md: their text, and their bytes.
fn examples() -> Vec<(String, Vec<u8>)> {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/rd.md");
    let page = std::fs::read_to_string(page).expect("docs/rd.md");
    let (_, appendix) = page.split_once("## Appendix A").expect("an appendix");
    let blocks =
        appendix.split("\n### ").skip(1).map(|section| section.split("```").nth(1).expect("a block"));
    blocks
        .map(|block| {
            let (text, hex) = block.trim().split_once('\n').expect("text, then bytes");
            let bytes = hex.split_whitespace().map(|byte| u8::from_str_radix(byte, 16).expect("hex"));
            (text.to_owned(), bytes.collect())
        })
        .collect()
}

#[test]
fn the_examples_of_the_page_are_what_they_say() {
    let examples = examples();
    assert_eq!(examples.len(), 12);
    for (text, bytes) in examples {
        let packet = Packet::parse(&bytes).expect("a packet");
        assert!(packet.is_intact(), "{text}");
        assert_eq!(packet.to_string(), text);
    }
}

#[test]
fn golden_whole_segment() {
    let segment = Segment { head: HEAD, ddp: SEND, payload: b"hi" };
    let bytes = bytes_of(&segment);
    assert_eq!(
        bytes,
        [
            2, 0xE4, 0, 40, 1, 2, 3, 4, 5, 6, 7, 8, 13, 14, 15, 16, 0x21, 0x22, 0x23, 0x24, 0x41, 0x43, 0, 0,
            0, 0, 0, 0, 0, 0, 13, 14, 15, 16, 0, 0, 0, 0, b'h', b'i',
        ]
    );
    assert_eq!(only(&bytes), Ok(Chunk::Segment(segment)));
    let text = "Segment 0x20304->0x60708 msg=219025168 behind=261 0+2/2 first ack";
    assert_eq!(only(&bytes).unwrap().to_string(), text);
}

#[test]
fn golden_segment_with_every_field() {
    let ddp = ddp::Header::Tagged(Tagged { last: false, stag: 0x3132_3334, to: 0x41, rsvdulp: 0x40 });
    let first =
        First { qkey: 9, immediate: Some([0xA, 0xB, 0xC, 0xD]), job_key: Some(0x5152_5354_5556_5758) };
    let head = Head { message_len: Some(0x1_0000), first: Some(first), idempotent: true, ..HEAD };
    let segment = Segment { head: Head { behind: None, ..head }, ddp, payload: &[1; 3] };
    let bytes = bytes_of(&segment);
    assert_eq!(bytes[..4], [2, 0x97, 0, 57]);
    assert_eq!(bytes[4..12], [0, 2, 3, 4, 0, 6, 7, 8]);
    assert_eq!(bytes[16..24], [0, 0, 0, 0, 0, 1, 0, 0]);
    assert_eq!(
        bytes[24..40],
        [0, 0, 0, 9, 0xA, 0xB, 0xC, 0xD, 0x51, 0x52, 0x53, 0x54, 0x55, 0x56, 0x57, 0x58]
    );
    assert_eq!(bytes[40..54], [0x81, 0x40, 0x31, 0x32, 0x33, 0x34, 0, 0, 0, 0, 0, 0, 0, 0x41]);
    assert_eq!(only(&bytes), Ok(Chunk::Segment(segment)));
    // A later segment of a long Write has 20 + 24 + 14 + 4 bytes beside its payload.
    let later = Head { first: None, offset: 1410, acknowledge: false, behind: None, ..head };
    let later = Segment { head: later, ddp, payload: &[2; 1410] };
    assert_eq!(later.head_len(), 24 + 14);
    assert_eq!(only(&bytes_of(&later)), Ok(Chunk::Segment(later)));
}

#[test]
fn segments_that_contradict_themselves_are_refused() {
    let whole = bytes_of(&Segment { head: HEAD, ddp: SEND, payload: b"hi" });
    let flags = |flags: u8| {
        let mut bytes = whole.clone();
        bytes[1] = flags;
        only(&bytes).err()
    };
    assert_eq!(flags(0x44), Some(Error::Flags(0x44)), "whole, and not the first");
    assert_eq!(flags(0x06), Some(Error::Flags(0x06)), "an immediate in a later segment");
    let part = |offset: u32, message_len: u32, first: bool, payload: &[u8]| {
        let first = first.then(First::default);
        let head = Head { offset, message_len: Some(message_len), first, ..HEAD };
        only(&bytes_of(&Segment { head, ddp: SEND, payload })).err()
    };
    assert_eq!(part(0, 4, true, b"hi"), None);
    assert_eq!(part(2, 4, false, b"hi"), None);
    assert_eq!(part(3, 4, false, b"hi"), Some(Error::Place), "beyond the end");
    assert_eq!(part(u32::MAX, u32::MAX, false, b"hi"), Some(Error::Place), "beyond all");
    assert_eq!(part(2, 4, true, b"hi"), Some(Error::Place), "the first is not at the start");
    assert_eq!(part(0, 4, false, b"hi"), Some(Error::Place), "the start is not the first");
    assert_eq!(part(2, 4, false, b""), Some(Error::Place), "no progress");
    assert_eq!(part(0, 0, true, b""), None, "an empty message");
    let mut other_ddp = whole.clone();
    other_ddp[20] = 0x42;
    assert_eq!(only(&other_ddp), Err(Error::Ddp));
}

#[test]
fn golden_ack() {
    let head = ack::Head {
        largest: 0x0102_0304,
        delay: 0x0506,
        blind: 0x0708,
        credit: 0x090A,
        floor: 0x0D0E_0F10,
        ce: None,
    };
    let packets = [ack::Range { gap: 0, length: 4 }, ack::Range { gap: 2, length: 0x0101 }];
    let messages = [ack::Range { gap: 1, length: 1 }];
    let mut out = [0xEE; 64];
    let len = head.emit(&packets, &messages, &mut out);
    assert_eq!(
        out[..len],
        [
            1, 0, 0, 32, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 2, 1, 13, 14, 15, 16, 0, 0, 0, 4, 0, 2, 1, 1, 0, 1,
            0, 1,
        ]
    );
    let Ok(Chunk::Ack(parsed)) = only(&out[..len]) else { panic!("an ACK") };
    assert_eq!(parsed.head, head);
    assert_eq!(parsed.packets().collect::<Vec<_>>(), packets);
    assert_eq!(parsed.messages().collect::<Vec<_>>(), messages);
    let text =
        "Ack 16909060 delay=5144us blind=7200us credit=2314 floor=219025168 packets=0+4,2+257 done=1+1";
    assert_eq!(parsed.to_string(), text);

    let marked = ack::Head { ce: Some(0x1112_1314), ..head };
    let len = marked.emit(&packets, &[], &mut out);
    assert_eq!((out[1], len), (0x80, 32));
    assert_eq!(out[20..24], [0x11, 0x12, 0x13, 0x14]);
    assert!(matches!(only(&out[..len]), Ok(Chunk::Ack(ack)) if ack.head == marked));
    for (at, value, error) in [(14, 0, Error::Ranges), (14, 33, Error::Ranges), (14, 3, Error::Truncated)] {
        let mut wrong = out;
        wrong[at] = value;
        assert_eq!(only(&wrong[..len]), Err(error), "{value} at {at}");
    }
    out[25] = 1;
    assert_eq!(only(&out[..len]), Err(Error::Ranges), "the largest packet has not arrived");
}

#[test]
fn golden_chunks_of_fixed_length() {
    let cookie = Cookie { key: 0x0102_0304_0506_0708, made: 0x1112_1314_1516_1718 };
    let verdict =
        Verdict { message: 0x0102_0304, reason: Reason::ReceiverNotReady, timer: 12, detail: 0x0506 };
    let rows: [(Chunk<'_>, &[u8], &str); 7] = [
        (
            Chunk::Verdict(verdict),
            &[4, 0, 0, 12, 1, 2, 3, 4, 1, 12, 5, 6],
            "Verdict msg=16909060 ReceiverNotReady timer=12 pn=…1286",
        ),
        (
            Chunk::Ready(Ready { qpn: 0x01_0203, receives: 4 }),
            &[5, 0, 0, 8, 1, 2, 3, 4],
            "Ready 0x10203 receives=4",
        ),
        (
            Chunk::Claim(Claim { port: 0x4E21, cookie }),
            &[
                6, 0, 0, 24, 0x4E, 0x21, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16,
                0x17, 0x18,
            ],
            "Claim port=20001",
        ),
        (Chunk::Ping, &[7, 0, 0, 4], "Ping"),
        (
            Chunk::Close(Close { floor: 0x0102_0304, reason: 5 }),
            &[8, 0, 0, 12, 1, 2, 3, 4, 5, 0, 0, 0],
            "Close floor=16909060 reason=5",
        ),
        (
            Chunk::StreamCredit(StreamCredit { stream: 0x0102_0304, limit: 0x0506_0708 }),
            &[9, 0, 0, 12, 1, 2, 3, 4, 5, 6, 7, 8],
            "Stream credit 16909060 to 84281096",
        ),
        (
            Chunk::StreamReset(StreamReset { stream: 0x0102_0304, reason: 5 }),
            &[10, 0, 0, 12, 1, 2, 3, 4, 5, 0, 0, 0],
            "Stream reset 16909060 reason=5",
        ),
    ];
    for (chunk, bytes, text) in rows {
        let mut out = [0xEE; 24];
        let len = chunk.emit_fixed(&mut out);
        assert_eq!(&out[..len], bytes, "{chunk:?}");
        assert_eq!(only(bytes), Ok(chunk));
        assert_eq!(chunk.to_string(), text);
        for cut in 1..bytes.len() {
            let mut short = bytes[..cut].to_vec();
            assert_eq!(only(&short), Err(Error::Truncated), "{chunk:?} of {cut} bytes");
            if cut >= 4 {
                short[3] = cut as u8;
                assert!(cut == bytes.len() || only(&short) == Err(Error::Truncated), "{chunk:?}, {cut}");
            }
        }
    }
    for code in 0..=u8::MAX {
        assert_eq!(Reason::from_code(code).code(), code);
    }
}

#[test]
fn golden_stream_abandon_and_pad() {
    let stream = Stream {
        stream: 7,
        offset: 0x0102_0304,
        open: Some(0x4E20),
        fin: true,
        acknowledge: false,
        data: b"abc",
    };
    let mut out = vec![0; stream.head_len()];
    stream.emit_head(&mut out);
    out.extend(stream.data);
    assert_eq!(out, [3, 0xC0, 0, 19, 0, 0, 0, 7, 1, 2, 3, 4, 0, 0, 0x4E, 0x20, b'a', b'b', b'c']);
    assert_eq!(only(&out), Ok(Chunk::Stream(stream)));
    assert_eq!(Chunk::Stream(stream).to_string(), "Stream 7 16909060+3 open=0x4e20 fin");

    let later = Stream { open: None, fin: false, acknowledge: true, ..stream };
    let mut out = vec![0; later.head_len()];
    later.emit_head(&mut out);
    out.extend(later.data);
    assert_eq!(out, [3, 4, 0, 15, 0, 0, 0, 7, 1, 2, 3, 4, b'a', b'b', b'c']);
    assert_eq!(only(&out), Ok(Chunk::Stream(later)));
    assert_eq!(Chunk::Stream(later).to_string(), "Stream 7 16909060+3 ack");

    let mut out = [0; 12];
    assert_eq!(Abandon::emit([0x0102_0304, 5].into_iter(), &mut out), 12);
    assert_eq!(out, [11, 0, 0, 12, 1, 2, 3, 4, 0, 0, 0, 5]);
    let Ok(Chunk::Abandon(abandon)) = only(&out) else { panic!("ABANDON") };
    assert_eq!(abandon.messages().collect::<Vec<_>>(), [0x0102_0304, 5]);
    assert_eq!(Chunk::Abandon(abandon).to_string(), "Abandon 16909060 5");
    assert_eq!(only(&[11, 0, 0, 6, 1, 2]), Err(Error::Truncated));

    let mut out = [0xEE; 9];
    assert_eq!(chunk::emit_pad(9, &mut out), 9);
    assert_eq!(out, [0, 0, 0, 9, 0, 0, 0, 0, 0]);
    assert_eq!(only(&out), Ok(Chunk::Pad(9)));
}

#[test]
fn unknown_chunks_are_skipped_unless_they_must_be_known() {
    let all: Vec<_> = chunks(&[0x7F, 1, 0, 6, 1, 2, 7, 0, 0, 4]).collect();
    assert_eq!(all, [Ok(Chunk::Unknown(0x7F)), Ok(Chunk::Ping)]);
    let all: Vec<_> = chunks(&[7, 0, 0, 4, 0x80, 1, 0, 4, 7, 0, 0, 4]).collect();
    assert_eq!(all, [Ok(Chunk::Ping), Err(Error::Unknown(0x80))], "nothing behind it is read");
    for bytes in [&[7, 0, 0, 3][..], &[7, 0, 0, 5], &[7, 0, 0, 0], &[7, 0, 0], &[7]] {
        assert_eq!(only(bytes), Err(Error::Truncated), "{bytes:?}");
    }
}

prop_compose! {
    fn first()(qkey: u32, immediate: Option<[u8; 4]>, job_key: Option<u64>) -> First {
        First { qkey, immediate, job_key }
    }
}

prop_compose! {
    fn head()(
        source_qpn in 0u32..1 << 24, destination_qpn in 0u32..1 << 24, message: u32, behind: Option<u16>,
        offset in prop_oneof![Just(0), any::<u32>()], is_whole: bool, extra in 0u32..9000, first in first(),
        flags: [bool; 3],
    ) -> Head {
        let [acknowledge, idempotent, not_repeated] = flags;
        let offset = if is_whole { 0 } else { offset };
        let message_len = (!is_whole).then(|| offset.saturating_add(40).saturating_add(extra));
        let first = (offset == 0).then_some(first);
        Head {
            source_qpn, destination_qpn, message, behind, offset, message_len, first, acknowledge, idempotent,
            not_repeated,
        }
    }
}

proptest! {
    #[test]
    fn segments(head in head(), payload in prop::collection::vec(any::<u8>(), 1..40), tagged: bool) {
        let tag = ddp::Header::Tagged(Tagged { last: true, stag: 7, to: 9, rsvdulp: 0x40 });
        let segment = Segment { head, ddp: if tagged { tag } else { SEND }, payload: &payload };
        let inside = u64::from(head.offset) + payload.len() as u64 <= u64::from(segment.message_len());
        prop_assume!(inside);
        let bytes = bytes_of(&segment);
        prop_assert!(segment.head_len() <= Segment::MAX_HEAD_LEN);
        prop_assert_eq!(only(&bytes), Ok(Chunk::Segment(segment)));
    }

    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        reliable::check(&bytes);
    }

    #[test]
    fn bytes_like_chunks(
        parts in prop::collection::vec(
            (0u8..13, any::<u8>(), prop::collection::vec(any::<u8>(), 0..60)), 0..6,
        ),
    ) {
        let mut bytes = Vec::new();
        for (code, flags, body) in parts {
            bytes.extend([code, flags, 0, 4 + body.len() as u8]);
            bytes.extend(body);
        }
        reliable::check(&bytes);
    }
}
