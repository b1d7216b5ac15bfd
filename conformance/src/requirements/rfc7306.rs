use super::files::*;
use super::{Implementation, Receiver, Rfc, Row, Sender, tested};

pub const RFC: Rfc = Rfc {
    number: 7306,
    title: "RDMA Protocol Extensions",
    scope: "Immediate data and atomic operations, the masked ones at the responder only: the verbs \
            have no others.",
    sections: &["4.1", "5", "5.1.1", "5.1.2", "5.2", "5.2.1", "5.2.2", "5.3", "5.4", "6.3", "8.1", "8.2"],
    rows: ROWS,
};

const ROWS: &[Row] = &[
    tested(
        "4.1",
        Sender,
        "Immediate Data has version 1, its opcodes, no STag to invalidate, and reserved bits of zero",
        &[
            (IMMEDIATE, "a_write_with_immediate_is_a_write_and_an_immediate"),
            (TRACES, "write_with_immediate"),
            (TABLES, "opcode_table"),
        ],
    ),
    tested(
        "4.1",
        Sender,
        "atomic messages have version 1, their opcodes and queues, and no STag to invalidate",
        &[
            (ATOMICS, "a_fetch_and_add_and_its_answer"),
            (ATOMIC_ERRORS, "FetchAdd: all bits"),
            (TABLES, "opcode_table"),
        ],
    ),
    tested(
        "5",
        Implementation,
        "FetchAdd and CmpSwap are both there, exclude each other on one memory, and are answered on queue 3",
        &[
            (ATOMIC_ERRORS, "FetchAdd: one of two fields"),
            (ATOMIC_ERRORS, "CmpSwap: under masks"),
            (MEM, "operations_of_many_threads_exclude_each_other"),
        ],
    ),
    tested(
        "5.1.1",
        Implementation,
        "FetchAdd works on aligned 64 bits; at other addresses it is an error, changes nothing and ends the \
        stream",
        &[(ATOMIC_ERRORS, "Atomic Request: FetchAdd is not aligned"), (RDMAP, "results_of_atomics")],
    ),
    tested(
        "5.1.2",
        Implementation,
        "CmpSwap works on aligned 64 bits; at other addresses it is an error, changes nothing and ends the \
        stream; the memory holds the original value or the masked swap data",
        &[
            (ATOMIC_ERRORS, "Atomic Request: CmpSwap is not aligned"),
            (ATOMIC_ERRORS, "CmpSwap: not equal"),
            (RDMAP, "results_of_atomics"),
        ],
    ),
    tested(
        "5.2",
        Implementation,
        "Atomic Requests go to queue 1, Responses to queue 3",
        &[
            (ATOMICS, "a_fetch_and_add_and_its_answer"),
            (ATOMIC_ERRORS, "Atomic Request: to the queue of Sends"),
            (ATOMIC_ERRORS, "Atomic Response: to the queue of requests"),
        ],
    ),
    tested(
        "5.2.1",
        Implementation,
        "Atomic Requests: all codes, one untagged buffer each, processed and answered in order",
        &[
            (ATOMICS, "many_at_once_in_both_directions_and_none_beyond_the_read_depth"),
            (ATOMICS, "atomics_between_reads"),
            (ATOMIC_ERRORS, "CmpSwap: equal"),
        ],
    ),
    tested(
        "5.2.1",
        Receiver,
        "an Atomic Request that is not supported is an error",
        &[
            (ATOMIC_ERRORS, "Atomic Request: an operation that is reserved"),
            (ATOMIC_ATTACKS, "atomic_requests_that_lie"),
        ],
    ),
    tested(
        "5.2.2",
        Implementation,
        "Atomic Responses: untagged, on queue 3, in order, as many buffers as were negotiated; invalid ones \
        are an error",
        &[
            (ATOMICS, "atomics_between_reads"),
            (ATOMIC_ERRORS, "Atomic Request: beyond the read depth, behind a Read"),
            (ATOMIC_ERRORS, "Atomic Response: unasked, with a Read outstanding"),
            (ATOMIC_ERRORS, "Atomic Response: MSN too high"),
        ],
    ),
    tested(
        "5.3",
        Implementation,
        "atomic operations of all streams of an RNIC are atomic toward each other",
        &[(MEM, "operations_of_many_threads_exclude_each_other")],
    ),
    tested(
        "5.4",
        Implementation,
        "atomic operations are processed and answered in order, behind the Reads before them, and complete \
        with their Response",
        &[
            (ATOMICS, "a_read_does_not_show_a_later_change"),
            (ATOMICS, "many_at_once_in_both_directions_and_none_beyond_the_read_depth"),
            (ATOMICS, "a_fence_waits_for_an_atomic"),
        ],
    ),
    tested(
        "6.3",
        Sender,
        "Immediate Data is untagged, on queue 0, has 8 bytes, and is sent in the order of the work requests",
        &[
            (IMMEDIATE, "a_write_with_immediate_is_a_write_and_an_immediate"),
            (TRACES, "write_with_immediate"),
            (WORKLOADS, "all_arrives"),
        ],
    ),
    tested(
        "6.3",
        Receiver,
        "Immediate Data takes one receive, and is delivered in the order of Sends and Immediate Data",
        &[
            (IMMEDIATE, "an_immediate_waits_for_a_receive"),
            (ERRORS, "Immediate Data: behind a Write, before a Send in the same numbering"),
            (WORKLOADS, "all_arrives"),
        ],
    ),
    tested(
        "6.3",
        Receiver,
        "it must be untagged, on queue 0, and have exactly 8 bytes",
        &[
            (ERRORS, "Immediate Data: a byte too short"),
            (ERRORS, "Immediate Data: a byte too long"),
            (ERRORS, "Immediate Data: in two segments"),
            (ERRORS, "Immediate Data: to the queue of Read Requests"),
            (ERRORS, "Immediate Data: in a tagged segment"),
        ],
    ),
    tested(
        "8.1",
        Receiver,
        "errors in Immediate Data are reported by a Terminate with its header",
        &[(ERRORS, "Immediate Data: a byte too short"), (ERRORS, "Immediate Data: MSN too high")],
    ),
    tested(
        "8.1",
        Implementation,
        "errors in atomic messages are reported by a Terminate with their DDP header",
        &[
            (ATOMIC_ERRORS, "Atomic Request: a byte too short"),
            (ATOMIC_ERRORS, "Atomic Request: half behind the region"),
            (ATOMIC_ERRORS, "Atomic Response: unasked, behind the Read's"),
            (ATOMIC_ATTACKS, "unaligned_atomics"),
        ],
    ),
    tested(
        "8.2",
        Receiver,
        "of Immediate Data the DDP fields, the opcode and the version are checked",
        &[
            (ERRORS, "Immediate Data: MSN too high"),
            (FIELDS, "rdmap_control"),
            (ERRORS, "Immediate Data: no receive in time"),
        ],
    ),
    tested(
        "8.2",
        Receiver,
        "of Atomic Requests and Responses the DDP fields, the opcode and the version are checked, and the \
        alignment, with the Terminate code that the RFC gives it",
        &[
            (ATOMIC_ERRORS, "Atomic Request: FetchAdd is not aligned"),
            (ATOMIC_ERRORS, "Atomic Request: MSN too high"),
            (FIELDS, "rdmap_control"),
        ],
    ),
];
