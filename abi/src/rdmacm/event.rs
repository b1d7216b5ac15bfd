//! Events that the program holds: their C structure, their names, their acknowledgement.

use std::ffi::c_char;
use std::net::{IpAddr, SocketAddr};

use uwarp_abi_types::rdmacm::*;
use uwarp_abi_types::verbs::ibv_ah_attr;
use uwarp_cm::{Event, EventKind, MAX_PRIVATE_DATA};
use uwarp_process::{Mutex, PerProcess};

use crate::convention::MinusOne;
use crate::entry;
use crate::failure::{Failure, required};
use crate::ibverbs::{context, path};
use crate::object::{self, Object, Visible, look};

/// An event that the program has taken and not acknowledged.
#[repr(C)]
pub struct CEvent {
    c: Visible<rdma_cm_event>,
    /// What `private_data` points to. Programs may read all of it: the bytes behind the data are zero.
    private_data: Visible<[u8; MAX_PRIVATE_DATA]>,
    event: Event,
}

// SAFETY: repr(C), the C structure first.
unsafe impl Object for CEvent {
    type C = rdma_cm_event;
    const NAME: &'static str = "event";
}

/// Gives an event to the program. `c` has its id; the rest is filled in here.
pub fn give(mut c: rdma_cm_event, event: Event) -> Result<*mut rdma_cm_event, Failure> {
    if let EventKind::User(number) = event.kind {
        c.param.arg = number;
    } else if let Some(datagram) = &event.datagram {
        c.param.ud = rdma_ud_param {
            // For a group: the value that the program gave when it joined.
            private_data: std::ptr::with_exposed_provenance(datagram.context),
            private_data_len: u8::try_from(event.private_data.len()).unwrap_or(u8::MAX),
            // SAFETY: the event's id is alive.
            ah_attr: unsafe { address_vector(c.id, datagram.local.ip(), datagram.peer.ip()) },
            qp_num: datagram.qpn,
            qkey: datagram.qkey,
        };
    } else {
        let param = event.param;
        c.param.conn = rdma_conn_param {
            private_data: std::ptr::null(),
            // The connection manager has cut it to fit.
            private_data_len: u8::try_from(event.private_data.len()).unwrap_or(u8::MAX),
            responder_resources: param.responder_resources,
            initiator_depth: param.initiator_depth,
            flow_control: param.flow_control,
            retry_count: param.retry_count,
            rnr_retry_count: param.rnr_retry_count,
            srq: param.srq.into(),
            qp_num: param.qp_num,
        };
    }
    let mut private_data = [0; MAX_PRIVATE_DATA];
    let length = event.private_data.len().min(MAX_PRIVATE_DATA);
    private_data[..length].copy_from_slice(&event.private_data[..length]);
    let given = object::give(CEvent { c: Visible::new(c), private_data: Visible::new(private_data), event });
    if length > 0 {
        // SAFETY: the event is alive, and `conn` was written above, or `ud`, which begins alike (an event
        // with data is never the program's own).
        unsafe { (*given).param.conn.private_data = look::<CEvent>(given)?.private_data.get().cast() };
    }
    Ok(given)
}

/// InfiniBand's reason for a rejection: nothing listens at the port.
const INVALID_SERVICE_ID: i32 = 8;

/// Programs print at most "RDMA_CM_EVENT_REJECTED, error 8". This says what has happened, once for each
/// address, and for the first few only: some programs try until the server is there.
pub fn explain(event: &Event) {
    const ENOUGH: usize = 16;
    static SAID: PerProcess<Mutex<Vec<SocketAddr>, 29>> = PerProcess::new(Mutex::default);
    let refused = match event.kind {
        EventKind::Rejected if event.status == INVALID_SERVICE_ID => "nothing listens there",
        // The status of a program's own rejection, too.
        EventKind::Rejected if event.status == -libc::ECONNREFUSED && event.private_data.is_empty() => {
            "nothing listens there, or its program has rejected it"
        }
        _ => return,
    };
    let Some(peer) = event.id.peer_address() else { return };
    let mut said = SAID.lock();
    if said.len() >= ENOUGH || said.contains(&peer) {
        return;
    }
    said.push(peer);
    drop(said);
    let or = if peer.ip().is_loopback() { "" } else { ", or a firewall rejects it" };
    tracing::warn!("{peer} refused the connection: {refused}{or}; is the server running under uwarp?");
}

/// The address vector of a path, on the device of an id.
///
/// # Safety
/// The id is alive or NULL.
unsafe fn address_vector(id: *const rdma_cm_id, local: IpAddr, peer: IpAddr) -> ibv_ah_attr {
    // SAFETY: the caller's promise; an id's device is open as long as the process lives.
    let own = unsafe {
        id.as_ref().and_then(|id| context::port(id.verbs).ok()).map(|port| port.recent_addresses())
    };
    path::address_vector(own.as_deref().unwrap_or_default(), local, peer)
}

/// Acknowledges an event.
///
/// # Safety
/// `event` came from [`give`], and nothing uses it any more.
pub unsafe fn acknowledge(event: *mut rdma_cm_event) {
    // SAFETY: the caller's promise.
    if let Ok(taken) = unsafe { object::take::<CEvent>(event) } {
        taken.event.acknowledge();
    }
}

/// The number of an event in C.
pub fn number(kind: EventKind) -> rdma_cm_event_type {
    match kind {
        EventKind::AddressResolved => RDMA_CM_EVENT_ADDR_RESOLVED,
        EventKind::AddressError => RDMA_CM_EVENT_ADDR_ERROR,
        EventKind::RouteResolved => RDMA_CM_EVENT_ROUTE_RESOLVED,
        EventKind::ConnectRequest => RDMA_CM_EVENT_CONNECT_REQUEST,
        EventKind::ConnectError => RDMA_CM_EVENT_CONNECT_ERROR,
        EventKind::Unreachable => RDMA_CM_EVENT_UNREACHABLE,
        EventKind::Rejected => RDMA_CM_EVENT_REJECTED,
        EventKind::ConnectResponse => RDMA_CM_EVENT_CONNECT_RESPONSE,
        EventKind::Established => RDMA_CM_EVENT_ESTABLISHED,
        EventKind::Disconnected => RDMA_CM_EVENT_DISCONNECTED,
        EventKind::TimewaitExit => RDMA_CM_EVENT_TIMEWAIT_EXIT,
        EventKind::MulticastJoin => RDMA_CM_EVENT_MULTICAST_JOIN,
        EventKind::NamesResolved => RDMA_CM_EVENT_ADDRINFO_RESOLVED,
        EventKind::User(_) => RDMA_CM_EVENT_USER,
    }
}

entry! {
    /// rdma_ack_cm_event(3).
    fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> MinusOne {
        required(event, "event")?;
        acknowledge(event);
        Ok(())
    }

    /// rdma_event_str(3).
    fn rdma_event_str(event: rdma_cm_event_type) -> *const c_char {
        let name = match event {
            RDMA_CM_EVENT_ADDR_RESOLVED => c"RDMA_CM_EVENT_ADDR_RESOLVED",
            RDMA_CM_EVENT_ADDR_ERROR => c"RDMA_CM_EVENT_ADDR_ERROR",
            RDMA_CM_EVENT_ROUTE_RESOLVED => c"RDMA_CM_EVENT_ROUTE_RESOLVED",
            RDMA_CM_EVENT_ROUTE_ERROR => c"RDMA_CM_EVENT_ROUTE_ERROR",
            RDMA_CM_EVENT_CONNECT_REQUEST => c"RDMA_CM_EVENT_CONNECT_REQUEST",
            RDMA_CM_EVENT_CONNECT_RESPONSE => c"RDMA_CM_EVENT_CONNECT_RESPONSE",
            RDMA_CM_EVENT_CONNECT_ERROR => c"RDMA_CM_EVENT_CONNECT_ERROR",
            RDMA_CM_EVENT_UNREACHABLE => c"RDMA_CM_EVENT_UNREACHABLE",
            RDMA_CM_EVENT_REJECTED => c"RDMA_CM_EVENT_REJECTED",
            RDMA_CM_EVENT_ESTABLISHED => c"RDMA_CM_EVENT_ESTABLISHED",
            RDMA_CM_EVENT_DISCONNECTED => c"RDMA_CM_EVENT_DISCONNECTED",
            RDMA_CM_EVENT_DEVICE_REMOVAL => c"RDMA_CM_EVENT_DEVICE_REMOVAL",
            RDMA_CM_EVENT_MULTICAST_JOIN => c"RDMA_CM_EVENT_MULTICAST_JOIN",
            RDMA_CM_EVENT_MULTICAST_ERROR => c"RDMA_CM_EVENT_MULTICAST_ERROR",
            RDMA_CM_EVENT_ADDR_CHANGE => c"RDMA_CM_EVENT_ADDR_CHANGE",
            RDMA_CM_EVENT_TIMEWAIT_EXIT => c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
            RDMA_CM_EVENT_ADDRINFO_RESOLVED => c"RDMA_CM_EVENT_ADDRINFO_RESOLVED",
            RDMA_CM_EVENT_ADDRINFO_ERROR => c"RDMA_CM_EVENT_ADDRINFO_ERROR",
            _ => c"UNKNOWN EVENT",
        };
        Ok(name.as_ptr())
    }
}
