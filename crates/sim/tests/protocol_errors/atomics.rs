//! Rows about atomic operations (RFC 7306 section 5).

use uwarp_rnic::Access;

use crate::encoder::{ATOMIC_REQUEST, ATOMIC_RESPONSE, Quotes, Untagged, fpdu};
use crate::row::{Row, bad, good};
use crate::rows::{one, request, response, some};
use crate::victim::{BASE, LOCAL, PIECE, SINK, Victim};

const FETCH_ADD: u8 = 0;
const CMP_SWAP: u8 = 2;

/// The 52 bytes of an Atomic Request: data and mask, compare data and mask.
fn request_bytes(operation: u8, stag: u32, to: u64, numbers: [u64; 4]) -> Vec<u8> {
    let mut out = vec![0, 0, 0, operation];
    out.extend(0x0102_0304u32.to_be_bytes());
    out.extend(stag.to_be_bytes());
    out.extend(to.to_be_bytes());
    numbers.iter().for_each(|number| out.extend(number.to_be_bytes()));
    out
}

/// An offset whose address is a multiple of 8.
fn aligned(v: &Victim) -> u64 {
    BASE + (8 - v.memory.addr(LOCAL) % 8) % 8
}

fn add(v: &Victim, to: u64) -> Untagged {
    Untagged::new(ATOMIC_REQUEST, 1, 1, request_bytes(FETCH_ADD, v.atomic.stag(), to, [1, 0, 0, u64::MAX]))
}

/// An answer with the value that every eight bytes have at first.
fn answer(msn: u32) -> Vec<u8> {
    let mut payload = 0x0102_0304u32.to_be_bytes().to_vec();
    payload.extend([0x5A; 8]);
    fpdu(&Untagged::new(ATOMIC_RESPONSE, 3, msn, payload).ulpdu())
}

fn unasked(msn: u32, len: usize) -> Untagged {
    Untagged::new(ATOMIC_RESPONSE, 3, msn, vec![0; len])
}

pub fn all() -> Vec<Row> {
    let mut rows = requests();
    rows.extend(responses());
    rows.extend(carried_out());
    rows.into_iter()
        .map(|row| {
            let rights = Access::REMOTE_READ | Access::REMOTE_WRITE;
            let access = if row.access == rights { rights | Access::REMOTE_ATOMIC } else { row.access };
            Row { access, ..row }
        })
        .collect()
}

fn requests() -> Vec<Row> {
    use Quotes::Ddp;
    let with = |stag: fn(&Victim) -> u32, to: u64| {
        move |v: &Victim| {
            one(Untagged { payload: request_bytes(FETCH_ADD, stag(v), to, [1, 0, 0, 0]), ..add(v, to) }
                .ulpdu())
        }
    };
    let as_reads = "RFC 5040 section 4.8, as for Read Requests";
    vec![
        bad("Atomic Request: an STag that never was", (0, 1, 0), Ddp, as_reads, with(|_| 0x1111_1111, BASE)),
        bad("Atomic Request: a dead STag", (0, 1, 0), Ddp, as_reads, with(|v| v.dead, BASE)),
        bad("Atomic Request: of another domain", (0, 1, 3), Ddp, as_reads, with(|v| v.foreign.stag(), BASE)),
        bad("Atomic Request: reads only", (0, 1, 2), Ddp, as_reads, with(|v| v.readable.stag(), BASE)),
        bad("Atomic Request: writes only", (0, 1, 2), Ddp, as_reads, with(|v| v.writable.stag(), BASE)),
        bad("Atomic Request: before the region", (0, 1, 1), Ddp, as_reads, |v| {
            one(add(v, aligned(v) - 8).ulpdu())
        }),
        bad(
            "Atomic Request: half behind the region",
            (0, 1, 1),
            Ddp,
            as_reads,
            with(|v| v.atomic.stag(), 0x10FC),
        ),
        bad(
            "Atomic Request: the offset wraps",
            (0, 1, 4),
            Ddp,
            as_reads,
            with(|v| v.atomic.stag(), u64::MAX),
        ),
        Row {
            access: Access::REMOTE_READ,
            ..bad("Atomic Request: the queue pair grants none", (0, 1, 2), Ddp, as_reads, |v| {
                one(add(v, aligned(v)).ulpdu())
            })
        },
        bad("Atomic Request: FetchAdd is not aligned", (0, 2, 7), Ddp, "RFC 7306 section 8.2", |v| {
            one(add(v, aligned(v) + 4).ulpdu())
        }),
        bad("Atomic Request: CmpSwap is not aligned", (0, 2, 7), Ddp, "RFC 7306 section 8.2", |v| {
            let numbers = [1, u64::MAX, 0x5A5A_5A5A_5A5A_5A5A, u64::MAX];
            let payload = request_bytes(CMP_SWAP, v.atomic.stag(), aligned(v) + 1, numbers);
            one(Untagged { payload, ..add(v, 0) }.ulpdu())
        }),
        bad("Atomic Request: an operation that is reserved", (0, 2, 6), Ddp, "RFC 7306 section 1.1", |v| {
            let payload = request_bytes(1, v.atomic.stag(), aligned(v), [0; 4]);
            one(Untagged { payload, ..add(v, 0) }.ulpdu())
        }),
        bad("Atomic Request: a byte too short", (0, 2, 0xFF), Ddp, "silent", |v| {
            let mut bad = add(v, aligned(v));
            bad.payload.pop();
            one(bad.ulpdu())
        }),
        bad("Atomic Request: a byte too long", (1, 2, 5), Ddp, "silent", |v| {
            let mut bad = add(v, aligned(v));
            bad.payload.push(0);
            one(bad.ulpdu())
        }),
        bad("Atomic Request: in two segments", (0, 2, 0xFF), Ddp, "silent", |v| {
            one(Untagged { last: false, ..add(v, aligned(v)) }.ulpdu())
        }),
        bad("Atomic Request: to the queue of Sends", (0, 2, 6), Ddp, "RFC 7306 figure 2", |v| {
            one(Untagged { qn: 0, ..add(v, aligned(v)) }.ulpdu())
        }),
        bad("Atomic Request: MSN too high", (1, 2, 3), Ddp, "RFC 5041 section 7.1", |v| {
            one(Untagged { msn: 2, ..add(v, aligned(v)) }.ulpdu())
        }),
        bad(
            "Atomic Request: beyond the read depth, behind a Read",
            (1, 2, 2),
            Ddp,
            "RFC 7306 section 5.2",
            |v| {
                let read = request(8, v.readable.stag(), BASE);
                some(&[read.ulpdu(), Untagged { msn: 2, ..add(v, aligned(v)) }.ulpdu()], 1)
            },
        )
        .at_once(),
    ]
}

fn responses() -> Vec<Row> {
    use Quotes::Ddp;
    vec![
        bad("Atomic Response: unasked, with a Read outstanding", (1, 2, 2), Ddp, "silent", |_| {
            one(unasked(1, 12).ulpdu())
        }),
        bad("Atomic Response: unasked, behind the Read's", (1, 2, 2), Ddp, "silent", |v| {
            some(&[response(v, 0, PIECE).ulpdu(), unasked(1, 12).ulpdu()], 1)
        })
        .sends(&[(1, uwarp_rnic::WcStatus::Success), (2, crate::row::FLUSHED)])
        .written(SINK, PIECE)
        .at_once(),
        bad("Atomic Response: to the queue of requests", (0, 2, 6), Ddp, "RFC 7306 figure 2", |_| {
            one(Untagged { qn: 1, ..unasked(1, 12) }.ulpdu())
        }),
        bad("Atomic Response: MSN too high", (1, 2, 3), Ddp, "RFC 5041 section 7.1", |_| {
            one(unasked(2, 12).ulpdu())
        }),
        bad("a Send to the queue of Atomic Responses", (0, 2, 6), Ddp, "RFC 7306 figure 2", |_| {
            one(Untagged { qn: 3, ..Untagged::send(1, 8) }.ulpdu())
        }),
    ]
}

/// What is carried out, and what it leaves: each byte of the memory is 0x5A at first.
fn carried_out() -> Vec<Row> {
    let old = 0x5A5A_5A5A_5A5A_5A5A_u64;
    let with = |operation: u8, numbers: [u64; 4]| {
        move |v: &Victim| {
            let payload = request_bytes(operation, v.atomic.stag(), aligned(v), numbers);
            one(Untagged { payload, ..add(v, 0) }.ulpdu())
        }
    };
    vec![
        good(
            "FetchAdd: of zero, which asks whether there are atomics",
            "RFC 7306 section 1.1",
            |_| answer(1),
            with(FETCH_ADD, [0, 0, 0, u64::MAX]),
        ),
        good(
            "FetchAdd: all bits",
            "RFC 7306 section 5.1.1",
            |_| answer(1),
            with(FETCH_ADD, [0x0101_0101_0101_0101, 0, 0, u64::MAX]),
        )
        .written(LOCAL, 8),
        good(
            "FetchAdd: one of two fields",
            "RFC 7306 section 5.1.1",
            |_| answer(1),
            with(FETCH_ADD, [0x0000_0000_F0F0_F0F0, 0x8000_0000_8000_0000, 0, 0]),
        )
        .written(LOCAL, 4),
        good(
            "CmpSwap: equal",
            "RFC 7306 section 5.1.2",
            |_| answer(1),
            with(CMP_SWAP, [0, u64::MAX, old, u64::MAX]),
        )
        .written(LOCAL, 8),
        good(
            "CmpSwap: not equal",
            "RFC 7306 section 5.1.2",
            |_| answer(1),
            with(CMP_SWAP, [0, u64::MAX, old ^ 1, u64::MAX]),
        ),
        good(
            "CmpSwap: under masks",
            "RFC 7306 section 5.1.2",
            |_| answer(1),
            with(CMP_SWAP, [0, 0xFF, 0x5A00, 0xFF00]),
        )
        .written(LOCAL, 1),
    ]
}
