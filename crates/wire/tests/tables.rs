//! The opcode table and the error table, printed in the form of the RFCs.

use std::fmt::Write;

use uwarp_wire::rdmap::{OPCODES, Opcode};
use uwarp_wire::terminate::{ERRORS, TerminateError};

#[test]
fn opcode_table() {
    let mut table = String::new();
    for info in &OPCODES {
        let model = if info.tagged { "tagged".into() } else { format!("qn={:#x}", info.queue.unwrap()) };
        let mut marks = Vec::new();
        for (set, mark) in [(info.solicited, "solicited"), (info.invalidates, "invalidate")] {
            if set {
                marks.push(mark);
            }
        }
        let line = format!(
            "{:#x} {:10} {:13} header={:<2} {:8} {:14} {:12} {}",
            info.opcode.code(),
            info.name,
            model,
            info.header_len,
            info.rfc,
            format!("{:?}", info.delivery),
            info.right.map_or(String::new(), |right| format!("{right:?}")),
            marks.join(" ")
        );
        writeln!(table, "{}", line.trim_end()).unwrap();
    }
    insta::assert_snapshot!(table, @r"
    0x0 Write      tagged        header=0  RFC 5040 Region         RemoteWrite
    0x1 ReadReq    qn=0x1        header=28 RFC 5040 ReadRequest    RemoteRead
    0x2 ReadResp   tagged        header=0  RFC 5040 ReadSink       LocalWrite
    0x3 Send       qn=0x0        header=0  RFC 5040 Receive        LocalWrite
    0x4 SendInv    qn=0x0        header=0  RFC 5040 Receive        LocalWrite   invalidate
    0x5 SendSE     qn=0x0        header=0  RFC 5040 Receive        LocalWrite   solicited
    0x6 SendSEInv  qn=0x0        header=0  RFC 5040 Receive        LocalWrite   solicited invalidate
    0x7 Terminate  qn=0x2        header=4  RFC 5040 Terminate
    0x8 Imm        qn=0x0        header=8  RFC 7306 Immediate
    0x9 ImmSE      qn=0x0        header=8  RFC 7306 Immediate                   solicited
    0xa AtomicReq  qn=0x1        header=52 RFC 7306 AtomicRequest  RemoteAtomic
    0xb AtomicResp qn=0x3        header=12 RFC 7306 AtomicResponse LocalWrite
    0xf Ack        qn=0x75570000 header=8  uwarp    Acknowledge
    ");
}

#[test]
fn terminate_table() {
    let mut table = String::new();
    for (error, _, _) in &ERRORS {
        let includes = error.includes();
        let headers = match (includes.ddp, includes.rdmap) {
            (false, _) => "alone",
            (true, false) => "with ddp",
            (true, true) => "with ddp, rdmap",
        };
        writeln!(table, "{error} {headers}").unwrap();
    }
    insta::assert_snapshot!(table, @r"
    RDMAP: the end that terminates has failed (0/0/00) alone
    RDMAP: invalid STag (0/1/00) with ddp, rdmap
    RDMAP: base or bounds violation (0/1/01) with ddp, rdmap
    RDMAP: access rights violation (0/1/02) with ddp, rdmap
    RDMAP: STag not associated with the stream (0/1/03) with ddp, rdmap
    RDMAP: tagged offset wraps (0/1/04) with ddp, rdmap
    RDMAP: STag cannot be invalidated (0/1/09) with ddp, rdmap
    RDMAP: unspecified protection error (0/1/ff) with ddp, rdmap
    RDMAP: invalid RDMAP version (0/2/05) with ddp
    RDMAP: unexpected opcode (0/2/06) with ddp
    RDMAP: catastrophic error of this stream (0/2/07) with ddp
    RDMAP: catastrophic error of the whole RNIC (0/2/08) with ddp
    RDMAP: STag cannot be invalidated (0/2/09) with ddp
    RDMAP: unspecified operation error (0/2/ff) with ddp
    DDP: the peer's DDP layer failed (1/0/00) alone
    DDP: invalid STag (1/1/00) with ddp
    DDP: base or bounds violation (1/1/01) with ddp
    DDP: STag not associated with the stream (1/1/02) with ddp
    DDP: tagged offset wraps (1/1/03) with ddp
    DDP: invalid DDP version (1/1/04) with ddp
    DDP: invalid queue number (1/2/01) with ddp
    DDP: no receive buffer for the message (1/2/02) with ddp
    DDP: message sequence number out of range (1/2/03) with ddp
    DDP: invalid message offset (1/2/04) with ddp
    DDP: message longer than the receive buffer (1/2/05) with ddp
    DDP: invalid DDP version (1/2/06) with ddp
    MPA: TCP connection closed, terminated or lost (2/0/01) alone
    MPA: CRC mismatch (2/0/02) alone
    MPA: marker and ULPDU length disagree (2/0/03) alone
    MPA: invalid MPA request or reply frame (2/0/04) alone
    MPA: set-up failed at the peer (2/0/05) alone
    MPA: insufficient inbound read depth (2/0/06) alone
    MPA: no matching ready-to-receive option (2/0/07) alone
    ");
}

#[test]
fn opcodes_are_total_both_ways() {
    for code in 0..=u8::MAX {
        let opcode = Opcode::from_code(code);
        assert_eq!(opcode.code(), code & 0x0F);
        let of_no_stream = matches!(opcode, Opcode::WriteRecord | Opcode::Unknown(_));
        assert_eq!(of_no_stream, opcode.info().is_none());
        if let Some(info) = opcode.info() {
            assert_eq!(info.opcode, opcode);
            assert_eq!(info.tagged, info.queue.is_none());
        }
    }
}

#[test]
fn terminate_codes_are_total_both_ways() {
    for layer in 0..=u8::MAX {
        for etype in 0..=u8::MAX {
            for code in 0..=u8::MAX {
                let error = TerminateError::from_codes(layer, etype, code);
                let expected = (layer & 0x0F, etype & 0x0F, code);
                match error {
                    TerminateError::LocalCatastrophic => assert_eq!(error.codes(), (0, 0, 0)),
                    _ => assert_eq!(error.codes(), expected),
                }
            }
        }
    }
    for (error, codes, sentence) in &ERRORS {
        assert_eq!(error.codes(), *codes);
        assert_eq!(TerminateError::from_codes(codes.0, codes.1, codes.2), *error);
        assert!(error.to_string().contains(sentence));
    }
}
