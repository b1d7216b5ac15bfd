//! Names and rates: functions of constants.

use std::ffi::{CStr, c_char, c_int};

use uwarp_abi_types::verbs::*;

use super::async_event::PEER_ERROR;
use crate::entry;

fn find(table: &[(u32, &'static CStr)], value: u32) -> *const c_char {
    table.iter().find(|(known, _)| *known == value).map_or(c"unknown", |(_, text)| text).as_ptr()
}

const NODE_TYPES: [(u32, &CStr); 8] = [
    (IBV_NODE_CA as u32, c"InfiniBand channel adapter"),
    (IBV_NODE_SWITCH as u32, c"InfiniBand switch"),
    (IBV_NODE_ROUTER as u32, c"InfiniBand router"),
    (IBV_NODE_RNIC as u32, c"iWARP NIC"),
    (IBV_NODE_USNIC as u32, c"usNIC"),
    (IBV_NODE_USNIC_UDP as u32, c"usNIC UDP"),
    (IBV_NODE_UNSPECIFIED as u32, c"unspecified"),
    (IBV_NODE_UNKNOWN as u32, c"unknown"),
];

const PORT_STATES: [(u32, &CStr); 6] = [
    (IBV_PORT_NOP, c"no change"),
    (IBV_PORT_DOWN, c"down"),
    (IBV_PORT_INIT, c"init"),
    (IBV_PORT_ARMED, c"armed"),
    (IBV_PORT_ACTIVE, c"active"),
    (IBV_PORT_ACTIVE_DEFER, c"active defer"),
];

const EVENTS: [(u32, &CStr); 22] = [
    (IBV_EVENT_CQ_ERR, c"completion queue error"),
    (IBV_EVENT_QP_FATAL, c"queue pair failed"),
    (IBV_EVENT_QP_REQ_ERR, c"invalid request on a local queue"),
    (IBV_EVENT_QP_ACCESS_ERR, c"access violation on a local queue"),
    (IBV_EVENT_COMM_EST, c"communication established"),
    (IBV_EVENT_SQ_DRAINED, c"send queue drained"),
    (IBV_EVENT_PATH_MIG, c"path migrated"),
    (IBV_EVENT_PATH_MIG_ERR, c"path migration failed"),
    (IBV_EVENT_DEVICE_FATAL, c"device failed"),
    (IBV_EVENT_PORT_ACTIVE, c"port active"),
    (IBV_EVENT_PORT_ERR, c"port error"),
    (IBV_EVENT_LID_CHANGE, c"LID change"),
    (IBV_EVENT_PKEY_CHANGE, c"P_Key change"),
    (IBV_EVENT_SM_CHANGE, c"subnet manager change"),
    (IBV_EVENT_SRQ_ERR, c"shared receive queue error"),
    (IBV_EVENT_SRQ_LIMIT_REACHED, c"shared receive queue limit reached"),
    (IBV_EVENT_QP_LAST_WQE_REACHED, c"last work request of the queue pair reached"),
    (IBV_EVENT_CLIENT_REREGISTER, c"clients must register again"),
    (IBV_EVENT_GID_CHANGE, c"GID table change"),
    (IBV_EVENT_WQ_FATAL, c"work queue failed"),
    (IBV_EVENT_DEVICE_SPEED_CHANGE, c"device speed change"),
    (PEER_ERROR, c"a peer has dropped a message"),
];

const STATUSES: [(u32, &CStr); 24] = [
    (IBV_WC_SUCCESS, c"success"),
    (IBV_WC_LOC_LEN_ERR, c"local length error"),
    (IBV_WC_LOC_QP_OP_ERR, c"local QP operation error"),
    (IBV_WC_LOC_EEC_OP_ERR, c"local EE context operation error"),
    (IBV_WC_LOC_PROT_ERR, c"local protection error"),
    (IBV_WC_WR_FLUSH_ERR, c"work request flushed"),
    (IBV_WC_MW_BIND_ERR, c"memory window bind error"),
    (IBV_WC_BAD_RESP_ERR, c"bad response error"),
    (IBV_WC_LOC_ACCESS_ERR, c"local access error"),
    (IBV_WC_REM_INV_REQ_ERR, c"remote invalid request error"),
    (IBV_WC_REM_ACCESS_ERR, c"remote access error"),
    (IBV_WC_REM_OP_ERR, c"remote operation error"),
    (IBV_WC_RETRY_EXC_ERR, c"transport retry counter exceeded"),
    (IBV_WC_RNR_RETRY_EXC_ERR, c"RNR retry counter exceeded"),
    (IBV_WC_LOC_RDD_VIOL_ERR, c"local RDD violation error"),
    (IBV_WC_REM_INV_RD_REQ_ERR, c"remote invalid RD request"),
    (IBV_WC_REM_ABORT_ERR, c"aborted by the remote side"),
    (IBV_WC_INV_EECN_ERR, c"invalid EE context number"),
    (IBV_WC_INV_EEC_STATE_ERR, c"invalid EE context state"),
    (IBV_WC_FATAL_ERR, c"fatal error"),
    (IBV_WC_RESP_TIMEOUT_ERR, c"response timeout error"),
    (IBV_WC_GENERAL_ERR, c"general error"),
    (IBV_WC_TM_ERR, c"tag matching error"),
    (IBV_WC_TM_RNDV_INCOMPLETE, c"tag matching rendezvous incomplete"),
];

const OPCODES: [(u32, &CStr); 15] = [
    (IBV_WR_RDMA_WRITE, c"IBV_WR_RDMA_WRITE"),
    (IBV_WR_RDMA_WRITE_WITH_IMM, c"IBV_WR_RDMA_WRITE_WITH_IMM"),
    (IBV_WR_SEND, c"IBV_WR_SEND"),
    (IBV_WR_SEND_WITH_IMM, c"IBV_WR_SEND_WITH_IMM"),
    (IBV_WR_RDMA_READ, c"IBV_WR_RDMA_READ"),
    (IBV_WR_ATOMIC_CMP_AND_SWP, c"IBV_WR_ATOMIC_CMP_AND_SWP"),
    (IBV_WR_ATOMIC_FETCH_AND_ADD, c"IBV_WR_ATOMIC_FETCH_AND_ADD"),
    (IBV_WR_LOCAL_INV, c"IBV_WR_LOCAL_INV"),
    (IBV_WR_BIND_MW, c"IBV_WR_BIND_MW"),
    (IBV_WR_SEND_WITH_INV, c"IBV_WR_SEND_WITH_INV"),
    (IBV_WR_TSO, c"IBV_WR_TSO"),
    (IBV_WR_DRIVER1, c"IBV_WR_DRIVER1"),
    (IBV_WR_ATOMIC_WRITE, c"IBV_WR_ATOMIC_WRITE"),
    (IBV_WR_FLUSH, c"IBV_WR_FLUSH"),
    (u32::MAX, c"unknown"),
];

/// InfiniBand's rates: code, multiple of 2.5 Gb/s (none for rates that are no multiple of an SDR lane), Mb/s.
const RATES: [(ibv_rate, Option<c_int>, c_int); 23] = [
    (IBV_RATE_2_5_GBPS, Some(1), 2_500),
    (IBV_RATE_5_GBPS, Some(2), 5_000),
    (IBV_RATE_10_GBPS, Some(4), 10_000),
    (IBV_RATE_20_GBPS, Some(8), 20_000),
    (IBV_RATE_30_GBPS, Some(12), 30_000),
    (IBV_RATE_40_GBPS, Some(16), 40_000),
    (IBV_RATE_60_GBPS, Some(24), 60_000),
    (IBV_RATE_80_GBPS, Some(32), 80_000),
    (IBV_RATE_120_GBPS, Some(48), 120_000),
    (IBV_RATE_14_GBPS, None, 14_062),
    (IBV_RATE_56_GBPS, None, 56_250),
    (IBV_RATE_112_GBPS, None, 112_500),
    (IBV_RATE_168_GBPS, None, 168_750),
    (IBV_RATE_25_GBPS, None, 25_781),
    (IBV_RATE_100_GBPS, None, 103_125),
    (IBV_RATE_200_GBPS, None, 206_250),
    (IBV_RATE_300_GBPS, None, 309_375),
    (IBV_RATE_28_GBPS, Some(11), 28_125),
    (IBV_RATE_50_GBPS, Some(20), 53_125),
    (IBV_RATE_400_GBPS, Some(160), 425_000),
    (IBV_RATE_600_GBPS, Some(240), 637_500),
    (IBV_RATE_800_GBPS, Some(320), 850_000),
    (IBV_RATE_1200_GBPS, Some(480), 1_275_000),
];

entry! {
    /// ibv_event_type_str(3).
    fn ibv_node_type_str(node_type: ibv_node_type) -> *const c_char {
        Ok(find(&NODE_TYPES, node_type.cast_unsigned()))
    }
    /// ibv_event_type_str(3).
    fn ibv_port_state_str(state: ibv_port_state) -> *const c_char {
        Ok(find(&PORT_STATES, state))
    }
    /// ibv_event_type_str(3).
    fn ibv_event_type_str(event: ibv_event_type) -> *const c_char {
        Ok(find(&EVENTS, event))
    }
    /// Name of a completion status.
    fn ibv_wc_status_str(status: ibv_wc_status) -> *const c_char {
        Ok(find(&STATUSES, status))
    }
    /// Name of a work request's opcode.
    fn ibv_wr_opcode_str(opcode: ibv_wr_opcode) -> *const c_char {
        Ok(find(&OPCODES, opcode))
    }
    /// ibv_rate_to_mult(3).
    fn ibv_rate_to_mult(rate: ibv_rate) -> i32 {
        Ok(RATES.iter().find(|(code, ..)| *code == rate).and_then(|(_, mult, _)| *mult).unwrap_or(-1))
    }
    /// ibv_rate_to_mult(3).
    fn mult_to_ibv_rate(mult: c_int) -> u32 {
        Ok(RATES.iter().find(|(_, known, _)| *known == Some(mult)).map_or(IBV_RATE_MAX, |(code, ..)| *code))
    }
    /// ibv_rate_to_mbps(3).
    fn ibv_rate_to_mbps(rate: ibv_rate) -> i32 {
        Ok(RATES.iter().find(|(code, ..)| *code == rate).map_or(-1, |(.., mbps)| *mbps))
    }
    /// ibv_rate_to_mbps(3).
    fn mbps_to_ibv_rate(mbps: c_int) -> u32 {
        Ok(RATES.iter().find(|(.., known)| *known == mbps).map_or(IBV_RATE_MAX, |(code, ..)| *code))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_go_both_ways() {
        for (code, mult, mbps) in RATES {
            // SAFETY: no pointers.
            unsafe {
                assert_eq!(ibv_rate_to_mbps(code), mbps);
                assert_eq!(mbps_to_ibv_rate(mbps), code);
                assert_eq!(ibv_rate_to_mult(code), mult.unwrap_or(-1));
                if let Some(mult) = mult {
                    assert_eq!(mult_to_ibv_rate(mult), code);
                }
            }
        }
        // SAFETY: no pointers.
        unsafe {
            assert_eq!((ibv_rate_to_mbps(99), ibv_rate_to_mult(99)), (-1, -1));
            assert_eq!((mult_to_ibv_rate(7), mbps_to_ibv_rate(7)), (IBV_RATE_MAX, IBV_RATE_MAX));
        }
    }

    #[test]
    fn unknown_values_have_a_name() {
        // SAFETY: no pointers; the answers are constants.
        unsafe {
            assert_eq!(CStr::from_ptr(ibv_wc_status_str(1000)), c"unknown");
            assert_eq!(CStr::from_ptr(ibv_wc_status_str(IBV_WC_SUCCESS)), c"success");
            assert_eq!(CStr::from_ptr(ibv_node_type_str(-5)), c"unknown");
        }
    }
}
