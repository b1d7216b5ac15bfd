//! How the device presents itself. The wire is iWARP in every view; programs look at these few values and
//! choose how to set connections up. Decided here and nowhere else.

use uwarp_abi_types::verbs::{
    IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V2, IBV_LINK_LAYER_ETHERNET, IBV_LINK_LAYER_INFINIBAND, IBV_NODE_CA,
    IBV_NODE_RNIC, IBV_TRANSPORT_IB, IBV_TRANSPORT_IWARP, ibv_gid_type, ibv_node_type, ibv_transport_type,
};
use uwarp_driver::config::{Config, View};
use uwarp_rnic::qp::QpState;

pub use uwarp_driver::port::PORT;

/// The values that programs see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shown {
    /// `ibv_device.node_type`.
    pub node_type: ibv_node_type,
    /// `ibv_device.transport_type`.
    pub transport: ibv_transport_type,
    /// `ibv_port_attr.link_layer`.
    pub link_layer: u8,
    /// `ibv_gid_entry.gid_type`.
    pub gid_type: ibv_gid_type,
    /// Whether `ibv_modify_qp` requires InfiniBand's attributes in each transition. An iWARP program sets
    /// state and rights; the connection brings the rest.
    pub ib_transitions: bool,
    /// The state of a queue pair that was just made or reset. iWARP's has no RESET: siw's is IDLE, which is
    /// shown as INIT (`siw_qp_state_to_ib_qp_state`) and takes receives.
    pub first_state: QpState,
}

/// The view this process runs in.
pub fn shown() -> Shown {
    of(Config::get().view)
}

fn of(view: View) -> Shown {
    match view {
        View::Iwarp => Shown {
            node_type: IBV_NODE_RNIC,
            transport: IBV_TRANSPORT_IWARP,
            link_layer: IBV_LINK_LAYER_ETHERNET as u8,
            gid_type: IBV_GID_TYPE_IB,
            ib_transitions: false,
            first_state: QpState::Init,
        },
        View::Roce => Shown {
            node_type: IBV_NODE_CA,
            transport: IBV_TRANSPORT_IB,
            link_layer: IBV_LINK_LAYER_ETHERNET as u8,
            gid_type: IBV_GID_TYPE_ROCE_V2,
            ib_transitions: true,
            first_state: QpState::Reset,
        },
        View::Ib => Shown {
            node_type: IBV_NODE_CA,
            transport: IBV_TRANSPORT_IB,
            link_layer: IBV_LINK_LAYER_INFINIBAND as u8,
            gid_type: IBV_GID_TYPE_IB,
            ib_transitions: true,
            first_state: QpState::Reset,
        },
    }
}
