use super::files::*;
use super::{Implementation, Initiator, Receiver, Responder, Rfc, Row, Sender, built, gap, outside, tested};

pub const RFC: Rfc = Rfc {
    number: 5044,
    title: "Marker PDU Aligned Framing (MPA)",
    scope: "",
    sections: &[
        "1.2", "3", "4.1", "4.2", "4.3", "4.4", "4.5", "5.1", "5.2", "6", "7.1", "7.1.1", "7.1.2", "7.1.5",
        "8", "9.3", "9.4", "A.4", "C.1",
    ],
    rows: ROWS,
};

const ROWS: &[Row] = &[
    outside(
        "1.2",
        Receiver,
        "a receiver that accepts FPDUs out of order reports their order and what is missing",
        "the kernel's TCP delivers bytes in order",
    ),
    tested(
        "1.2",
        Implementation,
        "CRCs are used unless the path is known to be as good without",
        &[
            (SETUP, "our_request_golden_bytes"),
            (SETUP, "every_pair_of_settings_connects"),
            ("crates/driver/src/config.rs", "defaults_are_the_standard"),
        ],
    ),
    tested(
        "3",
        Sender,
        "one ULPDU is one FPDU",
        &[(FRAMER, "plain_stream_any_cut"), (TSHARK, "ib_send_bw, odd sizes")],
    ),
    tested(
        "3",
        Implementation,
        "DDP learns MULPDU, which is between 128 and 64,768 bytes",
        &[
            (SEGMENTS, "the_largest_ulpdu_is_what_fits_a_tcp_segment"),
            (SEGMENTS, "the_largest_ulpdu_has_its_bounds"),
        ],
    ),
    tested(
        "3",
        Sender,
        "no ULPDU is longer than 64,768 bytes",
        &[
            (SEGMENTS, "the_largest_ulpdu_has_its_bounds"),
            (SEGMENTS, "segments_of_a_message_are_numbered_and_complete"),
        ],
    ),
    tested(
        "3",
        Receiver,
        "each ULPDU is passed to DDP with its length once it is validated",
        &[(FRAMER, "plain_stream_any_cut"), (FIELDS, "fpdu_lengths")],
    ),
    built(
        "3",
        Implementation,
        "DDP and RDMAP learn the negotiated version",
        "DDP's and RDMAP's version is 1 with both revisions of MPA that are accepted; MPA revision 0, the \
        Consortium's, is refused",
    ),
    // 4: FPDUs.
    tested(
        "4.1",
        Sender,
        "FPDUs have the RFC's form",
        &[
            (FRAMER, "rfc5044_annotated_example"),
            (TSHARK, "rping, 64 B"),
            ("crates/wire/src/crc.rs", "rfc5044_fpdus"),
        ],
    ),
    tested("4.1", Sender, "the pad is zero", &[("crates/sim/tests/framing.rs", "pads_are_zero")]),
    tested("4.1", Receiver, "the pad is ignored, but for the CRC", &[(FIELDS, "fpdu_pads_and_crcs")]),
    tested(
        "4.1",
        Receiver,
        "without CRCs the field is there and is not checked",
        &[(FIELDS, "without_crc"), (FRAMER, "flipped_bit_is_a_crc_error")],
    ),
    tested(
        "4.2",
        Sender,
        "markers have the RFC's form; reserved bits and the two lowest bits of the pointer are zero",
        &[(MPA, "markers"), (FRAMER, "marked_stream_any_cut")],
    ),
    tested(
        "4.2",
        Receiver,
        "reserved bits and the two lowest bits of a pointer are ignored, but for the CRC",
        &[(ERRORS, "MPA: the reserved bits of a marker"), (FIELDS, "markers")],
    ),
    tested(
        "4.3",
        Sender,
        "a sender can insert markers",
        &[(TRACES, "markers"), (FRAMER, "marked_stream_any_cut")],
    ),
    tested(
        "4.3",
        Sender,
        "markers come before the first FPDU and at every 512th byte after it",
        &[(SEGMENTS, "markers_stand_every_512_bytes_and_point_back"), (FRAMER, "marked_stream_any_cut")],
    ),
    tested(
        "4.3",
        Sender,
        "a marker points back to the length field of the FPDU that contains it, also when there are \
        several; between FPDUs it is zero",
        &[(SEGMENTS, "markers_stand_every_512_bytes_and_point_back")],
    ),
    tested(
        "4.3",
        Receiver,
        "a marker between two FPDUs belongs to the second one and to its CRC",
        &[(FRAMER, "rfc5044_annotated_example"), (FRAMER, "marked_stream_any_cut")],
    ),
    built(
        "4.3",
        Implementation,
        "positions of markers may wrap with TCP's sequence number",
        "positions are counted modulo 512 from the first FPDU, not in sequence numbers",
    ),
    tested(
        "4.3",
        Receiver,
        "the two lowest bits of a pointer count as zero",
        &[(ERRORS, "MPA: the reserved bits of a marker"), (FIELDS, "markers")],
    ),
    tested(
        "4.3",
        Receiver,
        "DDP gets ULPDUs with their ends and lengths, without markers, headers and CRCs",
        &[(FRAMER, "marked_stream_any_cut"), ("conformance/tests/hostile/rows.rs", "with_markers")],
    ),
    tested(
        "4.4",
        Implementation,
        "CRCs are implemented; they are on unless the administrator asked for none",
        &[
            ("crates/driver/src/config.rs", "defaults_are_the_standard"),
            (SETUP, "every_pair_of_settings_connects"),
        ],
    ),
    tested(
        "4.4",
        Implementation,
        "with CRC or without, programs see the same",
        &[(C_PROGRAMS, "verify"), (C_PROGRAMS, "random")],
    ),
    tested(
        "4.4",
        Implementation,
        "CRCs are generated and checked to the end of the stream when either end requires them, and not \
        checked when neither does",
        &[
            (SETUP, "every_pair_of_settings_connects"),
            (FIELDS, "without_crc"),
            (SIW, "siw requires CRC, we would not"),
        ],
    ),
    tested(
        "4.4",
        Sender,
        "each FPDU has a CRC field; with CRCs it is CRC32c as in iSCSI over length, ULPDU, pad and the \
        markers in between",
        &[
            ("crates/wire/src/crc.rs", "iscsi_vectors"),
            ("crates/wire/src/crc.rs", "rfc5044_fpdus"),
            (TSHARK, "ib_send_bw, odd sizes"),
        ],
    ),
    tested(
        "4.4",
        Receiver,
        "with CRCs, the CRC is computed and compared before anything else; a wrong one makes the FPDU \
        invalid",
        &[
            (FIELDS, "fpdu_pads_and_crcs"),
            (ERRORS, "MPA: CRC is wrong"),
            (CORRUPTION, "headers_of_a_large_send"),
        ],
    ),
    tested(
        "4.5",
        Sender,
        "the largest ULPDU is computed from EMSS by the RFC's formulas, with markers and without",
        &[(SEGMENTS, "the_largest_ulpdu_is_what_fits_a_tcp_segment")],
    ),
    tested(
        "4.5",
        Sender,
        "MULPDU is never below 128 bytes",
        &[(SEGMENTS, "the_largest_ulpdu_has_its_bounds")],
    ),
    built(
        "4.5",
        Sender,
        "the rest of a TCP segment does not bring MULPDU below 128 bytes",
        "MULPDU does not depend on what is packed already",
    ),
    tested(
        "5.1",
        Receiver,
        "FPDUs are received though they are not aligned with TCP segments",
        &[(FRAMER, "plain_stream_any_cut"), (FLOODS, "a_byte_at_a_time")],
    ),
    tested(
        "5.2",
        Receiver,
        "FPDU boundaries are found by the length fields",
        &[(FRAMER, "plain_stream_any_cut"), (FIELDS, "fpdu_lengths")],
    ),
    tested(
        "6",
        Receiver,
        "an FPDU is verified before its ULPDU goes to DDP: its start is known, its CRC is right",
        &[(FIELDS, "fpdu_pads_and_crcs"), (FIELDS, "markers"), (SEQUENCES, "large_segments_that_lie")],
    ),
    tested(
        "6",
        Receiver,
        "the start of an FPDU follows from the one before it, or from a marker",
        &[(FRAMER, "plain_stream_any_cut"), (FRAMER, "marked_stream_any_cut")],
    ),
    tested(
        "6",
        Receiver,
        "the length field says whether an FPDU is whole before it goes to DDP",
        &[(FRAMER, "plain_stream_any_cut"), (ERRORS, "MPA: the stream ends within an FPDU")],
    ),
    // 7: set-up.
    tested(
        "7.1",
        Implementation,
        "MPA begins at the same place of the stream at both ends",
        &[(SETUP, "nothing_after_the_frame_is_taken"), (STARTUP, "data_before_the_reply")],
    ),
    built(
        "7.1",
        Implementation,
        "a DDP endpoint is bound to the connection when FPDUs begin",
        "the socket is given to the queue pair, and only a queue pair reads or writes FPDUs",
    ),
    tested(
        "7.1.1",
        Implementation,
        "keys of requests and replies are sent as defined, and any other ends the connection with an error",
        &[(MPA, "keys"), (STARTUP, "every_byte_of_the_key"), (CLIENT, "every_byte_of_the_key")],
    ),
    tested(
        "7.1.1",
        Sender,
        "markers are inserted if and only if the peer's M asks for them",
        &[(SETUP, "every_pair_of_settings_connects"), (FIELDS, "markers"), (STARTUP, "every_flag")],
    ),
    tested(
        "7.1.1",
        Implementation,
        "CRCs are used when either C is set and not checked when neither is",
        &[(SETUP, "every_pair_of_settings_connects"), (FIELDS, "without_crc")],
    ),
    gap(
        "7.1.1",
        Sender,
        "reserved bits of the flags are sent as zero",
        "two of them say that the sender is uwarp (ADR 002): to a peer that refuses them the request is \
        made again without, and \
         `UWARP_PEER=off` never sends them. The bit that RFC 6581 defines is not meant",
    ),
    tested(
        "7.1.1",
        Receiver,
        "reserved bits of the flags are not checked",
        &[(STARTUP, "every_flag"), (SETUP, "bad_frames_end_the_connection")],
    ),
    tested(
        "7.1.1",
        Implementation,
        "the revision is sent and checked; one that is not spoken ends the connection with an error",
        &[(STARTUP, "every_revision"), (CLIENT, "every_revision"), (SETUP, "bad_frames_end_the_connection")],
    ),
    tested(
        "7.1.1",
        Implementation,
        "the length of private data is sent; one that does not fit, or more than 512 bytes, ends the \
        connection with an error",
        &[(STARTUP, "every_length"), (STARTUP, "lengths_that_lie"), (SETUP, "private_data_limits")],
    ),
    tested(
        "7.1.2",
        Initiator,
        "the initiator sends a request",
        &[(SETUP, "our_request_golden_bytes"), (SIW, "the lab itself, with an independent peer")],
    ),
    tested(
        "7.1.2",
        Responder,
        "the responder waits for a valid request",
        &[(STARTUP, "cut_short_at_every_byte"), (STARTUP, "one_byte_at_a_time")],
    ),
    tested(
        "7.1.2",
        Implementation,
        "a malformed request or reply ends the connection",
        &[(STARTUP, "lengths_that_lie"), (CLIENT, "other_answers"), (SETUP, "bad_frames_end_the_connection")],
    ),
    gap(
        "7.1.2",
        Implementation,
        "after a rejection, at either end, MPA ends and leaves the TCP connection open for the program",
        "the connection is closed: rdma_cm has no call that would hand it to the program",
    ),
    tested(
        "7.1.2",
        Initiator,
        "the initiator waits for a valid reply",
        &[(CLIENT, "cut_short_at_every_byte"), (SETUP, "any_reply_in_any_portions")],
    ),
    tested(
        "7.1.2",
        Responder,
        "the responder sends nothing before it has received a valid FPDU",
        &[
            (SENDING, "a_responder_does_not_send_first"),
            ("conformance/tests/stat.rs", "a_server_that_must_not_speak_first_says_so"),
        ],
    ),
    tested(
        "7.1.2",
        Implementation,
        "a wrong key closes the connection, and is reported to the program",
        &[
            (CLIENT, "every_byte_of_the_key"),
            (STARTUP, "every_byte_of_the_key"),
            (CM, "garbage_for_a_reply_is_an_error"),
        ],
    ),
    tested(
        "7.1.2",
        Implementation,
        "two initiators, or a reply where a request is due, are recognised",
        &[
            (SETUP, "bad_frames_end_the_connection"),
            (MPA, "other_protocols_are_recognized_by_their_first_bytes"),
        ],
    ),
    tested(
        "7.1.2",
        Receiver,
        "the length of private data is checked against the limit and against what arrives",
        &[(STARTUP, "every_length"), (STARTUP, "lengths_that_lie"), (CLIENT, "every_length")],
    ),
    built(
        "7.1.5",
        Implementation,
        "TCP's own rules are kept through the change to MPA",
        "TCP is the kernel's",
    ),
    tested(
        "8",
        Implementation,
        "the end of the connection, a wrong CRC, and a wrong marker or length are detected",
        &[
            (ERRORS, "MPA: the stream ends within an FPDU"),
            (ERRORS, "MPA: CRC is wrong"),
            (ERRORS, "MPA: a marker that points elsewhere"),
            (ENDINGS, "reset_at_every_phase"),
        ],
    ),
    tested(
        "8",
        Implementation,
        "an invalid request or reply closes the connection at once",
        &[(STARTUP, "every_byte_of_the_key"), (STARTUP, "every_revision"), (CLIENT, "other_answers")],
    ),
    tested(
        "8",
        Receiver,
        "no FPDU is delivered after an error",
        &[
            (ERRORS, "first of two errors: nothing behind it is looked at"),
            (SEQUENCES, "data_after_terminate"),
        ],
    ),
    tested(
        "8",
        Implementation,
        "MPA itself does not close the connection on a wrong CRC or marker: a Terminate can follow",
        &[(ERRORS, "MPA: CRC is wrong"), (ERRORS, "MPA: a marker that points elsewhere")],
    ),
    outside(
        "9.3",
        Implementation,
        "IPsec is implemented",
        "it is the system's, below the kernel's TCP; uwarp neither has nor notices it (docs/security.md)",
    ),
    outside(
        "9.4",
        Implementation,
        "requirements for IPsec of RFC 3723; deleted associations do not end streams",
        "as above",
    ),
    tested(
        "A.4",
        Receiver,
        "a receiver does not depend on the alignment of FPDUs with TCP segments",
        &[
            (FRAMER, "marked_stream_any_cut"),
            (FLOODS, "a_byte_at_a_time"),
            (BAD_NETWORK, "a_path_that_becomes_narrow_and_wide_costs_nothing"),
        ],
    ),
    outside(
        "C.1",
        Implementation,
        "toward an RNIC of the RDMA Consortium, DDP's and RDMAP's versions go together with MPA revision 0, \
        and CRCs are on",
        "revision 0 is refused; the appendix is informative",
    ),
];
