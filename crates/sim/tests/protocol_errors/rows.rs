//! The table.

use uwarp_rnic::{Access, WcStatus};

use crate::encoder::{
    IMMEDIATE, Quotes, READ_REQUEST, READ_RESPONSE, SEND, SEND_INVALIDATE, TERMINATE, Tagged, Untagged,
    WRITE, fpdu, marked_fpdu, read_request,
};
use crate::row::{Answer, FLUSHED, Row, Script, bad, good, impatient, marked, uwarp};
use crate::victim::{BASE, PIECE, RECEIVES, REGION, SINK, Victim, WRITABLE};

/// One frame.
pub fn one(ulpdu: Vec<u8>) -> Script {
    Script { bytes: fpdu(&ulpdu), offending: ulpdu, end: false }
}

/// Several frames; the one with this number has the error.
pub fn some(ulpdus: &[Vec<u8>], offending: usize) -> Script {
    let bytes = ulpdus.iter().flat_map(|u| fpdu(u)).collect();
    Script { bytes, offending: ulpdus[offending].clone(), end: false }
}

fn write(stag: u32, to: u64, len: usize) -> Tagged {
    Tagged::new(WRITE, stag, to, len)
}

pub fn request(size: u32, stag: u32, to: u64) -> Untagged {
    Untagged::new(READ_REQUEST, 1, 1, read_request(size, stag, to))
}

pub fn response(v: &Victim, to: u64, len: usize) -> Tagged {
    Tagged::new(READ_RESPONSE, v.sink, to, len)
}

fn nothing(_: &Victim) -> Vec<u8> {
    vec![]
}

pub fn all() -> Vec<Row> {
    let mut rows = mpa();
    rows.extend(tagged());
    rows.extend(writes());
    rows.extend(untagged());
    rows.extend(untagged_segments());
    rows.extend(rdmap());
    rows.extend(read_requests());
    rows.extend(read_request_messages());
    rows.extend(read_responses());
    rows.extend(read_response_lengths());
    rows.extend(sends());
    rows.extend(immediates());
    rows.extend(terminates());
    rows.extend(crate::atomics::all());
    rows
}

fn mpa() -> Vec<Row> {
    use Quotes::Nothing;
    vec![
        bad("MPA: CRC is wrong", (2, 0, 2), Nothing, "RFC 5044 section 8, code 2", |v| {
            let mut script = one(write(v.writable.stag(), BASE, 8).ulpdu());
            let last = script.bytes.len() - 1;
            script.bytes[last] ^= 1;
            script
        }),
        bad(
            "MPA: a ULPDU of no bytes",
            (2, 0, 3),
            Nothing,
            "silent; no DDP code fits, the length field is wrong: MPA's code for FPDU start \
         and length, as Linux siw does",
            |_| one(vec![]),
        ),
        bad("MPA: a ULPDU shorter than a tagged header", (2, 0, 3), Nothing, "silent, as above", |v| {
            one(write(v.writable.stag(), BASE, 0).ulpdu()[..13].to_vec())
        }),
        bad("MPA: a ULPDU shorter than an untagged header", (2, 0, 3), Nothing, "silent, as above", |_| {
            one(Untagged::send(1, 0).ulpdu()[..17].to_vec())
        }),
        bad("MPA: the stream ends within an FPDU", (2, 0, 1), Nothing, "RFC 5044 section 8, code 1", |v| {
            let mut script = one(write(v.writable.stag(), BASE, 8).ulpdu());
            script.bytes.truncate(20);
            Script { end: true, ..script }
        }),
        bad("MPA: a marker that points elsewhere", (2, 0, 3), Nothing, "RFC 5044 section 8, code 3", |v| {
            let ulpdu = write(v.writable.stag(), BASE, 8).ulpdu();
            Script { bytes: marked_fpdu(&ulpdu, 8), offending: ulpdu, end: false }
        })
        .params(marked),
        good(
            "MPA: the reserved bits of a marker",
            "RFC 5044 section 4.3: the two lowest bits are ignored",
            nothing,
            |v| {
                let ulpdu = write(v.writable.stag(), BASE, 8).ulpdu();
                Script { bytes: marked_fpdu(&ulpdu, 3), offending: ulpdu, end: false }
            },
        )
        .params(marked)
        .written(WRITABLE, 8),
    ]
}

fn tagged() -> Vec<Row> {
    use Quotes::Ddp;
    let end = BASE + REGION as u64;
    vec![
        bad("DDP tagged: version 0", (1, 1, 4), Ddp, "RFC 5041 section 7.2", |v| {
            one(Tagged { ddp_version: 0, ..write(v.writable.stag(), BASE, 8) }.ulpdu())
        }),
        bad("DDP tagged: version 2", (1, 1, 4), Ddp, "RFC 5041 section 7.2", |v| {
            one(Tagged { ddp_version: 2, ..write(v.writable.stag(), BASE, 8) }.ulpdu())
        }),
        bad("DDP tagged: an STag that never was", (1, 1, 0), Ddp, "RFC 5041 section 7.1, tagged 1", |_| {
            one(write(0x1111_1111, BASE, 8).ulpdu())
        }),
        bad(
            "DDP tagged: the STag of a deregistered region",
            (1, 1, 0),
            Ddp,
            "RFC 5041 section 7.1, tagged 1",
            |v| one(write(v.dead, BASE, 8).ulpdu()),
        ),
        bad(
            "DDP tagged: an STag of another protection domain",
            (1, 1, 2),
            Ddp,
            "RFC 5041 section 7.1, tagged 1 and 8.2",
            |v| one(write(v.foreign.stag(), BASE, 8).ulpdu()),
        ),
        bad(
            "DDP tagged: a byte beyond the region",
            (1, 1, 1),
            Ddp,
            "RFC 5041 section 7.1, tagged 4",
            move |v| one(write(v.writable.stag(), end - 7, 8).ulpdu()),
        ),
        bad("DDP tagged: behind the region", (1, 1, 1), Ddp, "RFC 5041 section 7.1, tagged 3", move |v| {
            one(write(v.writable.stag(), end + 100, 8).ulpdu())
        }),
        bad("DDP tagged: before the region", (1, 1, 1), Ddp, "RFC 5041 section 7.1, tagged 3", |v| {
            one(write(v.writable.stag(), BASE - 1, 8).ulpdu())
        }),
        bad("DDP tagged: TO and length wrap", (1, 1, 3), Ddp, "RFC 5041 section 7.1, tagged 5", |v| {
            one(write(v.writable.stag(), u64::MAX - 3, 8).ulpdu())
        }),
    ]
}

fn writes() -> Vec<Row> {
    use Quotes::Ddp;
    let end = BASE + REGION as u64;
    vec![
        bad(
            "RDMA Write: no right to write the region",
            (0, 1, 2),
            Ddp,
            "silent: DDP has no code for rights, and figure 10 allows RDMAP's only for Read Requests and \
             invalidation; RDMAP's says what is wrong",
            |v| one(write(v.readable.stag(), BASE, 8).ulpdu()),
        ),
        bad("RDMA Write: a region without remote rights", (0, 1, 2), Ddp, "silent, as above", |v| {
            one(write(v.local.stag(), BASE, 8).ulpdu())
        }),
        Row {
            access: Access::REMOTE_READ,
            ..bad("RDMA Write: the queue pair grants no writes", (0, 1, 2), Ddp, "silent, as above", |v| {
                one(write(v.writable.stag(), BASE, 8).ulpdu())
            })
        },
        bad(
            "RDMA Write: the second segment leaves the region",
            (1, 1, 1),
            Ddp,
            "RFC 5041 section 7.1, tagged 4",
            move |v| {
                let first = Tagged { last: false, ..write(v.writable.stag(), end - 8, 8) };
                some(&[first.ulpdu(), write(v.writable.stag(), end, 8).ulpdu()], 1)
            },
        )
        .written(WRITABLE + REGION - 8, 8),
        good(
            "RDMA Write: no bytes to an STag that never was",
            "RFC 5041 section 5.2: not to be checked",
            nothing,
            |_| one(write(0x1111_1111, u64::MAX, 0).ulpdu()),
        ),
        bad(
            "first of two errors: nothing behind it is looked at",
            (1, 1, 0),
            Ddp,
            "RFC 5040 section 7.1, case 4",
            |v| {
                let good = write(v.writable.stag(), BASE, 8).ulpdu();
                some(&[write(0x1111_1111, BASE, 8).ulpdu(), good, Untagged::send(7, 8).ulpdu()], 0)
            },
        ),
    ]
}

fn untagged() -> Vec<Row> {
    use Quotes::Ddp;
    vec![
        bad("DDP untagged: version 0", (1, 2, 6), Ddp, "RFC 5041 section 7.2", |_| {
            one(Untagged { ddp_version: 0, ..Untagged::send(1, 8) }.ulpdu())
        }),
        bad("DDP untagged: version 3", (1, 2, 6), Ddp, "RFC 5041 section 7.2", |_| {
            one(Untagged { ddp_version: 3, ..Untagged::send(1, 8) }.ulpdu())
        }),
        bad("DDP untagged: queue 4", (1, 2, 1), Ddp, "RFC 5041 section 7.1, untagged 1", |_| {
            one(Untagged { qn: 4, ..Untagged::send(1, 8) }.ulpdu())
        }),
        bad("DDP untagged: queue 2^32-1", (1, 2, 1), Ddp, "RFC 5041 section 7.1, untagged 1", |_| {
            one(Untagged { qn: u32::MAX, ..Untagged::send(1, 8) }.ulpdu())
        }),
        bad(
            "DDP untagged: MSN too high",
            (1, 2, 3),
            Ddp,
            "RFC 5041 section 7.1, untagged 5; TCP keeps order, so one MSN is legal",
            |_| one(Untagged::send(2, 8).ulpdu()),
        ),
        bad("DDP untagged: MSN 0", (1, 2, 3), Ddp, "RFC 5041 section 7.1, untagged 5", |_| {
            one(Untagged::send(0, 8).ulpdu())
        }),
        bad(
            "DDP untagged: MSN of a message that is complete",
            (1, 2, 3),
            Ddp,
            "RFC 5041 section 7.1, untagged 5",
            |_| some(&[Untagged::send(1, 8).ulpdu(), Untagged::send(1, 8).ulpdu()], 1),
        )
        .recvs(&[(100, WcStatus::Success), (101, FLUSHED)])
        .written(RECEIVES, 8),
        bad(
            "DDP untagged: MSN of a Read Request too high",
            (1, 2, 3),
            Ddp,
            "RFC 5041 section 7.1, untagged 5",
            |v| one(Untagged { msn: 2, ..request(8, v.readable.stag(), BASE) }.ulpdu()),
        ),
    ]
}

fn untagged_segments() -> Vec<Row> {
    use Quotes::Ddp;
    vec![
        bad(
            "DDP untagged: first segment with an offset",
            (1, 2, 4),
            Ddp,
            "RFC 5041 section 7.1, untagged 3",
            |_| one(Untagged { mo: 4, ..Untagged::send(1, 8) }.ulpdu()),
        ),
        bad(
            "DDP untagged: a gap between segments",
            (1, 2, 4),
            Ddp,
            "RFC 5041 section 7.1, untagged 3; TCP keeps order",
            |_| {
                let first = Untagged { last: false, ..Untagged::send(1, 8) };
                some(&[first.ulpdu(), Untagged { mo: 12, ..Untagged::send(1, 8) }.ulpdu()], 1)
            },
        )
        .written(RECEIVES, 8),
        bad(
            "DDP untagged: segments overlap",
            (1, 2, 4),
            Ddp,
            "RFC 5041 section 7.1, untagged 3; TCP keeps order",
            |_| {
                let first = Untagged { last: false, ..Untagged::send(1, 8) };
                some(&[first.ulpdu(), Untagged { mo: 4, ..Untagged::send(1, 8) }.ulpdu()], 1)
            },
        )
        .written(RECEIVES, 8),
        bad(
            "DDP untagged: a byte too long for the receive",
            (1, 2, 5),
            Ddp,
            "RFC 5041 section 7.1, untagged 4",
            |_| one(Untagged::send(1, PIECE + 1).ulpdu()),
        )
        .recvs(&[(100, WcStatus::LocLenErr), (101, FLUSHED)]),
        bad(
            "DDP untagged: the second segment is too long for the receive",
            (1, 2, 5),
            Ddp,
            "RFC 5041 section 7.1, untagged 4",
            |_| {
                let first = Untagged { last: false, ..Untagged::send(1, PIECE) };
                some(&[first.ulpdu(), Untagged { mo: PIECE as u32, ..Untagged::send(1, 1) }.ulpdu()], 1)
            },
        )
        .recvs(&[(100, WcStatus::LocLenErr), (101, FLUSHED)])
        .written(RECEIVES, PIECE),
        bad(
            "DDP untagged: no receive in time",
            (1, 2, 2),
            Ddp,
            "RFC 5041 section 7.1, untagged 2; how long to wait is ours to say",
            |_| {
                let sends: Vec<_> = (1..=3).map(|n| Untagged::send(n, PIECE).ulpdu()).collect();
                some(&sends, 2)
            },
        )
        .params(impatient)
        .recvs(&[(100, WcStatus::Success), (101, WcStatus::Success)])
        .written(RECEIVES, 2 * PIECE),
    ]
}

fn rdmap() -> Vec<Row> {
    use Quotes::Ddp;
    vec![
        bad(
            "RDMAP: version 0, untagged",
            (0, 2, 5),
            Ddp,
            "RFC 5040 section 7.2; 0 is the Consortium's, which goes with MPA revision 0 only",
            |_| one(Untagged { rdmap_version: 0, ..Untagged::send(1, 8) }.ulpdu()),
        ),
        bad("RDMAP: version 2, untagged", (0, 2, 5), Ddp, "RFC 5040 section 7.2", |_| {
            one(Untagged { rdmap_version: 2, ..Untagged::send(1, 8) }.ulpdu())
        }),
        bad("RDMAP: version 3, tagged", (0, 2, 5), Ddp, "RFC 5040 section 7.2", |v| {
            one(Tagged { rdmap_version: 3, ..write(v.writable.stag(), BASE, 8) }.ulpdu())
        }),
        bad("RDMAP: unknown opcode, untagged", (0, 2, 6), Ddp, "RFC 5040 section 7.2", |_| {
            one(Untagged { opcode: 0xD, ..Untagged::send(1, 8) }.ulpdu())
        }),
        bad("RDMAP: unknown opcode, tagged", (0, 2, 6), Ddp, "RFC 5040 section 7.2", |v| {
            one(Tagged { opcode: 0xE, ..write(v.writable.stag(), BASE, 8) }.ulpdu())
        }),
        bad("RDMAP: Send in a tagged segment", (0, 2, 6), Ddp, "RFC 5040 figure 4", |v| {
            one(Tagged { opcode: SEND, ..write(v.writable.stag(), BASE, 8) }.ulpdu())
        }),
        bad("RDMAP: Read Request in a tagged segment", (0, 2, 6), Ddp, "RFC 5040 figure 4", |v| {
            one(Tagged { opcode: READ_REQUEST, ..write(v.writable.stag(), BASE, 28) }.ulpdu())
        }),
        bad("RDMAP: Write in an untagged segment", (0, 2, 6), Ddp, "RFC 5040 figure 4", |_| {
            one(Untagged { opcode: WRITE, ..Untagged::send(1, 8) }.ulpdu())
        }),
        bad("RDMAP: Read Response in an untagged segment", (0, 2, 6), Ddp, "RFC 5040 figure 4", |_| {
            one(Untagged { opcode: READ_RESPONSE, ..Untagged::send(1, 8) }.ulpdu())
        }),
        bad(
            "RDMAP: Send to the queue of Read Requests",
            (0, 2, 6),
            Ddp,
            "RFC 5040 figure 4; silent which layer tells",
            |_| one(Untagged { qn: 1, ..Untagged::send(1, 8) }.ulpdu()),
        ),
        bad("RDMAP: Read Request to the queue of Sends", (0, 2, 6), Ddp, "as above", |v| {
            one(Untagged { qn: 0, ..request(8, v.readable.stag(), BASE) }.ulpdu())
        }),
        bad("RDMAP: Terminate to the queue of Sends", (0, 2, 6), Ddp, "as above", |_| {
            one(Untagged::new(TERMINATE, 0, 1, vec![0x20, 2, 0, 0]).ulpdu())
        }),
        bad("RDMAP: Send to the queue of Terminates", (0, 2, 6), Ddp, "as above", |_| {
            one(Untagged { qn: 2, ..Untagged::send(1, 8) }.ulpdu())
        }),
        bad(
            "RDMAP: another opcode in the middle of a message",
            (0, 2, 6),
            Ddp,
            "silent; a message has one opcode",
            |_| {
                let first = Untagged { last: false, ..Untagged::send(1, 8) };
                let second = Untagged { opcode: 5, mo: 8, ..Untagged::send(1, 8) };
                some(&[first.ulpdu(), second.ulpdu()], 1)
            },
        )
        .written(RECEIVES, 8),
        bad(
            "RDMAP: our own acknowledgement from a stranger",
            (1, 2, 1),
            Ddp,
            "its queue does not exist",
            |_| one(Untagged::new(0xF, 0x7557_0000, 1, vec![0; 8]).ulpdu()),
        ),
        bad("uwarp: acknowledgement of what was not sent", (0, 2, 0xFF), Ddp, "ours", |_| {
            one(Untagged::new(0xF, 0x7557_0000, 1, vec![0, 0, 0, 0, 0, 0, 0, 1]).ulpdu())
        })
        .params(uwarp),
        bad("uwarp: acknowledgement cut short", (0, 2, 0xFF), Ddp, "ours", |_| {
            one(Untagged::new(0xF, 0x7557_0000, 1, vec![0; 7]).ulpdu())
        })
        .params(uwarp),
    ]
}

fn read_requests() -> Vec<Row> {
    use Quotes::Rdmap;
    let end = BASE + REGION as u64;
    vec![
        bad(
            "Read Request: an STag that never was",
            (0, 1, 0),
            Rdmap,
            "RFC 5040 section 7.2, request 4a",
            |_| one(request(8, 0x1111_1111, BASE).ulpdu()),
        ),
        bad(
            "Read Request: the STag of a deregistered region",
            (0, 1, 0),
            Rdmap,
            "RFC 5040 section 7.2, request 4a",
            |v| one(request(8, v.dead, BASE).ulpdu()),
        ),
        bad(
            "Read Request: an STag of another protection domain",
            (0, 1, 3),
            Rdmap,
            "RFC 5040 section 7.2, request 4b",
            |v| one(request(8, v.foreign.stag(), BASE).ulpdu()),
        ),
        bad("Read Request: before the region", (0, 1, 1), Rdmap, "RFC 5040 section 7.2, request 4c", |v| {
            one(request(8, v.readable.stag(), BASE - 1).ulpdu())
        }),
        bad(
            "Read Request: a byte beyond the region",
            (0, 1, 1),
            Rdmap,
            "RFC 5040 section 7.2, request 4d",
            move |v| one(request(8, v.readable.stag(), end - 7).ulpdu()),
        ),
        bad("Read Request: 4 GiB less a byte", (0, 1, 1), Rdmap, "RFC 5040 section 7.2, request 4d", |v| {
            one(request(u32::MAX, v.readable.stag(), BASE).ulpdu())
        }),
        bad(
            "Read Request: source offset and size wrap",
            (0, 1, 4),
            Rdmap,
            "RFC 5040 section 7.2, request 4e",
            |v| one(request(8, v.readable.stag(), u64::MAX - 3).ulpdu()),
        ),
        bad(
            "Read Request: sink offset and size wrap",
            (0, 1, 4),
            Rdmap,
            "silent; the response could not be sent",
            |v| {
                let mut bad = request(8, v.readable.stag(), BASE);
                bad.payload[4..12].copy_from_slice(&(u64::MAX - 3).to_be_bytes());
                one(bad.ulpdu())
            },
        ),
    ]
}

fn read_request_messages() -> Vec<Row> {
    use Quotes::{Ddp, Rdmap};
    vec![
        bad("Read Request: no right to read the region", (0, 1, 2), Rdmap, "RFC 5040 section 4.8", |v| {
            one(request(8, v.writable.stag(), BASE).ulpdu())
        }),
        Row {
            access: Access::REMOTE_WRITE,
            ..bad(
                "Read Request: the queue pair grants no reads",
                (0, 1, 2),
                Rdmap,
                "RFC 5040 section 4.8",
                |v| one(request(8, v.readable.stag(), BASE).ulpdu()),
            )
        },
        bad("Read Request: a byte too short", (0, 2, 0xFF), Ddp, "silent", |v| {
            let mut bad = request(8, v.readable.stag(), BASE);
            bad.payload.pop();
            one(bad.ulpdu())
        }),
        bad(
            "Read Request: a byte too long",
            (1, 2, 5),
            Ddp,
            "RFC 5041 section 7.1, untagged 4: its buffer has 28 bytes",
            |v| {
                let mut bad = request(8, v.readable.stag(), BASE);
                bad.payload.push(0);
                one(bad.ulpdu())
            },
        ),
        bad(
            "Read Request: in two segments",
            (0, 2, 0xFF),
            Ddp,
            "silent; 28 bytes fit any MULPDU (RFC 5044 section 4.1)",
            |v| one(Untagged { last: false, ..request(8, v.readable.stag(), BASE) }.ulpdu()),
        ),
        bad(
            "Read Request: more at once than the read depth",
            (1, 2, 2),
            Ddp,
            "RFC 5041 section 7.1, untagged 2: no buffer",
            |v| {
                let first = request(8, v.readable.stag(), BASE);
                some(&[first.ulpdu(), Untagged { msn: 2, ..first }.ulpdu()], 1)
            },
        )
        .at_once(),
        good(
            "Read Request: no bytes from an STag that never was",
            "RFC 5040 section 5.2.1: not to be checked",
            |_| fpdu(&Tagged::new(READ_RESPONSE, 0xAABB_CCDD, 0x40, 0).ulpdu()),
            |_| one(request(0, 0x1111_1111, u64::MAX).ulpdu()),
        ),
    ]
}

fn read_responses() -> Vec<Row> {
    use Quotes::Ddp;
    let done = |v: &Victim| response(v, 0, PIECE).ulpdu();
    let first_done: &[(u64, WcStatus)] = &[(1, WcStatus::Success), (2, FLUSHED)];
    vec![
        bad(
            "Read Response: an STag that never was",
            (1, 1, 0),
            Ddp,
            "RFC 5041 section 7.1, tagged 1",
            |_| one(Tagged::new(READ_RESPONSE, 0x1111_1111, 0, PIECE).ulpdu()),
        ),
        bad(
            "Read Response: the STag of a region",
            (1, 1, 0),
            Ddp,
            "RFC 5041 section 7.1, tagged 1; only the sink's is valid here",
            |v| one(Tagged::new(READ_RESPONSE, v.writable.stag(), BASE, PIECE).ulpdu()),
        ),
        bad(
            "RDMA Write: the STag of a Read's sink",
            (1, 1, 0),
            Ddp,
            "RFC 5041 section 7.1, tagged 1; a sink is no region",
            |v| one(write(v.sink, 0, PIECE).ulpdu()),
        ),
        bad(
            "Read Response: one more than was asked for",
            (1, 1, 0),
            Ddp,
            "RFC 5041 section 7.1, tagged 1; the sink is gone",
            move |v| {
                let again = done(v);
                some(&[done(v), again], 1)
            },
        )
        .sends(first_done)
        .written(SINK, PIECE)
        .at_once(),
        bad(
            "Read Response: not at the beginning",
            (1, 1, 1),
            Ddp,
            "RFC 5041 section 7.1, tagged 3; order is kept",
            |v| one(response(v, 4, PIECE - 4).ulpdu()),
        ),
    ]
}

fn read_response_lengths() -> Vec<Row> {
    use Quotes::Ddp;
    let done = |v: &Victim| response(v, 0, PIECE).ulpdu();
    vec![
        bad("Read Response: a byte too long", (1, 1, 1), Ddp, "RFC 5041 section 7.1, tagged 4", |v| {
            one(response(v, 0, PIECE + 1).ulpdu())
        }),
        bad(
            "Read Response: the second segment is too long",
            (1, 1, 1),
            Ddp,
            "RFC 5041 section 7.1, tagged 4",
            |v| {
                let first = Tagged { last: false, ..response(v, 0, 32) };
                some(&[first.ulpdu(), response(v, 32, 33).ulpdu()], 1)
            },
        )
        .written(SINK, 32),
        bad(
            "Read Response: ends a byte too soon",
            (1, 1, 1),
            Ddp,
            "silent; section 5.2.2 lets the sink compare lengths",
            |v| one(response(v, 0, PIECE - 1).ulpdu()),
        ),
        bad("Read Response: ends without a byte", (1, 1, 1), Ddp, "silent, as above", |v| {
            one(response(v, 0, 0).ulpdu())
        }),
        bad("Read Response: a gap between segments", (1, 1, 1), Ddp, "silent; TCP keeps order", |v| {
            let first = Tagged { last: false, ..response(v, 0, 32) };
            some(&[first.ulpdu(), response(v, 36, 28).ulpdu()], 1)
        })
        .written(SINK, 32),
        bad(
            "Read Response: no bytes, and nobody asked",
            (0, 2, 6),
            Ddp,
            "silent; its STag is not to be checked",
            |_| one(Tagged::new(READ_RESPONSE, 0, 0, 0).ulpdu()),
        )
        .before(finish_reads)
        .sends(&[])
        .recvs(&[(100, FLUSHED), (101, FLUSHED)])
        .written(SINK, 2 * PIECE),
        bad(
            "Read Response: the program took its sink's region back",
            (0, 0, 0),
            Quotes::Nothing,
            "RFC 5040 section 7.1, case 1: ours, so nothing is quoted",
            move |v| one(done(v)),
        )
        .before(|v| _ = v.own.deregister())
        .sends(&[(1, WcStatus::LocProtErr), (2, FLUSHED)]),
    ]
}

/// Answers both Reads as it should be.
fn finish_reads(v: &mut Victim) {
    use uwarp_sim::Side::B;
    v.world.inject(B, &fpdu(&response(v, 0, PIECE).ulpdu()));
    v.world.settle_for(100_000);
    let sent = v.sent();
    let second = &sent[Victim::request_len()..];
    v.sink = u32::from_be_bytes(second[20..24].try_into().unwrap());
    v.world.inject(B, &fpdu(&response(v, 0, PIECE).ulpdu()));
    v.world.settle_for(100_000);
    assert_eq!(v.world.end(B).sends().len(), 2);
    v.forget_sent();
}

fn sends() -> Vec<Row> {
    use Quotes::Ddp;
    let invalidate = |stag| Untagged { opcode: SEND_INVALIDATE, invalidate: stag, ..Untagged::send(1, 8) };
    vec![
        bad(
            "Send with Invalidate: an STag that never was",
            (0, 1, 9),
            Ddp,
            "RFC 5040 section 5.3; silent whether type 1 or 2: \
            figure 10 names type 1",
            move |_| one(invalidate(0x1111_1111).ulpdu()),
        )
        .written(RECEIVES, 8),
        bad(
            "Send with Invalidate: an STag of another protection domain",
            (0, 1, 9),
            Ddp,
            "RFC 5040 section 5.3",
            move |v| one(invalidate(v.foreign.stag()).ulpdu()),
        )
        .written(RECEIVES, 8),
        bad(
            "Send with Invalidate: a region without remote rights",
            (0, 1, 9),
            Ddp,
            "silent; it was never advertised",
            move |v| one(invalidate(v.local.stag()).ulpdu()),
        )
        .written(RECEIVES, 8),
        bad(
            "Send: the program took its receive's region back",
            (1, 0, 0),
            Quotes::Nothing,
            "RFC 5041 section 7.2: ours, so nothing is quoted",
            |_| one(Untagged::send(1, 8).ulpdu()),
        )
        .before(|v| _ = v.own.deregister())
        .recvs(&[(100, WcStatus::LocProtErr), (101, FLUSHED)]),
    ]
}

fn immediates() -> Vec<Row> {
    use Quotes::Ddp;
    let received: &[(u64, WcStatus)] = &[(100, WcStatus::Success)];
    vec![
        good(
            "Immediate Data: without a Write before it",
            "RFC 7306 section 6: causes a completion",
            nothing,
            |_| one(Untagged::immediate(1, 8).ulpdu()),
        )
        .recvs(received),
        good(
            "Immediate Data: behind a Write, before a Send in the same numbering",
            "RFC 7306 section 6.3: queue 0; it leaves the receive's memory alone",
            nothing,
            |v| {
                let write = write(v.writable.stag(), BASE, 8).ulpdu();
                some(&[write, Untagged::immediate(1, 8).ulpdu(), Untagged::send(2, 4).ulpdu()], 1)
            },
        )
        .recvs(&[(100, WcStatus::Success), (101, WcStatus::Success)])
        .written_at(&[(WRITABLE, 8), (RECEIVES + PIECE, 4)]),
        bad(
            "Immediate Data: a byte too short",
            (0, 2, 0xFF),
            Ddp,
            "RFC 7306 section 6.3: exactly 8 bytes; silent which code",
            |_| one(Untagged::immediate(1, 7).ulpdu()),
        ),
        bad(
            "Immediate Data: a byte too long",
            (1, 2, 5),
            Ddp,
            "RFC 7306 section 6.3, RFC 5041 section 7.1, untagged 4: its buffer has 8 bytes",
            |_| one(Untagged::immediate(1, 9).ulpdu()),
        ),
        bad("Immediate Data: in two segments", (0, 2, 0xFF), Ddp, "silent; 8 bytes fit any MULPDU", |_| {
            let half = Untagged { last: false, ..Untagged::immediate(1, 4) };
            one(half.ulpdu())
        }),
        bad(
            "Immediate Data: to the queue of Read Requests",
            (0, 2, 6),
            Ddp,
            "RFC 7306 section 6.3: queue 0; silent which layer tells",
            |_| one(Untagged { qn: 1, ..Untagged::immediate(1, 8) }.ulpdu()),
        ),
        bad("Immediate Data: in a tagged segment", (0, 2, 6), Ddp, "RFC 7306 section 6.3: untagged", |v| {
            one(Tagged { opcode: IMMEDIATE, ..write(v.writable.stag(), BASE, 8) }.ulpdu())
        }),
        bad(
            "Immediate Data: MSN too high",
            (1, 2, 3),
            Ddp,
            "RFC 7306 section 8.2: DDP checks its fields; RFC 5041 section 7.1, untagged 5",
            |_| one(Untagged::immediate(2, 8).ulpdu()),
        ),
        bad(
            "Immediate Data: no receive in time",
            (1, 2, 2),
            Ddp,
            "RFC 7306 section 6.3: takes one; RFC 5041 section 7.1, untagged 2",
            |_| {
                let all: Vec<_> = (1..=3).map(|n| Untagged::immediate(n, 8).ulpdu()).collect();
                some(&all, 2)
            },
        )
        .params(impatient)
        .recvs(&[(100, WcStatus::Success), (101, WcStatus::Success)]),
        good(
            "Send: the bit of our immediate data from a stranger",
            "RFC 5040 section 4.1: reserved bits are not checked",
            nothing,
            |_| one(Untagged { rdmap_version: 1, opcode: SEND | 0x20, ..Untagged::send(1, 8) }.ulpdu()),
        )
        .recvs(received)
        .written(RECEIVES, 8),
    ]
}

fn terminates() -> Vec<Row> {
    use Quotes::Ddp;
    let terminated = |name, rule, status, message: Vec<u8>| Row {
        answer: Answer::Bytes(nothing),
        ..bad(name, (2, 0, 0), Quotes::Nothing, rule, move |_| {
            one(Untagged::new(TERMINATE, 2, 1, message.clone()).ulpdu())
        })
        .sends(&[(1, status), (2, FLUSHED)])
    };
    let mut read_refused = vec![0x01, 0x02, 0xE0, 0, 0, 46];
    read_refused.extend(request(64, 0x1234, 0).ulpdu());
    // Without the header it has to bring it would be read as Linux siw's.
    let mut opcode_refused = vec![0x02, 0x06, 0xC0, 0, 0, 46];
    opcode_refused.extend(&request(64, 0x1234, 0).ulpdu()[..18]);
    vec![
        terminated(
            "Terminate: CRC",
            "RFC 5040 section 5.4: no answer",
            WcStatus::FatalErr,
            vec![0x20, 2, 0, 0],
        ),
        terminated(
            "Terminate: refuses Read 1",
            "the Read that is quoted is the one that failed",
            WcStatus::RemAccessErr,
            read_refused,
        ),
        terminated(
            "Terminate: a message too long for its receive",
            "silent; verbs' remote invalid request",
            WcStatus::RemInvReqErr,
            vec![0x12, 5, 0, 0],
        ),
        terminated(
            "Terminate: an opcode where it does not belong",
            "silent; verbs' remote invalid request",
            WcStatus::RemInvReqErr,
            opcode_refused,
        ),
        terminated(
            "Terminate: an MSN out of order",
            "silent; verbs' bad response",
            WcStatus::BadRespErr,
            vec![0x12, 3, 0, 0],
        ),
        terminated(
            "Terminate: no receive",
            "silent; verbs' receiver not ready",
            WcStatus::RnrRetryExcErr,
            vec![0x12, 2, 0, 0],
        ),
        terminated(
            "Terminate: an error nobody knows",
            "RFC 5040 section 4.8",
            WcStatus::FatalErr,
            vec![0xF7, 0x99, 0, 0],
        ),
        terminated(
            "Terminate: cut short",
            "silent; the stream is over all the same",
            WcStatus::RemOpErr,
            vec![0x20, 2, 0],
        ),
        bad("Terminate: MSN 2", (1, 2, 3), Ddp, "RFC 5041 section 7.1, untagged 5", |_| {
            one(Untagged::new(TERMINATE, 2, 2, vec![0x20, 2, 0, 0]).ulpdu())
        }),
    ]
}
