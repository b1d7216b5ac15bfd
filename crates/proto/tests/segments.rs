//! How messages become segments and FPDUs: the arithmetic of RFC 5041 section 5.2 and RFC 5044 sections 4.3
//! and 4.5.

use proptest::prelude::*;
use uwarp_proto::framing::{Framing, Mpa};
use uwarp_proto::tx::{Message, Segmenter};
use uwarp_wire::ddp::Header;
use uwarp_wire::rdmap::Opcode;

/// The largest ULPDU between two uwarp ends.
const UWARP_MULPDU: usize = 64_768;

/// The largest ULPDU toward a stranger.
fn mulpdu(emss: usize, send_markers: bool) -> usize {
    Framing::Mpa(Mpa { send_markers, ..Mpa::default() }).mulpdu(emss, false)
}

/// One message of each kind.
fn messages() -> [Message; 3] {
    [
        Message::Tagged { opcode: Opcode::Write, stag: 0x1234_5678, to: u64::MAX - 0xFFFF_FFFF },
        Message::send(7, true, Some(0x8765_4321)),
        Message::SendImmediate { msn: 9, solicited: false, imm: [1, 2, 3, 4] },
    ]
}

proptest! {
    /// No segment is longer than MULPDU, the offsets leave no gap, the message is complete, and only the last
    /// segment has the L bit. Everything else in the headers is the same in all segments.
    #[test]
    fn segments_of_a_message_are_numbered_and_complete(
        total in prop_oneof![1u32..200_000, Just(u32::MAX)],
        mulpdu in 128usize..=UWARP_MULPDU,
        balanced: bool,
    ) {
        for message in messages() {
            // A message of 4 GiB is not cut into pieces of 128 bytes.
            let mulpdu = if total == u32::MAX { mulpdu.max(16_384) } else { mulpdu };
            let mut segments = Segmenter::new(message, total, mulpdu, balanced);
            let mut next = 0;
            while let Some(segment) = segments.next_segment() {
                prop_assert!(segment.len > 0);
                prop_assert!(message.header_len() + segment.len as usize <= mulpdu);
                prop_assert_eq!(segment.offset, next);
                next += segment.len;
                prop_assert_eq!(segment.header.last(), next == total);
                let whole = message.whole(total).header;
                match (segment.header, whole) {
                    (Header::Tagged(part), Header::Tagged(whole)) => {
                        prop_assert_eq!(part.to, whole.to + u64::from(segment.offset));
                        prop_assert_eq!((part.stag, part.rsvdulp), (whole.stag, whole.rsvdulp));
                    }
                    (Header::Untagged(part), Header::Untagged(whole)) => {
                        prop_assert_eq!(part.mo, segment.offset);
                        prop_assert_eq!((part.qn, part.msn), (whole.qn, whole.msn));
                        prop_assert_eq!((part.rsvdulp, part.rsvdulp32), (whole.rsvdulp, whole.rsvdulp32));
                    }
                    (part, whole) => panic!("{part:?} of {whole:?}"),
                }
            }
            prop_assert_eq!(next, total);
            prop_assert!(segments.finished());
        }
    }

    /// RFC 5044 section 4.5: one FPDU of the largest ULPDU and its markers fits a TCP segment. With 4 bytes
    /// more it would not, except for the marker that the worst case leaves room for.
    #[test]
    fn the_largest_ulpdu_is_what_fits_a_tcp_segment(emss in 200usize..60_000) {
        prop_assert_eq!(mulpdu(emss, false), emss - (6 + emss % 4));
        prop_assert_eq!(mulpdu(emss, true), emss - (6 + 4 * emss.div_ceil(512) + emss % 4));
        let largest = mulpdu(emss, false);
        prop_assert!((2 + largest).next_multiple_of(4) + 4 <= emss);
        prop_assert!((2 + largest + 4).next_multiple_of(4) + 4 > emss);
    }

    /// RFC 5044 section 4.3, counted by hand on the stream.
    #[test]
    fn markers_stand_every_512_bytes_and_point_back(sizes in prop::collection::vec(0usize..2000, 1..8)) {
        let mut sender = Framing::Mpa(Mpa { send_markers: true, ..Mpa::default() }).sender();
        let mut stream = Vec::new();
        // Where each FPDU begins: with its marker, if there is one.
        let mut starts = Vec::new();
        for len in sizes {
            let payload = vec![0xEE; len];
            let segment = Message::send(1, false, None).whole(u32::try_from(len).unwrap());
            starts.push(stream.len());
            sender.stage_bytes(&mut stream, &segment, &payload);
        }
        prop_assert_eq!(stream[..4].to_vec(), vec![0; 4], "a marker comes first");
        for at in (0..stream.len()).step_by(512) {
            let marker: [u8; 4] = stream[at..at + 4].try_into().unwrap();
            let start = *starts.iter().rev().find(|start| **start <= at).unwrap();
            // The length field comes after a marker between FPDUs.
            let length_field = if start % 512 == 0 { start + 4 } else { start };
            let pointer = if start == at { 0 } else { at - length_field };
            let [high, low] = u16::try_from(pointer).unwrap().to_be_bytes();
            prop_assert_eq!(marker, [0, 0, high, low], "at {}", at);
        }
    }
}

#[test]
fn a_message_of_no_bytes_is_one_segment() {
    for message in messages() {
        for balanced in [false, true] {
            let mut segments = Segmenter::new(message, 0, 1460, balanced);
            let only = segments.next_segment().expect("it has one");
            assert_eq!((only.offset, only.len, only.header.last()), (0, 0, true));
            assert_eq!(segments.next_segment(), None);
        }
    }
}

/// RFC 5040 section 4.1: the field is zero in Sends that invalidate nothing, in Read Requests and in
/// Terminates.
#[test]
fn messages_without_an_stag_to_invalidate_name_none() {
    let plain = [(Opcode::ReadRequest, 1), (Opcode::Terminate, 2), (Opcode::Immediate, 0)]
        .map(|(opcode, qn)| Message::Untagged { opcode, qn, msn: 1, invalidate: 0 });
    for message in plain.into_iter().chain([Message::send(1, false, None), Message::send(1, true, None)]) {
        let mut bytes = [0xFF; 18];
        message.whole(4).header.emit(&mut bytes);
        assert_eq!(bytes[2..6], [0; 4], "{message:?}");
    }
    let mut bytes = [0xFF; 18];
    Message::send(1, false, Some(0x1234_5678)).whole(4).header.emit(&mut bytes);
    assert_eq!(bytes[2..6], [0x12, 0x34, 0x56, 0x78]);
}

/// RFC 5044 sections 3 and 4.5.
#[test]
fn the_largest_ulpdu_has_its_bounds() {
    for markers in [false, true] {
        for emss in (0..200).chain([usize::from(u16::MAX), 1 << 20]) {
            let mulpdu = mulpdu(emss, markers);
            assert!((128..=64_768).contains(&mulpdu), "EMSS {emss}: {mulpdu}");
        }
    }
    assert_eq!(Framing::Mpa(Mpa::default()).mulpdu(1460, true), UWARP_MULPDU);
}
