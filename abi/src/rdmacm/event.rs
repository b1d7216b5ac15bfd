//! Events: taken from a channel, shown to C, acknowledged.

use std::ffi::{c_char, c_int};
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

use uwarp_abi_types::rdmacm::*;
use uwarp_abi_types::verbs::IBV_QPS_RTS;
use uwarp_cm::{Event, EventChannel, EventKind, GetError, MAX_PRIVATE_DATA};

use super::channel;
use super::id::{self, CId};
use crate::entry;
use crate::entry::{Failure, MinusOne};
use crate::object::{self, Object, Visible, look, zeroed};

/// An event that the program has taken and not acknowledged.
#[repr(C)]
pub struct CEvent {
    c: Visible<rdma_cm_event>,
    /// What `private_data` points to. Programs may read all of it: what lies behind the data is zero.
    private_data: Visible<[u8; MAX_PRIVATE_DATA]>,
    event: Event,
}

// SAFETY: repr(C), the C structure first.
unsafe impl Object for CEvent {
    type C = rdma_cm_event;
    const NAME: &'static str = "event";
}

/// How long a call on a channel that is no more waits before it says so. A thread that comes to wait on it after the
/// program's last acknowledgement would with a kernel mostly have been waiting already, and go on until the process ends; rping
/// ends its process with an error when it is told. Longer than our streams take to close at exit.
const GONE: Duration = Duration::from_secs(4);

/// Takes the next event, waiting for one as the program set the channel's descriptor, and shows in its id what it
/// brings.
///
/// # Safety
/// The ids of the channel are alive, and the program does not change them in other threads meanwhile.
pub unsafe fn next(channel: *mut rdma_event_channel) -> Result<*mut rdma_cm_event, Failure> {
    let queue = channel::queue(channel)?;
    match queue.get() {
        // SAFETY: the caller's promise.
        Ok(event) => unsafe { show(event) },
        Err(GetError::WouldBlock | GetError::NothingYet) => Err(Failure::new(libc::EAGAIN, "no event")),
        Err(GetError::Interrupted) => Err(Failure::new(libc::EINTR, "interrupted by a signal")),
    }
}

/// The next event, if there is one; `first` is of [`entry::wait`].
///
/// # Safety
/// As [`next`].
pub unsafe fn take_next(queue: &EventChannel, first: bool) -> Result<Option<*mut rdma_cm_event>, Failure> {
    // SAFETY: the caller's promise.
    queue.take_next(first).map(|event| unsafe { show(event) }).transpose()
}

/// rdma_get_cm_event(3). A thread that blocks here sleeps on the sockets itself. A cancellation point.
///
/// # Safety
/// The pointers are what the C interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn rdma_get_cm_event(
    channel: *mut rdma_event_channel,
    event: *mut *mut rdma_cm_event,
) -> c_int {
    let mut gone = false;
    let answer = entry::wait(
        "rdma_get_cm_event",
        || {
            entry::required(event, "event")?;
            channel::queue(channel).inspect_err(|_| gone = true)
        },
        |queue, first| {
            // SAFETY: the caller's promise.
            let Some(taken) = (unsafe { take_next(queue, first) })? else { return Ok(None) };
            // SAFETY: as above.
            unsafe { *event = taken };
            Ok(Some(()))
        },
    );
    if gone {
        entry::sleep(GONE);
    }
    answer
}

/// # Safety
/// As [`next`].
unsafe fn show(event: Event) -> Result<*mut rdma_cm_event, Failure> {
    // SAFETY: plain C data.
    let mut c: rdma_cm_event = unsafe { zeroed() };
    c.event = number(event.kind);
    c.status = event.status;
    // SAFETY: the ids are alive by the caller's promise, so their cookies are addresses of theirs.
    unsafe {
        match event.kind {
            EventKind::ConnectRequest => {
                let listener = CId::of(event.owner());
                c.listen_id = listener;
                c.id = match new_id(&event, listener) {
                    Ok(id) => id,
                    Err(failure) => {
                        event.id.destroy();
                        event.acknowledge();
                        return Err(failure);
                    }
                };
            }
            _ => c.id = CId::of(&event.id),
        }
        let cid = look::<CId>(c.id)?;
        match event.kind {
            EventKind::AddressResolved => {
                if let Err(failure) = cid.show_device() {
                    c.event = RDMA_CM_EVENT_ADDR_ERROR;
                    c.status = -failure.errno;
                }
                cid.show_addresses();
            }
            EventKind::RouteResolved => cid.show_path(),
            EventKind::ConnectResponse => cid.show_addresses(),
            EventKind::Established => {
                cid.show_addresses();
                if !(*c.id).qp.is_null() {
                    (*(*c.id).qp).state = IBV_QPS_RTS;
                }
            }
            _ => {}
        }
    }
    if let EventKind::User(number) = event.kind {
        c.param.arg = number;
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
    let given = object::give(Box::new(CEvent {
        c: Visible::new(c),
        private_data: Visible::new(private_data),
        event,
    }));
    if length > 0 {
        // SAFETY: the event is alive, and `conn` was written above (an event with data is never the program's own).
        unsafe { (*given).param.conn.private_data = look::<CEvent>(given)?.private_data.get().cast() };
    }
    Ok(given)
}

/// The id of a request, as its listener is.
///
/// # Safety
/// `listener` is alive.
unsafe fn new_id(event: &Event, listener: *mut rdma_cm_id) -> Result<*mut rdma_cm_id, Failure> {
    // SAFETY: the caller's promise; the new id is nobody else's yet.
    unsafe {
        let sync = look::<CId>(listener)?.is_sync();
        let (channel, context, ps) = ((*listener).channel, (*listener).context, (*listener).ps);
        let new = CId::give(Arc::clone(&event.id), channel, context, ps, false);
        let shown = (|| {
            let cid = look::<CId>(new)?;
            cid.show_device()?;
            cid.show_addresses();
            cid.show_path();
            if sync { id::migrate(new, null_mut()) } else { Ok(()) }
        })();
        if let Err(failure) = shown {
            let _ = id::destroy(new);
            return Err(failure);
        }
        Ok(new)
    }
}

/// Gives an event back.
///
/// # Safety
/// `event` came from [`next`] and is used by nobody any more.
pub unsafe fn acknowledge(event: *mut rdma_cm_event) {
    // SAFETY: the caller's promise.
    if let Ok(taken) = unsafe { object::take::<CEvent>(event) } {
        taken.event.acknowledge();
    }
}

fn number(kind: EventKind) -> rdma_cm_event_type {
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
        EventKind::NamesResolved => RDMA_CM_EVENT_ADDRINFO_RESOLVED,
        EventKind::User(_) => RDMA_CM_EVENT_USER,
    }
}

entry! {
    /// rdma_ack_cm_event(3).
    fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> MinusOne {
        entry::required(event, "event")?;
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

    /// Queues an event of the program's own on the id's channel, `RDMA_CM_EVENT_USER`.
    verb fn rdma_write_cm_event(
        id: *mut rdma_cm_id,
        event: rdma_cm_event_type,
        status: c_int,
        arg: u64,
    ) -> MinusOne {
        let cid = look::<CId>(id)?;
        if event != RDMA_CM_EVENT_USER {
            return Err(Failure::invalid("programs write RDMA_CM_EVENT_USER only"));
        }
        cid.id.post(EventKind::User(arg), status)?;
        Ok(())
    }
}
