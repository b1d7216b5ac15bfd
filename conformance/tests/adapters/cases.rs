//! What is tried with each replica, and what both ends do.

use uwarp_conformance::attacker::encode::{ENHANCED, MARKERS, Setup};

use crate::adapter::{Adapter, Depths};
use crate::ammasso::Ammasso;
use crate::chelsio::{Cxgb3, Cxgb4};
use crate::intel::{E810, I40iw, Intel, X722};
use crate::scenes::Ending::{Closes, Program, Resets};
use crate::scenes::Scene;
use crate::scenes::Then::{self, Aborted, Data, Rejected, Unknown, Watched, Wrong};
use crate::siw::Siw;

/// Who connects: the adapter, or uwarp's program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Active,
    Passive,
}
use Role::{Active, Passive};

/// A row.
pub struct Case {
    /// Of the test.
    pub name: &'static str,
    pub adapter: &'static str,
    pub role: Role,
    /// What is special in it.
    pub what: &'static str,
    pub scene: Scene,
    /// What both ends do.
    pub saw: &'static str,
}

pub const CXGB3: &dyn Adapter = &Cxgb3 { peer2peer: false };
const CXGB3_P2P: &dyn Adapter = &Cxgb3 { peer2peer: true };
pub const CXGB4: &dyn Adapter = &Cxgb4 { revision: 2, peer2peer: true };
const CXGB4_AGAIN: &dyn Adapter = &Cxgb4 { revision: 1, peer2peer: true };
const CXGB4_PLAIN: &dyn Adapter = &Cxgb4 { revision: 2, peer2peer: false };
pub const IRDMA: &dyn Adapter = &E810;
const IRDMA_AGAIN: &dyn Adapter = &Intel { revision: 1, ..E810 };
pub const I40IW: &dyn Adapter = &X722;
const I40IW_AGAIN: &dyn Adapter = &Intel { revision: 1, ..X722 };
const I40IW_PADS: &dyn Adapter = &Intel { i40iw: Some(I40iw { pads: true }), ..X722 };
pub const SIW: &dyn Adapter = &Siw { peer_to_peer: false };
pub const SIW_P2P: &dyn Adapter = &Siw { peer_to_peer: true };
pub const AMSO1100: &dyn Adapter = &Ammasso { answers: true };
const AMSO1100_RESETS: &dyn Adapter = &Ammasso { answers: false };

/// 252 bytes.
const LONG: &[u8] = &[b'x'; 252];

const fn scene(adapter: &'static dyn Adapter, then: Then) -> Scene {
    // Neither the program's 4 and 4, nor the same in both directions.
    let depths = Depths { ird: 3, ord: 5 };
    Scene { adapter, depths, private_data: b"adapter", program: "data=uwarp", env: &[], then }
}

const fn with(adapter: &'static dyn Adapter, program: &'static str, then: Then) -> Scene {
    Scene { program, ..scene(adapter, then) }
}

const REVISION_1: &[(&str, &str)] = &[("UWARP_MPA_REVISION", "1")];
const MARKERS_ON: &[(&str, &str)] = &[("UWARP_MARKERS", "on")];

const REJECTS: &str = "reject=no";

macro_rules! cases {
    ($($name:ident, $adapter:literal, $role:ident, $what:literal, $scene:expr, $saw:literal;)*) => {
        [$(Case {
            name: stringify!($name), adapter: $adapter, role: $role, what: $what, scene: $scene, saw: $saw,
        }),*]
    };
}

/// The first byte of the key.
fn other_key(answer: &mut Setup) {
    answer.key[0] ^= 1;
}

fn other_revision(answer: &mut Setup) {
    answer.revision ^= 3;
}

fn plain(answer: &mut Setup) {
    answer.flags &= !ENHANCED;
}

fn wants_markers(answer: &mut Setup) {
    answer.flags |= MARKERS;
}

fn no_model(answer: &mut Setup) {
    answer.private_data[0] &= 0x7F;
}

/// These indications, in the two highest bits, and an ORD below 256.
fn named(answer: &mut Setup, bits: u8, ord: u8) {
    answer.private_data[2] = bits;
    answer.private_data[3] = ord;
}

fn names_the_write(answer: &mut Setup) {
    named(answer, 0x80, 3);
}

fn names_none(answer: &mut Setup) {
    named(answer, 0, 3);
}

fn reads_200(answer: &mut Setup) {
    let bits = answer.private_data[2] & 0xC0;
    named(answer, bits, 200);
}

fn serves_no_read(answer: &mut Setup) {
    answer.private_data[0] &= 0xC0;
    answer.private_data[1] = 0;
}

pub static CASES: &[Case] = &cases! {
    cxgb3_connects, "cxgb3", Active, "its program sends first",
        scene(CXGB3, Data(Closes)),
        "no indication; the adapter closes; uwarp closes; program: CONNECT_REQUEST 128/128 \
         \"adapter\", ESTABLISHED 128/128, data good, DISCONNECTED, ERR, 2 flushed";
    cxgb3_connects_with_peer2peer, "cxgb3", Active, "parameter `peer2peer` is set",
        scene(CXGB3_P2P, Data(Program)),
        "the adapter indicates by a Read; uwarp closes; program: CONNECT_REQUEST 128/128 \"adapter\", \
         ESTABLISHED 128/128, data good, DISCONNECTED, ERR, 2 flushed";
    cxgb3_connects_and_resets, "cxgb3", Active, "it aborts after the data",
        scene(CXGB3, Data(Resets)),
        "no indication; the adapter resets; program: CONNECT_REQUEST 128/128 \"adapter\", ESTABLISHED \
         128/128, data good, DISCONNECTED, ERR, 2 flushed";
    cxgb3_connects_to_one_that_sends_first, "cxgb3", Active, "uwarp's program sends at once",
        with(CXGB3, "first=yes data=uwarp", Data(Closes)),
        "no indication; the adapter closes; uwarp closes; program: CONNECT_REQUEST 128/128 \
         \"adapter\", ESTABLISHED 128/128, data good, DISCONNECTED, ERR, 2 flushed";
    cxgb3_is_rejected, "cxgb3", Active, "uwarp's program rejects",
        with(CXGB3, REJECTS, Rejected),
        "the adapter's program gets ECONNREFUSED \"no\"; program: CONNECT_REQUEST 128/128 \"adapter\"";
    cxgb3_gets_another_revision, "cxgb3", Active, "the answer has revision 2",
        scene(CXGB3, Wrong(other_revision)),
        "the adapter resets; program: CONNECT_REQUEST 128/128 \"adapter\", ESTABLISHED 128/128, \
         DISCONNECTED, ERR, 4 flushed";
    cxgb3_gets_another_key, "cxgb3", Active, "the answer has another key",
        scene(CXGB3, Wrong(other_key)),
        "the adapter resets; program: CONNECT_REQUEST 128/128 \"adapter\", ESTABLISHED 128/128, \
         DISCONNECTED, ERR, 4 flushed";
    cxgb3_accepts, "cxgb3", Passive, "its program waits for the first FPDU",
        scene(CXGB3, Data(Closes)),
        "uwarp asks with revision 2 with uwarp's bit; the adapter resets; uwarp asks with revision 2 with \
         uwarp's bit; the adapter resets; uwarp asks with revision 2; \
         the adapter resets; uwarp asks with revision 1; uwarp indicates by a Write of no data; the \
         adapter closes; uwarp closes; program: ESTABLISHED 128/128 \"adapter\", data good, \
         DISCONNECTED, ERR, 2 flushed";
    cxgb3_accepts_and_the_program_ends, "cxgb3", Passive, "uwarp's program disconnects",
        scene(CXGB3, Data(Program)),
        "uwarp asks with revision 2 with uwarp's bit; the adapter resets; uwarp asks with revision 2 with \
         uwarp's bit; the adapter resets; uwarp asks with revision 2; \
         the adapter resets; uwarp asks with revision 1; uwarp indicates by a Write of no data; uwarp \
         closes; program: ESTABLISHED 128/128 \"adapter\", data good, DISCONNECTED, ERR, 2 flushed";
    cxgb3_accepts_with_peer2peer, "cxgb3", Passive, "parameter `peer2peer` is set: it expects a Read",
        scene(CXGB3_P2P, Unknown),
        "uwarp asks with revision 2 with uwarp's bit; the adapter resets; uwarp asks with revision 2 with \
         uwarp's bit; the adapter resets; uwarp asks with revision 2; \
         the adapter resets; uwarp asks with revision 1; uwarp indicates by a Write of no data; what \
         the firmware does with that is not known; here it resets; program: ESTABLISHED 128/128 \
         \"adapter\", DISCONNECTED, ERR, 4 flushed";
    cxgb3_rejects, "cxgb3", Passive, "its program rejects",
        scene(CXGB3, Rejected),
        "uwarp asks with revision 2 with uwarp's bit; the adapter resets; uwarp asks with revision 2 with \
         uwarp's bit; the adapter resets; uwarp asks with revision 2; \
         the adapter resets; uwarp asks with revision 1; the adapter's program rejects; uwarp closes; \
         program: REJECTED (status 28) \"adapter\"";

    cxgb4_connects, "cxgb4", Active, "",
        scene(CXGB4, Data(Closes)),
        "the adapter indicates by a Read; the adapter closes; uwarp closes; program: CONNECT_REQUEST \
         5/3 \"adapter\", ESTABLISHED 5/3, data good, DISCONNECTED, ERR, 2 flushed";
    cxgb4_connects_and_the_program_ends, "cxgb4", Active, "uwarp's program disconnects",
        scene(CXGB4, Data(Program)),
        "the adapter indicates by a Read; uwarp closes; program: CONNECT_REQUEST 5/3 \"adapter\", \
         ESTABLISHED 5/3, data good, DISCONNECTED, ERR, 2 flushed";
    cxgb4_connects_and_resets, "cxgb4", Active, "it aborts after the data",
        scene(CXGB4, Data(Resets)),
        "the adapter indicates by a Read; the adapter resets; program: CONNECT_REQUEST 5/3 \
         \"adapter\", ESTABLISHED 5/3, data good, DISCONNECTED, ERR, 2 flushed";
    cxgb4_connects_where_nothing_may_be_read, "cxgb4", Active, "uwarp's program lets nobody read",
        with(CXGB4, "ird=0 data=uwarp", Data(Closes)),
        "the adapter indicates by a Read; the adapter closes; uwarp closes; program: CONNECT_REQUEST \
         5/3 \"adapter\", ESTABLISHED 1/3, data good, DISCONNECTED, ERR, 2 flushed";
    cxgb4_connects_with_revision_1, "cxgb4", Active, "it asks again after a reset",
        scene(CXGB4_AGAIN, Data(Closes)),
        "the adapter indicates by a Read; the adapter closes; uwarp closes; program: CONNECT_REQUEST \
         128/128 \"adapter\", ESTABLISHED 128/128, data good, DISCONNECTED, ERR, 2 flushed";
    cxgb4_connects_without_peer2peer, "cxgb4", Active,
        "parameter `peer2peer` is off; its program sends first",
        scene(CXGB4_PLAIN, Data(Closes)),
        "no indication; the adapter closes; uwarp closes; program: CONNECT_REQUEST 5/3 \"adapter\", \
         ESTABLISHED 5/3, data good, DISCONNECTED, ERR, 2 flushed";
    cxgb4_is_rejected, "cxgb4", Active, "uwarp's program rejects",
        with(CXGB4, REJECTS, Rejected),
        "the adapter's program gets ECONNREFUSED \"no\"; program: CONNECT_REQUEST 5/3 \"adapter\"";
    cxgb4_is_rejected_with_revision_1, "cxgb4", Active, "uwarp's program rejects",
        with(CXGB4_AGAIN, REJECTS, Rejected),
        "the adapter's program gets ECONNREFUSED \"no\"; program: CONNECT_REQUEST 128/128 \"adapter\"";
    cxgb4_finds_no_read_named, "cxgb4", Active, "the answer names the Write alone",
        scene(CXGB4, Wrong(names_the_write)),
        "the adapter sends Terminate 2/3/7; uwarp closes; program: CONNECT_REQUEST 5/3 \"adapter\", \
         CONNECT_ERROR (status -104)";
    cxgb4_finds_too_many_reads, "cxgb4", Active, "the answer's ORD is 200",
        scene(CXGB4, Wrong(reads_200)),
        "the adapter sends Terminate 2/3/6; uwarp closes; program: CONNECT_REQUEST 5/3 \"adapter\", \
         CONNECT_ERROR (status -104)";
    cxgb4_gets_a_plain_answer, "cxgb4", Active, "the answer is not enhanced",
        scene(CXGB4, Wrong(plain)),
        "the adapter sends Terminate 2/3/7; uwarp closes; program: CONNECT_REQUEST 5/3 \"adapter\", \
         CONNECT_ERROR (status -104)";
    cxgb4_gets_another_key, "cxgb4", Active, "the answer has another key",
        scene(CXGB4, Wrong(other_key)),
        "the adapter resets; program: CONNECT_REQUEST 5/3 \"adapter\", CONNECT_ERROR (status -104)";
    cxgb4_accepts, "cxgb4", Passive, "",
        scene(CXGB4, Data(Closes)),
        "uwarp asks with revision 2 with uwarp's bit; uwarp indicates by a Read of no data; the \
         adapter closes; uwarp closes; program: ESTABLISHED 4/4 \"adapter\", data good, DISCONNECTED, \
         ERR, 2 flushed";
    cxgb4_accepts_and_the_program_ends, "cxgb4", Passive, "uwarp's program disconnects",
        scene(CXGB4, Data(Program)),
        "uwarp asks with revision 2 with uwarp's bit; uwarp indicates by a Read of no data; uwarp \
         closes; program: ESTABLISHED 4/4 \"adapter\", data good, DISCONNECTED, ERR, 2 flushed";
    cxgb4_accepts_one_that_reads_nothing, "cxgb4", Passive, "uwarp's program reads nothing",
        with(CXGB4, "ord=0 data=uwarp", Data(Closes)),
        "uwarp asks with revision 2 with uwarp's bit; uwarp indicates by a Read of no data; the \
         adapter closes; uwarp closes; program: ESTABLISHED 4/0 \"adapter\", data good, DISCONNECTED, \
         ERR, 2 flushed";
    cxgb4_accepts_markers, "cxgb4", Passive, "uwarp requests markers (`UWARP_MARKERS=on`)",
        Scene { env: MARKERS_ON, ..scene(CXGB4, Data(Closes)) },
        "uwarp asks with revision 2 with uwarp's bit; uwarp indicates by a Read of no data; the \
         adapter closes; uwarp closes; program: ESTABLISHED 4/4 \"adapter\", data good, DISCONNECTED, \
         ERR, 2 flushed";
    cxgb4_accepts_without_peer2peer, "cxgb4", Passive, "parameter `peer2peer` is off",
        scene(CXGB4_PLAIN, Data(Closes)),
        "uwarp asks with revision 2 with uwarp's bit; uwarp indicates by a Write of no data; the \
         adapter closes; uwarp closes; program: ESTABLISHED 4/4 \"adapter\", data good, DISCONNECTED, \
         ERR, 2 flushed";
    cxgb4_aborts, "cxgb4", Passive, "its program accepts with depths that are too large",
        scene(CXGB4, Aborted),
        "uwarp asks with revision 2 with uwarp's bit; its program gets the request; the adapter \
         resets; uwarp asks with revision 2 with uwarp's bit; its program gets the request; the adapter \
         resets; uwarp asks with revision 2; its program gets the request; the adapter resets; uwarp \
         asks with revision 1; its program gets the request; the adapter resets; program: REJECTED \
         (status 28)";
    cxgb4_accepts_revision_1, "cxgb4", Passive, "`UWARP_MPA_REVISION=1`: it expects a Read",
        Scene { env: REVISION_1, ..scene(CXGB4, Unknown) },
        "uwarp asks with revision 1; uwarp indicates by a Write of no data; what the firmware does \
         with that is not known; here it resets; program: ESTABLISHED 128/128 \"adapter\", \
         DISCONNECTED, ERR, 4 flushed";
    cxgb4_rejects, "cxgb4", Passive, "its program rejects",
        scene(CXGB4, Rejected),
        "uwarp asks with revision 2 with uwarp's bit; the adapter's program rejects; uwarp closes; \
         program: REJECTED (status 28) \"adapter\"";

    i40iw_connects, "i40iw", Active, "",
        scene(I40IW, Data(Closes)),
        "the adapter indicates by a Read; the adapter closes; uwarp closes; program: CONNECT_REQUEST \
         5/3 \"adapter\", ESTABLISHED 5/3, data good, DISCONNECTED, ERR, 2 flushed";
    i40iw_connects_with_252_bytes, "i40iw", Active, "252 bytes of private data: the length says 0",
        Scene { private_data: LONG, ..scene(I40IW, Watched) },
        "uwarp closes without an answer; program: nothing";
    i40iw_connects_again_with_252_bytes, "i40iw", Active,
        "it asks again with revision 1, whose length is right",
        Scene { private_data: LONG, ..scene(I40IW_AGAIN, Data(Closes)) },
        "the adapter indicates by a Read; the adapter closes; uwarp closes; program: CONNECT_REQUEST \
         128/128 \"252 bytes\", ESTABLISHED 128/128, data good, DISCONNECTED, ERR, 2 flushed";
    i40iw_is_rejected, "i40iw", Active, "uwarp's program rejects",
        with(I40IW, REJECTS, Rejected),
        "the adapter's program gets ECONNREFUSED \"no\"; uwarp closes; program: CONNECT_REQUEST 5/3 \
         \"adapter\"";
    i40iw_accepts, "i40iw", Passive, "",
        scene(I40IW, Data(Closes)),
        "uwarp asks with revision 2 with uwarp's bit; uwarp indicates by a Read of no data; the \
         adapter closes; uwarp closes; program: ESTABLISHED 4/4 \"adapter\", data good, DISCONNECTED, \
         ERR, 2 flushed";
    i40iw_accepts_with_padding, "i40iw", Passive, "the first driver's four zero bytes behind the reply",
        scene(I40IW_PADS, Watched),
        "uwarp asks with revision 2 with uwarp's bit; uwarp sends Terminate 2/0/2 and hangs up; \
         program: CONNECT_ERROR (status -104)";
    i40iw_accepts_with_252_bytes, "i40iw", Passive, "252 bytes of private data: the length says 0",
        Scene { private_data: LONG, ..scene(I40IW, Watched) },
        "uwarp asks with revision 2 with uwarp's bit; uwarp hangs up; program: CONNECT_ERROR (status \
         -71)";
    i40iw_rejects, "i40iw", Passive, "its program rejects",
        scene(I40IW, Rejected),
        "uwarp asks with revision 2 with uwarp's bit; the adapter's program rejects; uwarp closes; \
         program: REJECTED (status 28) \"adapter\"";

    irdma_connects, "irdma", Active, "",
        scene(IRDMA, Data(Closes)),
        "the adapter indicates by a Read; the adapter closes; uwarp closes; program: CONNECT_REQUEST \
         5/3 \"adapter\", ESTABLISHED 5/3, data good, DISCONNECTED, ERR, 2 flushed";
    irdma_connects_and_the_program_ends, "irdma", Active, "uwarp's program disconnects",
        scene(IRDMA, Data(Program)),
        "the adapter indicates by a Read; uwarp closes; program: CONNECT_REQUEST 5/3 \"adapter\", \
         ESTABLISHED 5/3, data good, DISCONNECTED, ERR, 2 flushed";
    irdma_connects_and_resets, "irdma", Active, "it resets after the data",
        scene(IRDMA, Data(Resets)),
        "the adapter indicates by a Read; the adapter resets; program: CONNECT_REQUEST 5/3 \
         \"adapter\", ESTABLISHED 5/3, data good, DISCONNECTED, ERR, 2 flushed";
    irdma_connects_where_nothing_may_be_read, "irdma", Active, "uwarp's program lets nobody read",
        with(IRDMA, "ird=0 data=uwarp", Data(Closes)),
        "the adapter indicates by a Read; the adapter closes; uwarp closes; program: CONNECT_REQUEST \
         5/3 \"adapter\", ESTABLISHED 1/3, data good, DISCONNECTED, ERR, 2 flushed";
    irdma_connects_with_revision_1, "irdma", Active, "it asks again after a reset",
        scene(IRDMA_AGAIN, Data(Closes)),
        "the adapter indicates by a Read; the adapter closes; uwarp closes; program: CONNECT_REQUEST \
         128/128 \"adapter\", ESTABLISHED 128/128, data good, DISCONNECTED, ERR, 2 flushed";
    irdma_connects_and_sends_markers, "irdma", Active, "uwarp requests markers (`UWARP_MARKERS=on`)",
        Scene { env: MARKERS_ON, ..scene(IRDMA, Data(Closes)) },
        "the adapter indicates by a Read; the adapter closes; uwarp closes; program: CONNECT_REQUEST \
         5/3 \"adapter\", ESTABLISHED 5/3, data good, DISCONNECTED, ERR, 2 flushed";
    irdma_is_rejected, "irdma", Active, "uwarp's program rejects",
        with(IRDMA, REJECTS, Rejected),
        "the adapter's program gets ECONNREFUSED \"no\"; uwarp closes; program: CONNECT_REQUEST 5/3 \
         \"adapter\"";
    irdma_finds_none_named, "irdma", Active, "the answer names no indication",
        scene(IRDMA, Wrong(names_none)),
        "the adapter resets; program: CONNECT_REQUEST 5/3 \"adapter\", CONNECT_ERROR (status -104)";
    irdma_finds_no_model, "irdma", Active, "the answer is for the client-server model",
        scene(IRDMA, Wrong(no_model)),
        "the adapter resets; program: CONNECT_REQUEST 5/3 \"adapter\", CONNECT_ERROR (status -104)";
    irdma_finds_no_depth_for_the_read, "irdma", Active, "the answer names the Read, and its IRD is 0",
        scene(IRDMA, Wrong(serves_no_read)),
        "the adapter resets; program: CONNECT_REQUEST 5/3 \"adapter\", CONNECT_ERROR (status -104)";
    irdma_finds_too_many_reads, "irdma", Active, "the answer's ORD is 200",
        scene(IRDMA, Wrong(reads_200)),
        "the adapter resets; program: CONNECT_REQUEST 5/3 \"adapter\", CONNECT_ERROR (status -104)";
    irdma_accepts, "irdma", Passive, "",
        scene(IRDMA, Data(Closes)),
        "uwarp asks with revision 2 with uwarp's bit; uwarp indicates by a Read of no data; the \
         adapter closes; uwarp closes; program: ESTABLISHED 4/4 \"adapter\", data good, DISCONNECTED, \
         ERR, 2 flushed";
    irdma_accepts_and_the_program_ends, "irdma", Passive, "uwarp's program disconnects",
        scene(IRDMA, Data(Program)),
        "uwarp asks with revision 2 with uwarp's bit; uwarp indicates by a Read of no data; uwarp \
         closes; program: ESTABLISHED 4/4 \"adapter\", data good, DISCONNECTED, ERR, 2 flushed";
    irdma_accepts_one_that_reads_nothing, "irdma", Passive, "uwarp's program reads nothing",
        with(IRDMA, "ord=0 data=uwarp", Data(Closes)),
        "uwarp asks with revision 2 with uwarp's bit; uwarp indicates by a Read of no data; the \
         adapter closes; uwarp closes; program: ESTABLISHED 4/0 \"adapter\", data good, DISCONNECTED, \
         ERR, 2 flushed";
    irdma_accepts_revision_1, "irdma", Passive, "`UWARP_MPA_REVISION=1`",
        Scene { env: REVISION_1, ..scene(IRDMA, Data(Closes)) },
        "uwarp asks with revision 1; uwarp indicates by a Write of no data; the adapter closes; uwarp \
         closes; program: ESTABLISHED 128/128 \"adapter\", data good, DISCONNECTED, ERR, 2 flushed";
    irdma_rejects, "irdma", Passive, "its program rejects",
        scene(IRDMA, Rejected),
        "uwarp asks with revision 2 with uwarp's bit; the adapter's program rejects; uwarp closes; \
         program: REJECTED (status 28) \"adapter\"";

    amso1100_connects, "amso1100", Active, "a request of revision 0",
        scene(AMSO1100, Watched),
        "uwarp closes without an answer; program: nothing";
    amso1100_answers, "amso1100", Passive, "it answers with revision 0",
        scene(AMSO1100, Watched),
        "uwarp asks with revision 2 with uwarp's bit; uwarp hangs up; program: CONNECT_ERROR (status \
         -71)";
    amso1100_resets, "amso1100", Passive, "it resets what has another revision",
        scene(AMSO1100_RESETS, Watched),
        "uwarp asks with revision 2 with uwarp's bit; the adapter resets; uwarp asks with revision 2 with \
         uwarp's bit; the adapter resets; uwarp asks with revision 2; \
         the adapter resets; uwarp asks with revision 1; the adapter resets; program: REJECTED (status \
         28)";

    siw_connects, "siw", Active, "its program sends first",
        scene(SIW, Data(Closes)),
        "no indication; the adapter closes; uwarp closes; program: CONNECT_REQUEST 5/3 \"adapter\", \
         ESTABLISHED 5/3, data good, DISCONNECTED, ERR, 2 flushed";
    siw_connects_and_the_program_ends, "siw", Active, "uwarp's program disconnects",
        scene(SIW, Data(Program)),
        "no indication; uwarp closes; program: CONNECT_REQUEST 5/3 \"adapter\", ESTABLISHED 5/3, data \
         good, DISCONNECTED, ERR, 2 flushed";
    siw_connects_and_resets, "siw", Active, "it resets after the data",
        scene(SIW, Data(Resets)),
        "no indication; the adapter resets; program: CONNECT_REQUEST 5/3 \"adapter\", ESTABLISHED 5/3, \
         data good, DISCONNECTED, ERR, 2 flushed";
    siw_connects_with_peer_to_peer, "siw", Active, "built with `peer_to_peer`",
        scene(SIW_P2P, Data(Closes)),
        "the adapter indicates by a Write; the adapter closes; uwarp closes; program: CONNECT_REQUEST \
         5/3 \"adapter\", ESTABLISHED 5/3, data good, DISCONNECTED, ERR, 2 flushed";
    siw_connects_to_one_that_sends_first, "siw", Active, "uwarp's program sends at once",
        with(SIW, "first=yes data=uwarp", Data(Closes)),
        "no indication; the adapter closes; uwarp closes; program: CONNECT_REQUEST 5/3 \"adapter\", \
         ESTABLISHED 5/3, data good, DISCONNECTED, ERR, 2 flushed";
    siw_is_rejected, "siw", Active, "uwarp's program rejects",
        with(SIW, REJECTS, Rejected),
        "the adapter's program gets ECONNRESET \"no\"; uwarp closes; program: CONNECT_REQUEST 5/3 \
         \"adapter\"";
    siw_gets_another_key, "siw", Active, "the answer has another key",
        scene(SIW, Wrong(other_key)),
        "the adapter sends Terminate 2/0/4; uwarp closes; program: CONNECT_REQUEST 5/3 \"adapter\", \
         ESTABLISHED 5/3, DISCONNECTED, ERR, 4 flushed";
    siw_gets_a_plain_answer, "siw", Active, "the answer is not enhanced",
        scene(SIW, Wrong(plain)),
        "the adapter closes; uwarp closes; program: CONNECT_REQUEST 5/3 \"adapter\", ESTABLISHED 5/3, \
         DISCONNECTED, ERR, 4 flushed";
    siw_is_asked_for_markers, "siw", Active, "the answer has M",
        scene(SIW, Wrong(wants_markers)),
        "the adapter closes; uwarp closes; program: CONNECT_REQUEST 5/3 \"adapter\", ESTABLISHED 5/3, \
         DISCONNECTED, ERR, 4 flushed";
    siw_finds_too_many_reads, "siw", Active, "the answer's ORD is 200",
        scene(SIW, Wrong(reads_200)),
        "the adapter sends Terminate 2/0/6; uwarp closes; program: CONNECT_REQUEST 5/3 \"adapter\", \
         ESTABLISHED 5/3, DISCONNECTED, ERR, 4 flushed";
    siw_finds_none_named, "siw", Active, "built with `peer_to_peer`; the answer names no indication",
        scene(SIW_P2P, Wrong(names_none)),
        "the adapter sends Terminate 2/0/7; uwarp closes; program: CONNECT_REQUEST 5/3 \"adapter\", \
         CONNECT_ERROR (status -104)";
    siw_accepts, "siw", Passive, "",
        scene(SIW, Data(Closes)),
        "uwarp asks with revision 2 with uwarp's bit; uwarp indicates by a Write of no data; the \
         adapter closes; uwarp closes; program: ESTABLISHED 4/4 \"adapter\", data good, DISCONNECTED, \
         ERR, 2 flushed";
    siw_accepts_and_the_program_ends, "siw", Passive, "uwarp's program disconnects",
        scene(SIW, Data(Program)),
        "uwarp asks with revision 2 with uwarp's bit; uwarp indicates by a Write of no data; uwarp \
         closes; program: ESTABLISHED 4/4 \"adapter\", data good, DISCONNECTED, ERR, 2 flushed";
    siw_rejects, "siw", Passive, "its program rejects",
        scene(SIW, Rejected),
        "uwarp asks with revision 2 with uwarp's bit; the adapter's program rejects; uwarp closes; \
         program: REJECTED (status 28) \"adapter\"";
    siw_rejects_markers, "siw", Passive, "uwarp requests markers (`UWARP_MARKERS=on`)",
        Scene { env: MARKERS_ON, ..scene(SIW, Watched) },
        "uwarp asks with revision 2 with uwarp's bit; the driver rejects; uwarp closes; program: \
         REJECTED (status 28)";
};
