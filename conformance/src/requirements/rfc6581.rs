use super::files::*;
use super::{Implementation, Initiator, Receiver, Responder, Rfc, Row, Sender, built, gap, outside, tested};

pub const RFC: Rfc = Rfc {
    number: 6581,
    title: "Enhanced RDMA Connection Establishment",
    scope: "",
    sections: &["5", "6", "7", "9", "9.1", "9.2", "9.3", "10"],
    rows: ROWS,
};

const ROWS: &[Row] = &[
    tested(
        "5",
        Initiator,
        "nothing is sent before the ready-to-receive indication (RTR)",
        &[
            (TRACES, "ready_to_receive_by_read"),
            (TRACES, "write_to_a_stranger"),
            (SENDING, "the_ready_to_receive_write_is_no_acknowledgement_of_the_first_send"),
        ],
    ),
    gap(
        "6",
        Sender,
        "reserved bits of the flags are sent as zero",
        "two of them say that the sender is uwarp (ADR 002), as under RFC 5044 section 7.1.1",
    ),
    tested(
        "6",
        Receiver,
        "reserved bits of the flags are not checked",
        &[(STARTUP, "every_flag"), (SETUP, "every_flag_byte_of_a_request_has_its_answer")],
    ),
    tested(
        "6",
        Sender,
        "the revision is 2 where something enhanced is asked for",
        &[(SETUP, "our_request_golden_bytes"), (MPA, "frames_of_siw")],
    ),
    tested(
        "6",
        Responder,
        "requests of revision 1 are still accepted",
        &[
            (SETUP, "siw_client_revision_one"),
            (SETUP, "every_pair_of_settings_connects"),
            (SIW, "siw speaks MPA revision 1"),
        ],
    ),
    tested(
        "6",
        Implementation,
        "with S, private data begins with the enhanced data",
        &[
            (SETUP, "our_request_golden_bytes"),
            (SETUP, "bad_frames_end_the_connection"),
            ("crates/wire/tests/values.rs", "enhanced_data"),
        ],
    ),
    outside(
        "7",
        Implementation,
        "requirements for SCTP's session control chunks",
        "there is no SCTP below uwarp",
    ),
    tested(
        "9",
        Implementation,
        "IRD and ORD are 14-bit numbers in network byte order",
        &[
            (MPA, "frames_of_siw"),
            (MPA, "a_depth_that_does_not_fit_stays_large_and_is_not_no_auto"),
            ("crates/wire/tests/values.rs", "enhanced_data"),
        ],
    ),
    tested(
        "9.1",
        Implementation,
        "the peer's IRD and ORD are reported to the program",
        &[(STRANGERS, "a_rejection_says_what_depths_the_peer_has"), (CM, "ends_meet_over_ipv4")],
    ),
    tested(
        "9.1",
        Responder,
        "the responder's ORD is at most the initiator's IRD",
        &[
            (SETUP, "depths_are_mirrored_and_clamped"),
            (SETUP, "any_request"),
            (STARTUP, "read_depths_and_model"),
        ],
    ),
    outside(
        "9.1",
        Responder,
        "a rejection for want of read depth carries the codes of insufficient resources",
        "uwarp's responder takes the smaller depth and does not reject for it; a program that does rejects \
        with private data of its own",
    ),
    tested(
        "9.1",
        Initiator,
        "the initiator's IRD is at least the responder's ORD, its ORD at most the responder's IRD",
        &[
            (SETUP, "depths_are_mirrored_and_clamped"),
            (SETUP, "any_reply_in_any_portions"),
            (CLIENT, "read_depths_and_model"),
        ],
    ),
    tested(
        "9.1",
        Initiator,
        "an IRD that is not available is reported by a Terminate (2, 0, 6)",
        &[
            (SETUP, "insufficient_ird_is_told_with_a_terminate"),
            (CM, "a_responder_that_wants_too_much_is_told_with_a_terminate"),
        ],
    ),
    tested(
        "9.1",
        Initiator,
        "the responder's IRD and ORD reach the program with an acceptance and with a rejection",
        &[(STRANGERS, "a_rejection_says_what_depths_the_peer_has"), (CM, "ends_meet_over_ipv4")],
    ),
    tested(
        "9.1",
        Implementation,
        "0x3FFF leaves a depth as it is, and is answered with 0x3FFF",
        &[(SETUP, "depths_are_mirrored_and_clamped"), (STARTUP, "read_depths_and_model")],
    ),
    tested(
        "9.2",
        Initiator,
        "A is set for the peer-to-peer model, and each of B, C and D whose indication the initiator can send",
        &[(SETUP, "our_request_golden_bytes")],
    ),
    tested(
        "9.2",
        Responder,
        "A is answered with A, and with at least one of B, C and D: one that was asked for, or else one \
        that is known",
        &[
            (SETUP, "indication_is_a_write_if_it_may_be_and_never_a_send"),
            (STARTUP, "read_depths_and_model"),
            (STARTUP, "every_flag"),
        ],
    ),
    tested(
        "9.2",
        Initiator,
        "after a reply with A the initiator sends one of the indications that were agreed on",
        &[
            (SETUP, "indication_is_a_write_if_it_may_be_and_never_a_send"),
            (STRANGERS, "a_program_that_reads_nothing_meets_a_responder_that_waits_for_a_read"),
            (CLIENT, "read_depths_and_model"),
        ],
    ),
    tested(
        "9.2",
        Initiator,
        "if it can send none of them, it reports that by a Terminate (2, 0, 7)",
        &[
            (SETUP, "terminate_has_crc_and_marker_when_agreed"),
            (SETUP, "indication_is_a_write_if_it_may_be_and_never_a_send"),
        ],
    ),
    built(
        "9.2",
        Initiator,
        "A is zero for the client-server model",
        "the initiator always asks for the peer-to-peer model in revision 2, and revision 1 has no field \
        for it",
    ),
    tested(
        "9.2",
        Responder,
        "a request without A is answered without A, B, C and D",
        &[
            (SETUP, "siw_client_is_answered_as_a_siw_server_would"),
            (SETUP, "indication_is_a_write_if_it_may_be_and_never_a_send"),
        ],
    ),
    tested(
        "9.2",
        Receiver,
        "without A the bits B, C and D are ignored",
        &[(SETUP, "indication_is_a_write_if_it_may_be_and_never_a_send"), (STARTUP, "read_depths_and_model")],
    ),
    tested(
        "9.3",
        Implementation,
        "a local error without a code of its own is reported by a Terminate (2, 0, 5) before the connection \
        is reset",
        &[
            (SETUP, "an_error_at_this_end_is_told_with_a_terminate"),
            (STRANGERS, "a_queue_pair_that_cannot_take_the_connection_is_told_of_by_the_initiator"),
            (STRANGERS, "a_queue_pair_that_cannot_take_the_connection_is_told_of_by_the_responder"),
        ],
    ),
    tested(
        "10",
        Responder,
        "an enhanced request is answered by an enhanced reply, an unenhanced one by an unenhanced reply",
        &[
            (SETUP, "every_pair_of_settings_connects"),
            (SETUP, "every_flag_byte_of_a_request_has_its_answer"),
            (SIW, "siw speaks MPA revision 1"),
        ],
    ),
    gap(
        "10",
        Initiator,
        "the enhanced form is not used where nothing enhanced is wanted",
        "the initiator always wants the peer-to-peer model, so that a server may speak first; \
        `UWARP_MPA_REVISION=1` turns it off",
    ),
    tested(
        "10",
        Responder,
        "unenhanced requests are still accepted",
        &[(SETUP, "siw_client_revision_one"), (STARTUP, "every_revision")],
    ),
    tested(
        "10",
        Responder,
        "a responder without enhanced set-up closes the connection on an enhanced request, and the \
        initiator may try without",
        &[
            (SETUP, "fallback_drops_reserved_bits_first_and_enhanced_set_up_next"),
            (CM, "older_peers_are_asked_again_on_new_connections"),
        ],
    ),
];
