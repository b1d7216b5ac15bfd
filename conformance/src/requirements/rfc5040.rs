use super::files::*;
use super::{Implementation, Receiver, Rfc, Row, Sender, Ulp, built, gap, outside, tested};

pub const RFC: Rfc = Rfc {
    number: 5040,
    title: "Remote Direct Memory Access Protocol (RDMAP)",
    scope: "\"The program\" is the user of verbs, the RFC's ULP.",
    sections: &[
        "3.1", "4.1", "4.2", "4.4", "4.8", "5.1", "5.2", "5.2.1", "5.2.2", "5.3", "5.4", "5.5", "6.1", "7",
        "7.1", "7.2", "8.1", "8.1.1", "8.1.2", "8.2.2",
    ],
    rows: ROWS,
};

const ROWS: &[Row] = &[
    built("3.1", Implementation, "RDMAP runs over DDP", "no other path leads from a queue pair to a socket"),
    // 4: headers.
    tested(
        "4.1",
        Sender,
        "the control field is the first byte that DDP leaves to RDMAP, the STag to invalidate the four \
        behind it",
        &[
            (RDMAP, "control_bytes"),
            (TRACES, "send_with_invalidate"),
            (TSHARK, "invalidated keys and what ends connections"),
        ],
    ),
    tested(
        "4.1",
        Sender,
        "each message has the T flag, opcode, queue, STag and TO that figure 4 gives it",
        &[
            (TABLES, "opcode_table"),
            (TRACES, "read_and_fenced_send"),
            (TRACES, "terminate"),
            (TSHARK, "rping, 64 B"),
        ],
    ),
    tested(
        "4.1",
        Receiver,
        "each message must have the T flag, opcode and queue that figure 4 gives it",
        &[
            (FIELDS, "rdmap_control"),
            (ERRORS, "RDMAP: Send to the queue of Read Requests"),
            (ERRORS, "RDMAP: Read Request in a tagged segment"),
            (FIELDS, "queue_numbers"),
        ],
    ),
    tested(
        "4.1",
        Implementation,
        "the version is 1 in all messages",
        &[
            (RDMAP, "control_bytes"),
            (ERRORS, "RDMAP: version 0, untagged"),
            (ERRORS, "RDMAP: version 3, tagged"),
        ],
    ),
    gap(
        "4.1",
        Sender,
        "reserved bits of the control field are sent as zero",
        "toward strangers they are; between two uwarp ends, that know each other as such, they ask for \
        acknowledgements and say that \
         a Send has immediate data (ADR 002)",
    ),
    tested(
        "4.1",
        Receiver,
        "reserved bits of the control field are ignored",
        &[(FIELDS, "rdmap_control"), (ERRORS, "Send: the bit of our immediate data from a stranger")],
    ),
    tested(
        "4.1",
        Sender,
        "without an STag to invalidate its field is zero",
        &[
            ("crates/wire/tests/values.rs", "ddp_headers"),
            (SEGMENTS, "messages_without_an_stag_to_invalidate_name_none"),
        ],
    ),
    tested(
        "4.1",
        Receiver,
        "the field is ignored in messages that invalidate nothing",
        &[(FIELDS, "invalidate_field_of_other_messages")],
    ),
    tested(
        "4.2",
        Sender,
        "each message has the RDMAP header of its kind, and payload only where it may",
        &[
            (TABLES, "opcode_table"),
            (RDMAP, "read_request"),
            (TERMINATE, "golden_bytes"),
            (TSHARK, "rping, 64 B"),
        ],
    ),
    tested(
        "4.4",
        Sender,
        "a Read Request has the RFC's header",
        &[(RDMAP, "read_request"), (TRACES, "reads_one_at_a_time"), (TSHARK, "ib_read_bw")],
    ),
    tested(
        "4.4",
        Receiver,
        "the sink's STag is copied into the Response as it came",
        &[(FIELDS, "read_requests"), (ERRORS, "Read Request: no bytes from an STag that never was")],
    ),
    tested(
        "4.8",
        Sender,
        "a Terminate has the RFC's header, and a control field with its layers, types and codes",
        &[
            (TABLES, "terminate_table"),
            (TERMINATE, "golden_bytes"),
            (TSHARK, "invalidated keys and what ends connections"),
        ],
    ),
    tested(
        "4.8",
        Sender,
        "reserved bits of the Terminate's control field are zero",
        &[(TERMINATE, "golden_bytes"), (ERRORS, "Read Request: no right to read the region")],
    ),
    tested(
        "4.8",
        Receiver,
        "reserved bits of the Terminate's control field are ignored",
        &[(FIELDS, "terminates")],
    ),
    tested(
        "4.8",
        Sender,
        "the segment's length, its DDP header and, of a Read Request, its RDMAP header are included where \
        the bits M, D and R say so",
        &[
            (TERMINATE, "what_is_included"),
            (ERRORS, "DDP tagged: an STag that never was"),
            (ERRORS, "Read Request: an STag that never was"),
            (ERRORS, "MPA: CRC is wrong"),
        ],
    ),
    // 5: messages.
    tested(
        "5.1",
        Sender,
        "a Write is tagged, names one remote buffer, and is sent in the order of the work requests",
        &[(TRACES, "write"), (TRACES, "write_to_a_stranger"), (WORKLOADS, "all_arrives")],
    ),
    tested(
        "5.1",
        Receiver,
        "a Write is placed and not delivered to the program",
        &[(WORKLOADS, "all_arrives"), (FIELDS, "tagged_offsets")],
    ),
    tested(
        "5.2",
        Implementation,
        "a Read is one Request and one Response",
        &[(TRACES, "reads_one_at_a_time"), (TSHARK, "ib_read_bw")],
    ),
    tested(
        "5.2.1",
        Sender,
        "a Read Request is untagged, on queue 1, reads one buffer, and is sent in the order of the work \
        requests",
        &[(TRACES, "reads_one_at_a_time"), (TRACES, "read_and_fenced_send"), (WORKLOADS, "all_arrives")],
    ),
    tested(
        "5.2.1",
        Receiver,
        "a Read Request takes one place of its queue",
        &[(ERRORS, "Read Request: more at once than the read depth"), (FLOODS, "reads_beyond_the_depth")],
    ),
    tested(
        "5.2.1",
        Receiver,
        "a Read Request is answered by RDMAP with a Response, in the order of the Requests, and is not \
        delivered to the program",
        &[
            (FIELDS, "read_requests"),
            (WORKLOADS, "all_arrives"),
            (LOOPBACK, "large_writes_and_reads_arrive_whole"),
        ],
    ),
    tested(
        "5.2.1",
        Receiver,
        "STag and TO of the source are checked where bytes are to be read, and only there; a Read of none \
        is answered with none",
        &[
            (ERRORS, "Read Request: no bytes from an STag that never was"),
            (ERRORS, "Read Request: an STag that never was"),
            (FIELDS, "read_requests"),
        ],
    ),
    tested(
        "5.2.2",
        Sender,
        "a Read Response is tagged and goes to one buffer, Responses in the order of their Requests",
        &[(TRACES, "reads_one_at_a_time"), (WORKLOADS, "all_arrives")],
    ),
    tested(
        "5.2.2",
        Sender,
        "there are as many places for Read Requests as were negotiated",
        &[
            (FLOODS, "reads_beyond_the_depth"),
            (RECEIVING, "a_read_that_is_being_answered_counts_against_the_depth"),
        ],
    ),
    tested(
        "5.2.2",
        Receiver,
        "a Read Response is delivered to the program",
        &[(WORKLOADS, "all_arrives"), (LOOPBACK, "large_writes_and_reads_arrive_whole")],
    ),
    tested(
        "5.3",
        Sender,
        "Sends are untagged, on queue 0, in the order of the work requests",
        &[
            (TRACES, "send_and_answer"),
            (TRACES, "solicited_send_with_invalidate"),
            (WORKLOADS, "all_arrives"),
        ],
    ),
    tested(
        "5.3",
        Receiver,
        "each Send, also one of no bytes, takes a receive; they are delivered in order",
        &[(TRACES, "send_and_answer"), (WORKLOADS, "all_arrives"), (FLOODS, "nothing_at_all")],
    ),
    tested(
        "5.3",
        Sender,
        "a Send with Invalidate names the STag",
        &[(TRACES, "send_with_invalidate"), (TRACES, "solicited_send_with_invalidate")],
    ),
    tested(
        "5.3",
        Receiver,
        "the STag is invalidated before a Send with Invalidate is delivered, and checked first: valid, of \
        this stream, remotely accessible",
        &[
            (SEQUENCES, "after_invalidation"),
            (ERRORS, "Send with Invalidate: an STag that never was"),
            (ERRORS, "Send with Invalidate: an STag of another protection domain"),
            (WORKLOADS, "all_arrives"),
        ],
    ),
    tested(
        "5.4",
        Sender,
        "a Terminate is untagged, on queue 2",
        &[(TRACES, "terminate"), (ERRORS, "RDMAP: Terminate to the queue of Sends")],
    ),
    tested(
        "5.4",
        Receiver,
        "one Terminate can always be placed, is delivered to RDMAP, and is reported to the program",
        &[(ERRORS, "Terminate: CRC"), (FIELDS, "terminates"), (ERRORS, "Terminate: MSN 2")],
    ),
    tested(
        "5.4",
        Sender,
        "nothing is sent after a Terminate",
        &[
            (TRACES, "terminate"),
            (ERRORS, "first of two errors: nothing behind it is looked at"),
            (WORKLOADS, "a_flipped_bit"),
        ],
    ),
    // 5.5: ordering.
    tested(
        "5.5",
        Receiver,
        "Sends and Read Responses reach the program after DDP delivered them, in that order (rules 10, 11, \
        16)",
        &[(WORKLOADS, "all_arrives"), (RECEIVING, "a_long_buffered_send_arrives_complete")],
    ),
    tested(
        "5.5",
        Receiver,
        "a Read Request, also one of no bytes, is not begun before DDP delivered it (rules 12, 17)",
        &[
            (RECEIVING, "responses_are_received_past_sends_that_wait_for_receives"),
            (TRACES, "a_stranger_gets_one_placement_read_for_many"),
        ],
    ),
    tested(
        "5.5",
        Sender,
        "messages go to DDP in the order of the work requests (rule 13)",
        &[(WORKLOADS, "all_arrives"), (TRACES, "read_and_fenced_send")],
    ),
    tested(
        "5.5",
        Sender,
        "a Send or Write is not complete before DDP is done with it (rule 14)",
        &[
            (SENDING, "completions_run_ahead_of_placement_by_a_bounded_number_of_messages"),
            (CLIENT, "answers_to_what_is_placed"),
        ],
    ),
    tested(
        "5.5",
        Sender,
        "work requests complete in their order (rule 15)",
        &[
            (WORKLOADS, "all_arrives"),
            (WORKLOADS, "a_broken_connection"),
            (VERBS, "local_errors_wait_their_turn"),
        ],
    ),
    tested(
        "5.5",
        Sender,
        "a Read is complete when its Response was delivered, not before, and needs nothing else (rule 19)",
        &[(WORKLOADS, "all_arrives"), (SEQUENCES, "responses_that_lie")],
    ),
    tested(
        "5.5",
        Receiver,
        "Responses go out in the order in which the Requests were delivered (rule 20)",
        &[(WORKLOADS, "all_arrives"), (TSHARK, "ib_read_bw")],
    ),
    // 6: streams.
    tested(
        "6.1",
        Implementation,
        "from the change to RDMA mode on, only RDMA messages are sent",
        &[(TSHARK, "rping, 64 B"), (SETUP, "nothing_after_the_frame_is_taken")],
    ),
    tested(
        "6.1",
        Implementation,
        "the negotiated depths of Reads are provided, and exceeded in neither direction",
        &[
            (RECEIVING, "a_depth_of_none_lets_no_data_be_read"),
            (FLOODS, "reads_beyond_the_depth"),
            (TRACES, "reads_one_at_a_time"),
            (VERBS, "a_read_without_read_depth_fails"),
        ],
    ),
    // 7: errors.
    tested(
        "7",
        Implementation,
        "after RDMAP has asked for the end of a stream nothing more is transferred on it, and the \
        connection ends with its streams",
        &[(SEQUENCES, "data_after_terminate"), (ENDINGS, "never_reads_never_closes")],
    ),
    tested(
        "7.1",
        Implementation,
        "errors are reported to the local program",
        &[
            ("crates/rnic/src/qp/rc/errors.rs", "every_error_has_its_status_and_its_event"),
            (ERRORS, "MPA: CRC is wrong"),
        ],
    ),
    tested(
        "7.1",
        Implementation,
        "local errors are reported by a Terminate without headers (case 1)",
        &[
            (ERRORS, "Read Response: the program took its sink's region back"),
            (ERRORS, "Send: the program took its receive's region back"),
        ],
    ),
    tested(
        "7.1",
        Receiver,
        "errors in received messages are reported by a Terminate with the headers that the case requires \
        (cases 2 and 3)",
        &[
            (ERRORS, "DDP tagged: an STag that never was"),
            (ERRORS, "Read Request: an STag that never was"),
            (RECEIVING, "a_terminate_in_the_middle_of_a_direct_placement_quotes_the_header"),
        ],
    ),
    tested(
        "7.1",
        Receiver,
        "if there are several errors, the Terminate has the first (case 4)",
        &[(ERRORS, "first of two errors: nothing behind it is looked at")],
    ),
    tested(
        "7.2",
        Receiver,
        "of all messages the DDP fields, the opcode and the version are checked",
        &[
            (FIELDS, "ddp_control"),
            (FIELDS, "rdmap_control"),
            (FIELDS, "queue_numbers"),
            (FIELDS, "message_numbers"),
        ],
    ),
    tested(
        "7.2",
        Receiver,
        "the STag to invalidate must be valid and of this stream",
        &[(FIELDS, "stags"), (ERRORS, "Send with Invalidate: an STag that never was")],
    ),
    tested(
        "7.2",
        Receiver,
        "the source of a Read Request must be valid, of this stream, in its bounds, and must not wrap",
        &[
            (FIELDS, "read_requests"),
            (FIELDS, "stags"),
            (ERRORS, "Read Request: source offset and size wrap"),
        ],
    ),
    // 8: security.
    gap(
        "8.1",
        Implementation,
        "RFC 5042's requirements for the RNIC and the privileged resource manager are kept",
        "RFC 5042 has a page of its own, docs/security.md, by attack and not by MUST",
    ),
    tested(
        "8.1.1",
        Implementation,
        "a stream reaches no STag of another protection domain",
        &[(FIELDS, "stags_over_one_buffer"), (ERRORS, "Read Request: an STag of another protection domain")],
    ),
    built(
        "8.1.1",
        Implementation,
        "an STag of one stream only cannot be used on another",
        "such STags are the sinks of Reads, which are kept in the queue pair and nowhere else",
    ),
    tested(
        "8.1.1",
        Implementation,
        "a peer reaches nothing outside the buffer of an STag",
        &[(FIELDS, "tagged_offsets"), (FIELDS, "read_requests"), (SEQUENCES, "responses_that_lie")],
    ),
    tested(
        "8.1.1",
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
        "8.1.1",
        Implementation,
        "nothing is written to a buffer after its rights were revoked",
        &[
            (SEQUENCES, "deregistered_under_fire"),
            (SEQUENCES, "after_invalidation"),
            (SEQUENCES, "after_deregistration"),
        ],
    ),
    tested(
        "8.1.1",
        Implementation,
        "a peer cannot invalidate an STag that other streams share",
        &[
            (RECEIVING, "a_region_that_another_stream_can_use_is_not_invalidated_by_the_peer"),
            (SEQUENCES, "after_invalidation"),
        ],
    ),
    tested(
        "8.1.1",
        Implementation,
        "STags are hard to guess",
        &[
            ("crates/rnic/tests/keys.rs", "keys_are_neither_in_sequence_nor_close_together"),
            (FLOODS, "guessing_stags"),
        ],
    ),
    outside(
        "8.1.1",
        Ulp,
        "programs without trust in each other do not share a completion queue",
        "a completion queue belongs to one process",
    ),
    tested(
        "8.1.1",
        Implementation,
        "an overflow of a completion queue leaves streams alone that do not use it",
        &[
            (SEQUENCES, "overflowing_completion_queue"),
            (RECEIVING, "an_overflowing_completion_queue_fails_the_queue_pair_at_once"),
        ],
    ),
    outside("8.1.1", Implementation, "a peer cannot load firmware", "there is none"),
    outside(
        "8.1.2",
        Implementation,
        "a privileged resource manager mediates between programs that share an RNIC, allocates scarce \
        resources, entries of completion \
         queues and Read Requests, assumes no trust between them and checks their right to a buffer",
        "each process has an RNIC of its own, and the kernel stands between processes: page tables, \
        descriptors, socket buffers. Read \
         Requests are counted for each stream",
    ),
    tested(
        "8.1.2",
        Implementation,
        "a peer that consumes more than its share of the receives that streams share can be detected",
        &[
            (SHARED, "the_limit_is_reported_once"),
            ("conformance/tests/stat.rs", "what_goes_wrong_is_counted"),
        ],
    ),
    outside(
        "8.2.2",
        Implementation,
        "requirements for IPsec: ESP with replay protection, tunnel mode, IKE, its authentication and \
        parameters, deleted \
         associations do not end streams",
        "IPsec is the system's, below the kernel's TCP; uwarp neither has nor notices it",
    ),
];
