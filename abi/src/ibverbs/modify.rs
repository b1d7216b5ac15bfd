//! `ibv_modify_qp`: attribute masks and their rules, from ibv_modify_qp(3) and the tables of the InfiniBand
//! specification it stands for (volume 1, table 91).

use uwarp_abi_types::verbs::*;
use uwarp_driver::Limits;
use uwarp_rnic::Access;
use uwarp_rnic::qp::{QpModify, QpState};

use super::view::{self, PORT};
use crate::failure::Failure;

/// Every attribute an RC queue pair has.
const RC: u32 = IBV_QP_STATE
    | IBV_QP_CUR_STATE
    | IBV_QP_EN_SQD_ASYNC_NOTIFY
    | IBV_QP_ACCESS_FLAGS
    | IBV_QP_PKEY_INDEX
    | IBV_QP_PORT
    | IBV_QP_AV
    | IBV_QP_PATH_MTU
    | IBV_QP_TIMEOUT
    | IBV_QP_RETRY_CNT
    | IBV_QP_RNR_RETRY
    | IBV_QP_RQ_PSN
    | IBV_QP_MAX_QP_RD_ATOMIC
    | IBV_QP_ALT_PATH
    | IBV_QP_MIN_RNR_TIMER
    | IBV_QP_SQ_PSN
    | IBV_QP_MAX_DEST_RD_ATOMIC
    | IBV_QP_PATH_MIG_STATE
    | IBV_QP_DEST_QPN;

/// Required and optional attributes of a transition of an RC queue pair, beside the state itself.
/// `None`: there is no such transition.
fn transition(from: QpState, to: QpState) -> Option<(u32, u32)> {
    use QpState::{Err, Init, Reset, Rtr, Rts, Sqd};
    let path = IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE;
    Some(match (from, to) {
        (_, Reset | Err) => (0, 0),
        (Reset, Init) => (IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0),
        (Init, Init) => (0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
        (Init, Rtr) => (
            IBV_QP_AV
                | IBV_QP_PATH_MTU
                | IBV_QP_DEST_QPN
                | IBV_QP_RQ_PSN
                | IBV_QP_MAX_DEST_RD_ATOMIC
                | IBV_QP_MIN_RNR_TIMER,
            IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX,
        ),
        (Rtr, Rts) => (
            IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
            IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | path,
        ),
        (Rts | Sqd, Rts) => (0, IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | path),
        (Rts, Sqd) => (0, IBV_QP_CUR_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY),
        (Sqd, Sqd) => (
            0,
            IBV_QP_PORT
                | IBV_QP_AV
                | IBV_QP_TIMEOUT
                | IBV_QP_RETRY_CNT
                | IBV_QP_RNR_RETRY
                | IBV_QP_MAX_QP_RD_ATOMIC
                | IBV_QP_MAX_DEST_RD_ATOMIC
                | IBV_QP_PKEY_INDEX
                | IBV_QP_ACCESS_FLAGS
                | IBV_QP_MIN_RNR_TIMER
                | path,
        ),
        _ => return None,
    })
}

/// Required and optional attributes of a transition of a UD queue pair, beside the state itself.
fn ud_transition(from: QpState, to: QpState) -> Option<(u32, u32)> {
    use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
    Some(match (from, to) {
        (_, Reset | Err) => (0, 0),
        (Reset, Init) => (IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY, 0),
        (Init, Init) => (0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY),
        (Init, Rtr) => (0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY),
        (Rtr, Rts) => (IBV_QP_SQ_PSN, IBV_QP_CUR_STATE | IBV_QP_QKEY),
        (Rts | Sqd | Sqe, Rts) => (0, IBV_QP_CUR_STATE | IBV_QP_QKEY),
        (Rts, Sqd) => (0, IBV_QP_CUR_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY),
        (Sqd, Sqd) => (0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY),
        _ => return None,
    })
}

/// The same of an RD queue pair: it has no PSN, and retries.
fn rd_transition(from: QpState, to: QpState) -> Option<(u32, u32)> {
    let retries = IBV_QP_MIN_RNR_TIMER | IBV_QP_RNR_RETRY;
    let (required, optional) = ud_transition(from, to)?;
    let ends = matches!(to, QpState::Reset | QpState::Err);
    let optional = if ends { optional } else { optional | retries | IBV_QP_ACCESS_FLAGS };
    Some((required & !IBV_QP_SQ_PSN, optional | required & IBV_QP_SQ_PSN))
}

/// Required and optional attributes of a transition of a UC queue pair, beside the state itself.
fn uc_transition(from: QpState, to: QpState) -> Option<(u32, u32)> {
    use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
    let path = IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE;
    Some(match (from, to) {
        (_, Reset | Err) => (0, 0),
        (Reset, Init) => (IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0),
        (Init, Init) => (0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
        (Init, Rtr) => (
            IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN,
            IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX,
        ),
        (Rtr, Rts) => (IBV_QP_SQ_PSN, IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | path),
        (Rts | Sqd, Rts) => (0, IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | path),
        (Sqe, Rts) => (0, IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS),
        (Rts, Sqd) => (0, IBV_QP_CUR_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY),
        (Sqd, Sqd) => (0, IBV_QP_AV | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS | path),
        _ => return None,
    })
}

/// An iWARP queue pair gets from its connection what an InfiniBand one gets as attributes. The rights that
/// rdma_init_qp_attr(3) sets for it are enough. Other attributes that a program sets are stored.
fn iwarp_suffices(from: QpState, to: QpState, given: u32) -> bool {
    match (from, to) {
        (QpState::Reset, QpState::Init) | (QpState::Init, QpState::Rtr) => given & IBV_QP_ACCESS_FLAGS != 0,
        _ => true,
    }
}

/// The RNIC's name of a state.
pub fn state(value: ibv_qp_state) -> Result<QpState, Failure> {
    Ok(match value {
        IBV_QPS_RESET => QpState::Reset,
        IBV_QPS_INIT => QpState::Init,
        IBV_QPS_RTR => QpState::Rtr,
        IBV_QPS_RTS => QpState::Rts,
        IBV_QPS_SQD => QpState::Sqd,
        IBV_QPS_SQE => QpState::Sqe,
        IBV_QPS_ERR => QpState::Err,
        _ => return Err(Failure::invalid("unknown queue pair state")),
    })
}

/// Checks `attr` under `mask` and converts it to the RNIC's form. Nothing has changed when it fails.
pub fn convert(
    attr: &ibv_qp_attr,
    mask: u32,
    current: QpState,
    limits: &Limits,
) -> Result<QpModify, Failure> {
    checked(attr, mask, current, limits, view::shown().ib_transitions)
}

fn checked(
    attr: &ibv_qp_attr,
    mask: u32,
    current: QpState,
    limits: &Limits,
    ib: bool,
) -> Result<QpModify, Failure> {
    let has = |bit: u32| mask & bit != 0;
    if mask & !(RC | IBV_QP_QKEY | IBV_QP_CAP | IBV_QP_RATE_LIMIT) != 0 {
        return Err(Failure::invalid("unknown attributes in the mask"));
    }
    if has(IBV_QP_CAP | IBV_QP_RATE_LIMIT) {
        return Err(Failure::unsupported("resizing and rate limits"));
    }
    if has(IBV_QP_QKEY) {
        return Err(Failure::invalid("an RC queue pair has no Q_Key"));
    }
    let from = if has(IBV_QP_CUR_STATE) { state(attr.cur_qp_state)? } else { current };
    let to = if has(IBV_QP_STATE) { state(attr.qp_state)? } else { from };
    let (required, optional) =
        transition(from, to).ok_or_else(|| Failure::invalid("no such state transition"))?;
    let given = mask & !IBV_QP_STATE;
    let enough = given & required == required || (!ib && iwarp_suffices(from, to, given));
    if !enough {
        return Err(Failure::invalid("the transition needs more attributes"));
    }
    if given & !(if ib { required | optional } else { RC }) != 0 {
        return Err(Failure::invalid("an attribute cannot be changed in this transition"));
    }
    check_values(attr, mask, limits)?;
    Ok(change(attr, mask, from, to))
}

/// The same of a UD queue pair, whose rules are InfiniBand's in every view.
pub fn convert_ud(attr: &ibv_qp_attr, mask: u32, current: QpState) -> Result<QpModify, Failure> {
    convert_datagrams(attr, mask, current, ud_transition)
}

/// The same of an RD queue pair.
pub fn convert_rd(attr: &ibv_qp_attr, mask: u32, current: QpState) -> Result<QpModify, Failure> {
    let change = convert_datagrams(attr, mask, current, rd_transition)?;
    check_retries(attr, mask)?;
    Ok(change)
}

/// The same of a UC queue pair.
pub fn convert_uc(
    attr: &ibv_qp_attr,
    mask: u32,
    current: QpState,
    limits: &Limits,
) -> Result<QpModify, Failure> {
    let change = convert_datagrams(attr, mask, current, uc_transition)?;
    check_values(attr, mask, limits)?;
    Ok(change)
}

/// By these required and optional attributes.
fn convert_datagrams(
    attr: &ibv_qp_attr,
    mask: u32,
    current: QpState,
    transition: fn(QpState, QpState) -> Option<(u32, u32)>,
) -> Result<QpModify, Failure> {
    let has = |bit: u32| mask & bit != 0;
    let from = if has(IBV_QP_CUR_STATE) { state(attr.cur_qp_state)? } else { current };
    let to = if has(IBV_QP_STATE) { state(attr.qp_state)? } else { from };
    let (required, optional) =
        transition(from, to).ok_or_else(|| Failure::invalid("no such state transition"))?;
    let given = mask & !IBV_QP_STATE;
    if given & required != required {
        return Err(Failure::invalid("the transition needs more attributes"));
    }
    if given & !(required | optional) != 0 {
        return Err(Failure::invalid("an attribute cannot be changed in this transition"));
    }
    check_common_values(attr, mask)?;
    Ok(change(attr, mask, from, to))
}

fn change(attr: &ibv_qp_attr, mask: u32, from: QpState, to: QpState) -> QpModify {
    let has = |bit: u32| mask & bit != 0;
    let access = Access::from_bits_truncate(attr.qp_access_flags);
    QpModify {
        state: has(IBV_QP_STATE).then_some(to),
        requested: None,
        cur_state: has(IBV_QP_CUR_STATE).then_some(from),
        access: has(IBV_QP_ACCESS_FLAGS).then_some(access),
        max_rd_atomic: has(IBV_QP_MAX_QP_RD_ATOMIC).then_some(attr.max_rd_atomic),
        max_dest_rd_atomic: has(IBV_QP_MAX_DEST_RD_ATOMIC).then_some(attr.max_dest_rd_atomic),
        qkey: has(IBV_QP_QKEY).then_some(attr.qkey),
        dest_qp_num: has(IBV_QP_DEST_QPN).then_some(attr.dest_qp_num),
        rq_psn: has(IBV_QP_RQ_PSN).then_some(attr.rq_psn),
        sq_psn: has(IBV_QP_SQ_PSN).then_some(attr.sq_psn),
        min_rnr_timer: has(IBV_QP_MIN_RNR_TIMER).then_some(attr.min_rnr_timer),
        timeout: has(IBV_QP_TIMEOUT).then_some(attr.timeout),
        retry_cnt: has(IBV_QP_RETRY_CNT).then_some(attr.retry_cnt),
        rnr_retry: has(IBV_QP_RNR_RETRY).then_some(attr.rnr_retry),
        port_num: has(IBV_QP_PORT).then_some(attr.port_num),
        pkey_index: has(IBV_QP_PKEY_INDEX).then_some(attr.pkey_index),
        sqd_async_notify: has(IBV_QP_EN_SQD_ASYNC_NOTIFY).then_some(attr.en_sqd_async_notify != 0),
        awaits_stream: false,
    }
}

/// Bit, whether the value is valid, what is wrong if not. Fields are as wide as InfiniBand's.
type Rule = (u32, bool, &'static str);

/// Those of every service.
fn check_common_values(attr: &ibv_qp_attr, mask: u32) -> Result<(), Failure> {
    let rules = [
        (IBV_QP_PORT, attr.port_num == PORT, "the device has one port, number 1"),
        (IBV_QP_PKEY_INDEX, attr.pkey_index == 0, "the device has one partition key, index 0"),
        (IBV_QP_SQ_PSN, attr.sq_psn < 1 << 24, "a PSN has 24 bits"),
    ];
    keep_to(mask, &rules)
}

fn check_values(attr: &ibv_qp_attr, mask: u32, limits: &Limits) -> Result<(), Failure> {
    check_common_values(attr, mask)?;
    check_retries(attr, mask)?;
    let rules = [
        (IBV_QP_PATH_MTU, (IBV_MTU_256..=IBV_MTU_4096).contains(&attr.path_mtu), "unknown path MTU"),
        (IBV_QP_DEST_QPN, attr.dest_qp_num < 1 << 24, "a QPN has 24 bits"),
        (IBV_QP_RQ_PSN, attr.rq_psn < 1 << 24, "a PSN has 24 bits"),
        (
            IBV_QP_MAX_QP_RD_ATOMIC,
            u32::from(attr.max_rd_atomic) <= limits.max_qp_rd_atom,
            "more reads than the device allows",
        ),
        (
            IBV_QP_MAX_DEST_RD_ATOMIC,
            u32::from(attr.max_dest_rd_atomic) <= limits.max_qp_rd_atom,
            "more reads than the device allows",
        ),
    ];
    keep_to(mask, &rules)
}

/// Of all that repeat what was not taken.
fn check_retries(attr: &ibv_qp_attr, mask: u32) -> Result<(), Failure> {
    let rules = [
        // Programs pass a region's flags; those that mean nothing to a queue pair are ignored.
        (IBV_QP_ACCESS_FLAGS, Access::from_bits(attr.qp_access_flags).is_some(), "unknown rights"),
        (IBV_QP_MIN_RNR_TIMER, attr.min_rnr_timer < 32, "min_rnr_timer is more than 31"),
        (IBV_QP_TIMEOUT, attr.timeout < 32, "timeout is more than 31"),
        (IBV_QP_RETRY_CNT, attr.retry_cnt < 8, "retry_cnt is more than 7"),
        (IBV_QP_RNR_RETRY, attr.rnr_retry < 8, "rnr_retry is more than 7"),
    ];
    keep_to(mask, &rules)
}

fn keep_to(mask: u32, rules: &[Rule]) -> Result<(), Failure> {
    match rules.iter().find(|(bit, good, _)| mask & bit != 0 && !good) {
        Some((_, _, why)) => Err(Failure::invalid(why)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use QpState::{Err, Init, Reset, Rtr, Rts, Sqd};

    fn good() -> ibv_qp_attr {
        // SAFETY: plain C data.
        let mut attr: ibv_qp_attr = unsafe { crate::object::zeroed() };
        attr.port_num = 1;
        attr.path_mtu = IBV_MTU_1024;
        attr
    }

    const NONE: Limits = Limits {
        max_mr_size: 0,
        max_qp: 0,
        max_qp_wr: 0,
        max_sge: 0,
        max_sge_rd: 0,
        max_srq: 0,
        max_srq_wr: 0,
        max_srq_sge: 0,
        max_cq: 0,
        max_cqe: 0,
        max_mr: 0,
        max_mw: 0,
        max_pd: 0,
        max_ah: 0,
        max_qp_rd_atom: 0,
        max_inline: 0,
        max_message: 0,
    };

    fn errno(mask: u32, to: QpState, from: QpState, ib: bool) -> i32 {
        let mut attr = good();
        attr.qp_state = to as u32;
        checked(&attr, mask, from, &NONE, ib).err().map_or(0, |e| e.errno)
    }

    /// A timer of more than 31 would have kept a sender from its limit.
    #[test]
    fn retries_of_reliable_datagrams_are_those_of_rc() {
        let with = |set: fn(&mut ibv_qp_attr)| {
            let mut attr = good();
            attr.qp_state = Init as u32;
            set(&mut attr);
            let retries = IBV_QP_MIN_RNR_TIMER | IBV_QP_RNR_RETRY;
            let (required, _) = rd_transition(Reset, Init).expect("there is one");
            let mask = IBV_QP_STATE | required | retries | IBV_QP_ACCESS_FLAGS;
            convert_rd(&attr, mask, Reset).is_ok()
        };
        assert!(with(|_| ()) && with(|attr| (attr.min_rnr_timer, attr.rnr_retry) = (31, 7)));
        assert!(!with(|attr| attr.min_rnr_timer = 142));
        assert!(!with(|attr| attr.rnr_retry = 8));
        assert!(!with(|attr| attr.qp_access_flags = 1 << 30));
    }

    #[test]
    fn our_transitions_are_those_of_the_rnic() {
        for from in [Reset, Init, Rtr, Rts, Sqd, Err] {
            for to in [Reset, Init, Rtr, Rts, Sqd, Err] {
                assert_eq!(transition(from, to).is_some(), from.may_become(to), "{from:?} to {to:?}");
            }
        }
    }

    #[test]
    fn infiniband_requires_its_attributes_and_iwarp_does_not() {
        let init = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        assert_eq!(errno(init, Init, Reset, true), 0);
        assert_eq!(errno(IBV_QP_STATE | IBV_QP_ACCESS_FLAGS, Init, Reset, true), libc::EINVAL);
        assert_eq!(errno(IBV_QP_STATE | IBV_QP_ACCESS_FLAGS, Init, Reset, false), 0);
        assert_eq!(errno(init | IBV_QP_DEST_QPN, Init, Reset, true), libc::EINVAL);
        assert_eq!(errno(IBV_QP_STATE, Init, Reset, false), libc::EINVAL);
        assert_eq!(errno(IBV_QP_STATE, Rtr, Init, false), libc::EINVAL);
        assert_eq!(errno(IBV_QP_STATE | IBV_QP_ACCESS_FLAGS, Rtr, Init, false), 0);
        let rtr = transition(Init, Rtr).expect("there is one").0;
        assert_eq!(errno(IBV_QP_STATE | rtr, Rtr, Init, false), 0);
        assert_eq!(errno(IBV_QP_STATE | rtr, Rtr, Init, true), 0);
        assert_eq!(errno(IBV_QP_STATE, Rts, Rtr, false), 0);
        assert_eq!(errno(IBV_QP_STATE, Rts, Rtr, true), libc::EINVAL);
        assert_eq!(errno(IBV_QP_STATE, Rts, Reset, false), libc::EINVAL);
        assert_eq!(errno(IBV_QP_STATE, Err, Reset, true), 0);
        assert_eq!(errno(IBV_QP_STATE | IBV_QP_QKEY, Err, Reset, false), libc::EINVAL);
        assert_eq!(errno(1 << 30, Err, Reset, false), libc::EINVAL);
    }

    #[test]
    fn a_datagram_queue_pair_has_a_q_key_and_no_peer() {
        use QpState::Sqe;
        let errno = |mask: u32, to: QpState, from: QpState| {
            let mut attr = good();
            attr.qp_state = to as u32;
            convert_ud(&attr, mask | IBV_QP_STATE, from).err().map_or(0, |e| e.errno)
        };
        let init = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
        assert_eq!(errno(init, Init, Reset), 0);
        assert_eq!(errno(init & !IBV_QP_QKEY, Init, Reset), libc::EINVAL);
        assert_eq!(errno(init | IBV_QP_ACCESS_FLAGS, Init, Reset), libc::EINVAL);
        assert_eq!(errno(0, Rtr, Init), 0);
        assert_eq!(errno(IBV_QP_AV | IBV_QP_DEST_QPN, Rtr, Init), libc::EINVAL);
        assert_eq!(errno(IBV_QP_SQ_PSN, Rts, Rtr), 0);
        assert_eq!(errno(0, Rts, Rtr), libc::EINVAL);
        assert_eq!(errno(0, Rts, Sqe), 0);
        assert_eq!(errno(IBV_QP_SQ_PSN, Rts, Reset), libc::EINVAL);
    }

    #[test]
    fn values_out_of_range_are_refused() {
        let limits = Limits { max_qp_rd_atom: 16, ..NONE };
        let refused = |mask: u32, change: fn(&mut ibv_qp_attr)| {
            let mut attr = good();
            change(&mut attr);
            checked(&attr, mask, Init, &limits, false).is_err()
        };
        assert!(refused(IBV_QP_PORT, |a| a.port_num = 2));
        assert!(refused(IBV_QP_PKEY_INDEX, |a| a.pkey_index = 1));
        assert!(refused(IBV_QP_PATH_MTU, |a| a.path_mtu = 6));
        assert!(refused(IBV_QP_DEST_QPN, |a| a.dest_qp_num = 1 << 24));
        assert!(refused(IBV_QP_MAX_QP_RD_ATOMIC, |a| a.max_rd_atomic = 17));
        assert!(refused(IBV_QP_TIMEOUT, |a| a.timeout = 32));
        assert!(!refused(IBV_QP_MAX_QP_RD_ATOMIC, |a| a.max_rd_atomic = 16));
    }
}
