use super::files::*;
use super::{Implementation, Receiver, Rfc, Row, Sender, Ulp, built, gap, outside, tested};

pub const RFC: Rfc = Rfc {
    number: 5041,
    title: "Direct Data Placement (DDP)",
    scope: "\"The program\" is the user of verbs; RDMAP, in the same library, is between it and DDP. So \
    what DDP must deliver to \"the ULP\" is tested where RDMAP or the program sees it.",
    sections: &[
        "3", "4.1", "4.2", "4.3", "4.4", "5.2", "5.3", "5.4", "6.2", "6.2.1", "6.2.2", "7.1", "7.2", "8.2",
        "8.3", "8.3.1", "8.3.2", "8.4.2",
    ],
    rows: ROWS,
};

const ROWS: &[Row] = &[
    // What DDP needs of the layer below: MPA over the kernel's TCP.
    tested(
        "3",
        Implementation,
        "the lower layer reports how large a segment may be (MULPDU)",
        &[
            (SEGMENTS, "the_largest_ulpdu_is_what_fits_a_tcp_segment"),
            (TRACES, "send_to_a_stranger_is_cut_to_the_path"),
        ],
    ),
    gap(
        "3",
        Implementation,
        "the lower layer reports changes of MULPDU",
        "MULPDU is taken from the socket when the connection begins and stays. A path that becomes narrower \
        costs FPDU \
         alignment, never data: `a_path_that_becomes_narrow_and_wide_costs_nothing`",
    ),
    built(
        "3",
        Implementation,
        "after a change of MULPDU, DDP need not segment again what it has posted",
        "a message is segmented once, when it is written into the send buffer",
    ),
    tested(
        "3",
        Implementation,
        "a segment that was accepted arrives, or an error says that it did not",
        &[(WORKLOADS, "a_broken_connection"), (PROCESSES, "a_killed_peer_fails_what_is_outstanding")],
    ),
    tested(
        "3",
        Implementation,
        "the ends of segments and messages are kept, and the receiver learns the length of each segment",
        &[(FRAMER, "plain_stream_any_cut"), (FRAMER, "marked_stream_any_cut")],
    ),
    outside(
        "3",
        Implementation,
        "segments that are delivered out of order come with their order",
        "the kernel's TCP delivers bytes in order",
    ),
    tested(
        "3",
        Implementation,
        "a digest at least as strong as CRC32c covers each segment",
        &[
            (FIELDS, "fpdu_pads_and_crcs"),
            (CORRUPTION, "headers_of_a_large_write"),
            ("crates/wire/src/crc.rs", "iscsi_vectors"),
        ],
    ),
    outside(
        "3",
        Implementation,
        "an erroneous stream is marked and carries nothing more, where streams cannot be torn down one by \
        one",
        "there is one stream on a TCP connection",
    ),
    tested(
        "3",
        Implementation,
        "a graceful end of the stream and of the connection is reported",
        &[(LOOPBACK, "disconnect_is_seen_by_both_and_loses_nothing")],
    ),
    tested(
        "3",
        Implementation,
        "the connection ends when its streams have ended, in error or not",
        &[(ENDINGS, "never_reads_never_closes"), (SEQUENCES, "data_after_the_end")],
    ),
    tested(
        "3",
        Implementation,
        "no segment is delivered to DDP twice",
        &[(ERRORS, "DDP untagged: MSN of a message that is complete")],
    ),
    // 4: the header.
    tested(
        "4.1",
        Receiver,
        "payload of a segment with T goes to a tagged buffer, of one without T to an untagged buffer",
        &[
            (FIELDS, "ddp_control"),
            (ERRORS, "RDMAP: Send in a tagged segment"),
            (ERRORS, "RDMAP: Write in an untagged segment"),
        ],
    ),
    tested(
        "4.1",
        Sender,
        "L is set on the last segment of a message and on no other; that segment is posted last and, \
        untagged, has the highest MO",
        &[
            (SEGMENTS, "segments_of_a_message_are_numbered_and_complete"),
            (TRACES, "send_to_a_stranger_is_cut_to_the_path"),
        ],
    ),
    tested(
        "4.1",
        Receiver,
        "a message is delivered when its last segment, all others of it and all earlier messages are placed",
        &[(WORKLOADS, "all_arrives"), (ERRORS, "DDP untagged: a gap between segments")],
    ),
    tested(
        "4.1",
        Sender,
        "reserved bits are sent as zero",
        &[(DDP, "untagged"), (DDP, "tagged"), (TSHARK, "rping, 64 B")],
    ),
    tested(
        "4.1",
        Receiver,
        "reserved bits are not checked",
        &[(DDP, "reserved_bits_are_ignored"), (FIELDS, "ddp_control")],
    ),
    tested(
        "4.1",
        Implementation,
        "the version is 1 in all segments of a stream",
        &[
            (DDP, "untagged"),
            (DDP, "tagged"),
            (ERRORS, "DDP tagged: version 0"),
            (ERRORS, "DDP untagged: version 3"),
        ],
    ),
    tested(
        "4.2",
        Sender,
        "tagged segments have the tagged header",
        &[(DDP, "tagged"), (TSHARK, "ib_write_bw")],
    ),
    tested(
        "4.2",
        Sender,
        "RsvdULP and the STag are what RDMAP gave, the same in each segment of a message",
        &[(SEGMENTS, "segments_of_a_message_are_numbered_and_complete"), (TRACES, "write_to_a_stranger")],
    ),
    tested(
        "4.2",
        Receiver,
        "RsvdULP and the STag of a tagged message reach RDMAP",
        &[(FIELDS, "rdmap_control"), (ERRORS, "Read Response: the STag of a region")],
    ),
    tested(
        "4.2",
        Receiver,
        "the STag must be valid for the stream",
        &[(FIELDS, "stags"), (ERRORS, "DDP tagged: an STag that never was")],
    ),
    tested(
        "4.3",
        Sender,
        "untagged segments have the untagged header",
        &[(DDP, "untagged"), (TSHARK, "ib_send_bw")],
    ),
    tested(
        "4.3",
        Sender,
        "RsvdULP, queue number and MSN are the same in each segment of a message",
        &[(SEGMENTS, "segments_of_a_message_are_numbered_and_complete")],
    ),
    tested(
        "4.3",
        Receiver,
        "RsvdULP of an untagged message reaches RDMAP",
        &[(TRACES, "solicited_send_with_invalidate"), (VERBS, "solicited_sends_make_the_event")],
    ),
    tested(
        "4.3",
        Sender,
        "the MSN begins at 1, goes up by 1 with each message of its queue, and wraps from 2^32-1 to 0",
        &[(TRACES, "send_and_answer"), (VERBS, "message_numbers_wrap"), (FIELDS, "message_numbers")],
    ),
    tested(
        "4.3",
        Sender,
        "MO is zero for the first byte of a message",
        &[
            (SEGMENTS, "segments_of_a_message_are_numbered_and_complete"),
            (ERRORS, "DDP untagged: first segment with an offset"),
        ],
    ),
    tested(
        "4.4",
        Sender,
        "each segment has a header",
        &[(TSHARK, "ib_send_bw, odd sizes"), (ERRORS, "MPA: a ULPDU of no bytes")],
    ),
    // 5: messages.
    tested(
        "5.2",
        Sender,
        "a message is cut into segments of at most MULPDU, and all of it is sent",
        &[(SEGMENTS, "segments_of_a_message_are_numbered_and_complete"), (WORKLOADS, "all_arrives")],
    ),
    tested(
        "5.2",
        Ulp,
        "a message is shorter than 2^32 bytes",
        &[(VERBS, "posting_beyond_the_limits_is_refused_and_changes_nothing")],
    ),
    tested("5.2", Receiver, "the payload of all valid segments is placed", &[(WORKLOADS, "all_arrives")]),
    tested(
        "5.2",
        Sender,
        "MO, and TO less the message's first TO, are the offset of the segment's first byte in the message",
        &[(SEGMENTS, "segments_of_a_message_are_numbered_and_complete"), (TRACES, "write_to_a_stranger")],
    ),
    built(
        "5.2",
        Ulp,
        "the program names the STag and the first TO of a tagged message",
        "a work request for a Write has both; for a Read Response they come from the Read Request",
    ),
    tested(
        "5.2",
        Sender,
        "a message of no bytes is one segment",
        &[(SEGMENTS, "a_message_of_no_bytes_is_one_segment"), (FLOODS, "nothing_at_all")],
    ),
    tested(
        "5.2",
        Receiver,
        "STag and TO of a tagged message of no bytes are not checked",
        &[(ERRORS, "RDMA Write: no bytes to an STag that never was"), (FIELDS, "tagged_offsets")],
    ),
    tested(
        "5.3",
        Sender,
        "messages are sent in the order in which they were submitted",
        &[(WORKLOADS, "all_arrives"), (TRACES, "read_and_fenced_send")],
    ),
    tested(
        "5.3",
        Receiver,
        "messages are delivered once at most, in the order in which they were sent",
        &[(WORKLOADS, "all_arrives"), (WORKLOADS, "a_broken_connection"), (FIELDS, "message_numbers")],
    ),
    tested(
        "5.4",
        Receiver,
        "a message is delivered if and only if its last segment came, all of it is placed and all earlier \
        ones are delivered",
        &[
            (WORKLOADS, "all_arrives"),
            (RECEIVING, "the_last_bytes_of_a_message_are_placed_when_its_crc_is_known"),
            (FIELDS, "message_offsets"),
        ],
    ),
    tested(
        "5.4",
        Receiver,
        "the length of an untagged message and its RsvdULP come with the delivery",
        &[(WORKLOADS, "all_arrives"), (IMMEDIATE, "lengths_are_those_of_the_writes_before")],
    ),
    // 6: teardown.
    built(
        "6.2",
        Implementation,
        "DDP does not end a stream of its own accord",
        "DDP's checks return an error to RDMAP, which sends the Terminate and ends the stream",
    ),
    tested(
        "6.2.1",
        Implementation,
        "after a graceful end was asked for, requests to transfer data end in an error",
        &[(VERBS, "posting_by_state"), (LOOPBACK, "disconnect_is_seen_by_both_and_loses_nothing")],
    ),
    built(
        "6.2.1",
        Receiver,
        "data after the peer's graceful end is an error",
        "TCP delivers nothing after a FIN",
    ),
    tested(
        "6.2.1",
        Implementation,
        "after the peer's half is closed, the program's own graceful end closes the other half gracefully",
        &[(SEQUENCES, "data_after_the_end"), (BAD_DAYS, "a_network_that_is_out_at_the_end_costs_no_bytes")],
    ),
    tested(
        "6.2.2",
        Implementation,
        "a lost connection, an error of the lower layer and a bad header are reported as fatal",
        &[(ENDINGS, "reset_at_every_phase"), (ERRORS, "MPA: CRC is wrong"), (FIELDS, "ddp_control")],
    ),
    built(
        "6.2.2",
        Implementation,
        "the stream stays until RDMAP asks for its abortive end",
        "the Terminate is sent on it first, then RDMAP closes it",
    ),
    // 7: errors.
    tested(
        "7.1",
        Receiver,
        "an untagged segment is checked before anything is placed: queue, buffer, MO, length, MSN, version",
        &[
            (FIELDS, "queue_numbers"),
            (ERRORS, "DDP untagged: no receive in time"),
            (FIELDS, "message_offsets"),
            (ERRORS, "DDP untagged: a byte too long for the receive"),
            (FIELDS, "message_numbers"),
            (FIELDS, "ddp_control"),
        ],
    ),
    tested(
        "7.1",
        Receiver,
        "a tagged segment is checked before anything is placed: STag, its stream, both bounds, wrap, version",
        &[
            (FIELDS, "stags"),
            (FIELDS, "tagged_offsets"),
            (SEQUENCES, "large_segments_that_lie"),
            (FIELDS, "large_segments_without_crc"),
        ],
    ),
    tested(
        "7.1",
        Receiver,
        "after an error nothing more of the segment is placed, it is reported, and later segments are \
        dropped silently",
        &[
            (ERRORS, "first of two errors: nothing behind it is looked at"),
            (SEQUENCES, "data_after_terminate"),
        ],
    ),
    tested(
        "7.2",
        Receiver,
        "errors have the RFC's numbers",
        &[(TABLES, "terminate_table"), (FIELDS, "tagged_offsets"), (FIELDS, "message_numbers")],
    ),
    // 8: security.
    tested(
        "8.2",
        Receiver,
        "an STag of another protection domain places nothing and is reported",
        &[(ERRORS, "DDP tagged: an STag of another protection domain"), (FIELDS, "stags_over_one_buffer")],
    ),
    tested(
        "8.2",
        Receiver,
        "an STag that belongs to another stream places nothing and is reported",
        &[(ERRORS, "RDMA Write: the STag of a Read's sink"), (SEQUENCES, "responses_nobody_asked_for")],
    ),
    tested(
        "8.2",
        Implementation,
        "an STag can be bound to a protection domain and to a single stream",
        &[(FIELDS, "stags_over_one_buffer"), (WINDOWS, "windows_of_others")],
    ),
    tested(
        "8.3",
        Implementation,
        "the program sets and revokes the range, the validity and the protection domain of an STag",
        &[
            (MR, "bounds_are_exact"),
            (MR, "an_invalidated_key_is_not_found_again"),
            (SEQUENCES, "after_deregistration"),
            (FIELDS, "tagged_offsets"),
        ],
    ),
    tested(
        "8.3",
        Receiver,
        "access by an STag that is not valid on the stream is reported",
        &[(FIELDS, "stags"), (ERRORS, "DDP tagged: an STag of another protection domain")],
    ),
    outside(
        "8.3",
        Implementation,
        "there are an RNIC and a privileged resource manager",
        "the library is the RNIC of one process; what processes share, the kernel manages (docs/security.md)",
    ),
    tested(
        "8.3.1",
        Implementation,
        "the wire protocol and its security rules are implemented",
        &[(FIELDS, "stags"), (FIELDS, "tagged_offsets"), (FIELDS, "ddp_control")],
    ),
    tested(
        "8.3.1",
        Implementation,
        "a stream reaches no STag of another protection domain",
        &[(FIELDS, "stags_over_one_buffer"), (ERRORS, "DDP tagged: an STag of another protection domain")],
    ),
    built(
        "8.3.1",
        Implementation,
        "an STag of one stream only cannot be used on another",
        "such STags are the sinks of Reads, which are kept in the queue pair and nowhere else",
    ),
    tested(
        "8.3.1",
        Implementation,
        "a peer reaches nothing outside the buffer of an STag",
        &[(FIELDS, "tagged_offsets"), (FIELDS, "read_requests"), (SEQUENCES, "responses_that_lie")],
    ),
    tested(
        "8.3.1",
        Implementation,
        "the program sets and revokes a buffer's range, and the rights to read and to write it",
        &[
            (MR, "bounds_are_exact"),
            (MR, "a_change_of_rights_keeps_the_keys"),
            (FIELDS, "stags"),
            (SEQUENCES, "rights_of_the_queue_pair"),
        ],
    ),
    tested(
        "8.3.1",
        Implementation,
        "nothing is written to a buffer after its rights were revoked",
        &[
            (SEQUENCES, "deregistered_under_fire"),
            (SEQUENCES, "after_invalidation"),
            (SEQUENCES, "after_deregistration"),
        ],
    ),
    outside("8.3.1", Implementation, "a peer cannot load firmware", "there is none"),
    outside(
        "8.3.2",
        Implementation,
        "a privileged resource manager mediates between programs that share an RNIC, allocates scarce \
        resources, assumes no trust \
         between them and checks their right to a buffer",
        "each process has an RNIC of its own, and the kernel stands between processes: page tables, \
        descriptors, socket buffers",
    ),
    tested(
        "8.3.2",
        Implementation,
        "a peer that consumes more than its share of the receives that streams share can be detected",
        &[
            (SHARED, "the_limit_is_reported_once"),
            ("conformance/tests/stat.rs", "what_goes_wrong_is_counted"),
        ],
    ),
    outside(
        "8.4.2",
        Implementation,
        "requirements for IPsec: ESP with replay protection, tunnel mode, IKE, its authentication and \
        parameters, deleted \
         associations do not end streams",
        "IPsec is the system's, below the kernel's TCP; uwarp neither has nor notices it",
    ),
];
