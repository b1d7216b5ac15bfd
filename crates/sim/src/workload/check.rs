//! What must hold after a run.

use std::sync::Arc;

use uwarp_rnic::qp::{Disconnect, QpState};
use uwarp_rnic::{Access, EventKind, Mr, SendFlags, SendOp, Wc, WcFlags, WcOpcode, WcStatus};
use uwarp_wire::terminate::{Mpa, TerminateError};

use super::layout::{Built, Effect, Frozen, Layout, is_valid};
use super::{Abort, Kind, Plan, RECV_ID, Report};
use crate::Side;
use crate::net::Fault;

/// Nothing was wrong: everything is done, and done right.
pub(super) fn complete(plan: &Plan, layout: &Layout, report: &Report, sends: [usize; 2], recvs: [usize; 2]) {
    for side in Side::BOTH {
        let i = side.index();
        assert_eq!(sends[i], layout.sends[i].len(), "{side:?}: not all work requests could be posted");
        assert_eq!(recvs[i], layout.recvs[i].len(), "{side:?}: not all receives could be posted");
        let qpn = layout.qpns[i];
        let expected: Vec<Wc> = layout.sends[i]
            .iter()
            .enumerate()
            .filter(|(_, built)| is_signaled(plan, built))
            .map(|(n, built)| {
                let mut wc = Wc::new(n as u64, WcStatus::Success, opcode(plan, built), qpn);
                wc.byte_len = if built.own { layout.effects[built.index].len } else { 0 };
                wc
            })
            .collect();
        assert_eq!(report.sends[i], expected, "{side:?}: completions of sends");
        let expected: Vec<Wc> =
            layout.recvs[i].iter().enumerate().map(|(n, built)| received(layout, n, built, qpn)).collect();
        assert_eq!(report.recvs[i], expected, "{side:?}: completions of receives");
        same(&layout.arenas[i].snapshot(), &layout.model(side, layout.effects.iter()), side);
    }
    for effect in &layout.effects {
        if let Some(key) = effect.invalidates {
            assert!(!is_valid(key), "a key that was to be invalidated is valid");
        }
    }
    for window in layout.windows.iter().flatten() {
        assert_ne!(is_valid(window.key), window.invalidated, "a window is bound until it is invalidated");
    }
    windows_hold_their_regions(layout);
}

/// A region goes with its last window, not before.
fn windows_hold_their_regions(layout: &Layout) {
    for side in Side::BOTH {
        let arena = &layout.arenas[side.index()];
        for window in layout.windows[side.index()].iter().filter(|window| !window.invalidated) {
            let at = arena.addr(window.area.at);
            let holds = |mr: &&Arc<Mr>| {
                let (addr, len, _) = mr.range();
                mr.access().contains(Access::MW_BIND) && (addr..addr + len).contains(&at)
            };
            let region = layout.regions[side.index()].iter().find(holds).expect("it is bound to one");
            assert!(!region.deregister(), "{side:?}: a region with a window was deregistered");
        }
    }
}

/// RESET has taken them away.
pub(super) fn no_window_of_type_2(layout: &Layout, side: Side) {
    let left = layout.windows[side.index()].iter().any(|window| window.two && is_valid(window.key));
    assert!(!left, "{side:?}: a window of type 2 is there after RESET");
}

/// What only a window had made writable is what it was when that went.
pub(super) fn frozen(layout: &Layout, frozen: Option<Frozen>) {
    if let Some(Frozen { side, area, bytes }) = frozen {
        let found = layout.arenas[side.index()].read(area.at, area.len);
        assert!(found == bytes, "{side:?}: written through a window that is gone");
    }
}

/// Whether a success makes a completion.
fn is_signaled(plan: &Plan, built: &Built) -> bool {
    plan.sq_sig_all || built.flags.contains(SendFlags::SIGNALED)
}

fn received(layout: &Layout, n: usize, built: &Built, qpn: u32) -> Wc {
    let effect = &layout.effects[built.index];
    let mut wc = Wc::new(RECV_ID + n as u64, WcStatus::Success, WcOpcode::Recv, qpn);
    wc.byte_len = effect.len;
    if let Some(key) = effect.invalidates {
        wc.flags = WcFlags::WITH_INV;
        wc.imm_or_inv = key;
    }
    if let Some(imm) = effect.imm {
        wc.flags = WcFlags::WITH_IMM;
        wc.imm_or_inv = u32::from_ne_bytes(imm);
    }
    if let SendOp::WriteImmediate { .. } = built.op {
        wc.opcode = WcOpcode::RecvRdmaWithImm;
    }
    wc
}

fn opcode(plan: &Plan, built: &Built) -> WcOpcode {
    match built.op {
        SendOp::Bind(_) => WcOpcode::BindMw,
        _ if !built.own => WcOpcode::LocalInv,
        _ => opcode_of(plan.ops[built.index].kind),
    }
}

fn opcode_of(kind: Kind) -> WcOpcode {
    match kind {
        Kind::Send | Kind::SendInvalidate | Kind::SendImmediate => WcOpcode::Send,
        Kind::Write | Kind::WriteImmediate => WcOpcode::RdmaWrite,
        Kind::Read | Kind::ReadInvalidate => WcOpcode::RdmaRead,
        Kind::LocalInvalidate => WcOpcode::LocalInv,
        Kind::FetchAdd => WcOpcode::FetchAdd,
        Kind::CmpSwap | Kind::CmpSwapDiffers => WcOpcode::CompSwap,
    }
}

/// Compares without printing a megabyte.
fn same(found: &[u8], expected: &[u8], side: Side) {
    if let Some(at) = (0..expected.len()).find(|i| found.get(*i) != expected.get(*i)) {
        let count = (at..expected.len()).filter(|i| found.get(*i) != expected.get(*i)).count();
        panic!(
            "{side:?}: memory differs from the model in {count} bytes, first at {at}: found {:02x?}, \
             expected {:02x?}",
            &found[at..found.len().min(at + 16)],
            &expected[at..expected.len().min(at + 16)]
        );
    }
}

/// Everything is over: both streams are closed and nothing is owed.
pub(super) fn ended(plan: &Plan, layout: &Layout, report: &mut Report, sends: [usize; 2], recvs: [usize; 2]) {
    let disturbed = report.disturbed(plan);
    let damaged_without_crc = plan.damaged_without_crc();
    for side in Side::BOTH {
        let i = side.index();
        let reset = matches!(plan.abort, Some((_, Abort::Reset(s))) if s == side);
        let end = report.world.end(side);
        assert!(end.is_closed(), "{side:?}: the stream is not closed");
        assert_eq!(end.disconnected.len(), 1, "{side:?}: reports of the end: {:?}", end.disconnected);
        assert!(end.established <= 1);
        let state = end.core.query().state;
        // An aborted program may have asked for RESET after the stream had ended.
        assert!(state == QpState::Err || (reset && state == QpState::Reset), "{side:?}: {state:?}");
        if !disturbed {
            let last = plan.shared_recv.then_some(EventKind::QpLastWqeReached);
            assert_eq!(end.events.kinds(), last.as_slice(), "{side:?}: asynchronous events");
            let whys = [Disconnect::LocalClosed, Disconnect::PeerClosed];
            assert!(whys.contains(&end.disconnected[0]), "{side:?}: {:?}", end.disconnected);
        }
        if reset {
            continue;
        }
        once_each(plan, layout, &report.sends[i], side, sends[i]);
        let ids: Vec<u64> = report.recvs[i].iter().map(|wc| wc.wr_id).collect();
        // What nobody took stays in a shared queue.
        let completed = if plan.shared_recv { ids.len().min(recvs[i]) } else { recvs[i] };
        let all: Vec<u64> = (0..completed as u64).map(|n| RECV_ID + n).collect();
        assert_eq!(ids, all, "{side:?}: each receive completes once, in order");
        if damaged_without_crc {
            continue;
        }
        right(plan, layout, report, side);
    }
    if !damaged_without_crc {
        guards(layout);
    }
    corruption(plan, report);
}

/// Each work request completes at most once, in order; signalled ones and failed ones exactly once; none
/// succeeds behind a failed one.
fn once_each(plan: &Plan, layout: &Layout, found: &[Wc], side: Side, posted: usize) {
    let mut list = found.iter().peekable();
    let mut failed = false;
    for (n, built) in layout.sends[side.index()].iter().take(posted).enumerate() {
        let signaled = is_signaled(plan, built);
        let Some(wc) = list.next_if(|wc| wc.wr_id == n as u64) else {
            assert!(!signaled && !failed, "{side:?}: work request {n} did not complete, found {found:?}");
            continue;
        };
        if wc.status == WcStatus::Success {
            assert!(signaled, "{side:?}: unsignalled work request {n} completed");
            assert!(!failed, "{side:?}: work request {n} succeeded behind a failed one");
        }
        failed |= wc.status != WcStatus::Success;
    }
    assert!(list.next().is_none(), "{side:?}: completions out of order or too many: {found:?}");
}

/// What completed successfully is right.
fn right(plan: &Plan, layout: &Layout, report: &Report, side: Side) {
    let i = side.index();
    let qpn = layout.qpns[i];
    let mut failed = false;
    for (n, (wc, built)) in report.recvs[i].iter().zip(&layout.recvs[i]).enumerate() {
        if wc.status != WcStatus::Success {
            failed = true;
            continue;
        }
        assert!(!failed, "{side:?}: a receive succeeded behind a failed one");
        assert_eq!(*wc, received(layout, n, built, qpn));
        content(layout, &layout.effects[built.index], "received");
    }
    for wc in report.sends[i].iter().filter(|wc| wc.status == WcStatus::Success) {
        let built = &layout.sends[i][usize::try_from(wc.wr_id).expect("an index")];
        assert_eq!(wc.opcode, opcode(plan, built));
        if !built.own {
            continue;
        }
        let kind = plan.ops[built.index].kind;
        let placed = plan.stream.acks && (plan.stream.uwarp || plan.stream.params()[i].ord > 0);
        if kind.is_answered() || (placed && kind != Kind::LocalInvalidate) {
            content(layout, &layout.effects[built.index], "read, or placed at the peer");
        }
    }
}

fn content(layout: &Layout, effect: &Effect, what: &str) {
    let found = layout.found(effect);
    assert!(found == effect.data, "a successful completion with wrong data {what}: {} bytes", effect.len);
}

/// Nothing is written outside the buffers of the work requests.
fn guards(layout: &Layout) {
    for side in Side::BOTH {
        let i = side.index();
        let mut inside = vec![false; layout.initial[i].len()];
        for effect in &layout.effects {
            let word = effect.word.iter().map(|(area, _)| area).filter(|_| effect.side != side);
            let own = effect.areas.iter().filter(|_| effect.side == side);
            for area in own.chain(word) {
                inside[area.at..area.at + area.len].fill(true);
            }
        }
        let found = layout.arenas[i].snapshot();
        let bad = (0..found.len()).find(|n| !inside[*n] && found[*n] != layout.initial[i][*n]);
        assert_eq!(bad, None, "{side:?}: written outside every buffer");
    }
}

/// A flipped bit under CRC ends the stream with MPA's CRC error on both sides, unless it made an FPDU longer
/// than what came behind it, or something else ended the stream first.
fn corruption(plan: &Plan, report: &mut Report) {
    let flips: Vec<usize> = (0..2).filter(|i| matches!(plan.faults[*i], Some(Fault::Flip { .. }))).collect();
    let [from] = flips[..] else { return };
    let other_fault = plan.faults.iter().flatten().count() > 1 || plan.abort.is_some();
    if !plan.stream.crc || other_fault || !report.fault_hit {
        return;
    }
    let (sender, receiver) = (Side::BOTH[from], Side::BOTH[from].peer());
    let told = [sender, receiver].map(|side| report.world.end(side).disconnected.clone());
    let crc = TerminateError::Mpa(Mpa::Crc);
    let expected = [vec![Disconnect::Terminated(crc)], vec![Disconnect::Sent(crc)]];
    // The bit was one of a length: the receiver waited for the rest until the stream ended, or until the last
    // acknowledgement of the sender, which leaves, was taken for it.
    let lost = TerminateError::Mpa(Mpa::ConnectionLost);
    let cut = told[1] == [Disconnect::Sent(lost)];
    let late = told[0] == [Disconnect::LocalClosed] && told[1] == [Disconnect::Sent(crc)];
    assert!(told == expected || cut || late, "a flipped bit ended as {told:?}");
}
