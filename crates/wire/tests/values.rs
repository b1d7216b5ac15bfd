//! Every value of every field survives `emit` and `parse`.

use proptest::prelude::*;
use uwarp_wire::terminate::{ERRORS, Terminate, TerminateError};
use uwarp_wire::{datagram, ddp, mpa, rdmap};

prop_compose! {
    fn setup_frame()(reply: bool, flags: u8, revision: u8, private_data_len: u16) -> mpa::SetupFrame {
        let kind = if reply { mpa::FrameKind::Reply } else { mpa::FrameKind::Request };
        mpa::SetupFrame { kind, flags, revision, private_data_len }
    }
}

prop_compose! {
    fn enhanced()(
        ird in 0u16..=mpa::NO_AUTO, ord in 0u16..=mpa::NO_AUTO,
        a_p2p: bool, b_send_rtr: bool, c_write_rtr: bool, d_read_rtr: bool,
    ) -> mpa::Enhanced {
        mpa::Enhanced { ird, ord, a_p2p, b_send_rtr, c_write_rtr, d_read_rtr }
    }
}

fn ddp_header() -> impl Strategy<Value = ddp::Header> {
    prop_oneof![
        any::<(bool, u32, u64, u8)>().prop_map(|(last, stag, to, rsvdulp)| {
            ddp::Header::Tagged(ddp::Tagged { last, stag, to, rsvdulp })
        }),
        any::<(bool, u8, u32, u32, u32, u32)>().prop_map(|(last, rsvdulp, rsvdulp32, qn, msn, mo)| {
            ddp::Header::Untagged(ddp::Untagged { last, rsvdulp, rsvdulp32, qn, msn, mo })
        }),
    ]
}

prop_compose! {
    fn read_request()(
        sink_stag: u32,
        sink_to: u64,
        size: u32,
        source_stag: u32,
        source_to: u64,
    ) -> rdmap::ReadRequest {
        rdmap::ReadRequest { sink_stag, sink_to, size, source_stag, source_to }
    }
}

prop_compose! {
    fn atomic_request()(
        operation in (0u8..16).prop_map(rdmap::AtomicOp::from_code),
        request_id: u32, stag: u32, to: u64,
        add_swap_data: u64, add_swap_mask: u64, compare_data: u64, compare_mask: u64,
    ) -> rdmap::AtomicRequest {
        rdmap::AtomicRequest {
            operation, request_id, stag, to, add_swap_data, add_swap_mask, compare_data, compare_mask,
        }
    }
}

prop_compose! {
    fn extension_header()(
        flags: u8, source_qpn in 0u32..1 << 24, destination_qpn in 0u32..1 << 24,
        qkey: u32, immediate: u32, incarnation: u32,
    ) -> datagram::Header {
        datagram::Header { flags, source_qpn, destination_qpn, qkey, immediate, incarnation }
    }
}

proptest! {
    #[test]
    fn setup_frames(frame in setup_frame()) {
        prop_assert_eq!(mpa::SetupFrame::parse(&frame.to_bytes()), Ok(frame));
    }

    #[test]
    fn enhanced_data(enhanced in enhanced()) {
        prop_assert_eq!(mpa::Enhanced::parse(&enhanced.to_bytes()), Ok(enhanced));
    }

    #[test]
    fn markers(fpduptr in (0u16..=u16::MAX).prop_map(|pointer| pointer & !3)) {
        let marker = mpa::Marker { fpduptr };
        prop_assert_eq!(mpa::Marker::parse(&marker.to_bytes()), Ok(marker));
    }

    #[test]
    fn ddp_headers(header in ddp_header(), payload in prop::collection::vec(any::<u8>(), 0..8)) {
        let mut segment = vec![0; header.len()];
        prop_assert_eq!(header.emit(&mut segment), segment.len());
        segment.extend(payload);
        prop_assert_eq!(ddp::Header::parse(&segment), Ok((header, header.len())));
        for cut in 0..header.len() {
            prop_assert_eq!(ddp::Header::parse(&segment[..cut]), Err(ddp::Error::Truncated));
        }
    }

    #[test]
    fn rdmap_headers(
        read in read_request(), atomic in atomic_request(),
        request_id: u32, original: u64, data: [u8; 8], completed: u64,
    ) {
        prop_assert_eq!(rdmap::ReadRequest::parse(&read.to_bytes()), Ok(read));
        prop_assert_eq!(rdmap::AtomicRequest::parse(&atomic.to_bytes()), Ok(atomic));
        let response = rdmap::AtomicResponse { request_id, original };
        prop_assert_eq!(rdmap::AtomicResponse::parse(&response.to_bytes()), Ok(response));
        let immediate = rdmap::Immediate { data };
        prop_assert_eq!(rdmap::Immediate::parse(&immediate.to_bytes()), Ok(immediate));
        let ack = rdmap::Ack { completed };
        prop_assert_eq!(rdmap::Ack::parse(&ack.to_bytes()), Ok(ack));
    }

    #[test]
    fn extension_headers(header in extension_header()) {
        prop_assert_eq!(datagram::Header::parse(&header.to_bytes()), Ok(header));
    }

    /// The peer reads what `Terminate::new` built for an error in a segment.
    #[test]
    fn terminates(
        error in prop::sample::select(ERRORS.iter().map(|row| row.0).collect::<Vec<_>>()),
        header in ddp_header(), read in read_request(), is_read: bool, offending: bool, segment_len: u16,
    ) {
        let header = match header {
            ddp::Header::Untagged(untagged) if is_read => {
                let rsvdulp = rdmap::Control::new(rdmap::Opcode::ReadRequest).to_byte();
                ddp::Header::Untagged(ddp::Untagged { rsvdulp, ..untagged })
            }
            other => other,
        };
        let mut segment = vec![0; header.len()];
        header.emit(&mut segment);
        segment.extend(read.to_bytes());
        let sent = Terminate::new(error, offending.then_some((&segment[..], segment_len)));

        let mut wire = vec![0; sent.len()];
        prop_assert_eq!(sent.emit(&mut wire), wire.len());
        prop_assert!(wire.len() <= Terminate::MAX_LEN);
        let received = Terminate::parse(&wire);
        // Without an offending segment, a few errors have the same bytes as another error in siw's order.
        let ambiguous =
            matches!(error, TerminateError::RemoteProtection(_) | TerminateError::RemoteOperation(_));
        if offending || !ambiguous {
            prop_assert_eq!(received, Ok(sent));
        }
        prop_assert_eq!(sent.header.d, offending && error.includes().ddp);
    }
}
