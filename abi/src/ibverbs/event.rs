//! Events: completion channels, and the asynchronous events of a context.
//!
//! Both are queues with a descriptor ([`uwarp_driver::Channel`]) of 64-bit cookies. A completion event's cookie is the
//! address of the completion queue; an asynchronous event's is the address of the object with the kind in the low byte
//! (user addresses have at most 57 bits).

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use uwarp_abi_types::verbs::*;
use uwarp_driver::Channel;
use uwarp_rnic::{AsyncEvent, AsyncSink, CompletionSink};

use super::cq::CCq;
use super::device::Context;
use super::qp::CQp;
use super::srq::CSrq;
use crate::entry;
use crate::entry::Code;
use crate::object::{self, Object, Unacknowledged, Use, Users, Visible, look};

/// A completion channel.
#[repr(C)]
pub struct CChannel {
    c: Visible<ibv_comp_channel>,
    /// The queue behind it.
    pub channel: Arc<Channel>,
    /// Completion queues on it.
    pub users: Users,
    _context: Use,
}

// SAFETY: repr(C), the C structure first.
unsafe impl Object for CChannel {
    type C = ibv_comp_channel;
    const NAME: &'static str = "channel";
}

/// Where the asynchronous events of one object go.
pub struct AsyncEvents {
    channel: Arc<Channel>,
    unacknowledged: Unacknowledged,
}

/// Kinds fit a byte; see the module's documentation.
const KIND_BITS: u32 = 8;

impl AsyncEvents {
    /// Of an object on `context`.
    pub fn new(context: &Context) -> Arc<Self> {
        Arc::new(Self { channel: context.events.clone(), unacknowledged: Unacknowledged::default() })
    }

    /// The program acknowledged one.
    pub fn acknowledged(&self) {
        self.unacknowledged.done(1);
    }

    /// Drops what is queued for the object at `cookie` and waits for the program to acknowledge what it took.
    pub fn close(&self, cookie: u64) {
        let of_object =
            self.channel.remove_if(|event| event >> KIND_BITS == cookie << KIND_BITS >> KIND_BITS);
        self.unacknowledged.done(of_object);
        self.unacknowledged.wait();
    }
}

impl AsyncSink for AsyncEvents {
    fn async_event(&self, event: AsyncEvent) {
        tracing::debug!(target: "uwarp::abi", kind = ?event.kind, "asynchronous event");
        self.unacknowledged.queued();
        self.channel.push(event.cookie << KIND_BITS | u64::from(event.kind as u32));
    }
}

/// Where the completion events of one completion queue go.
pub struct CompletionEvents {
    channel: Arc<Channel>,
    unacknowledged: Unacknowledged,
}

impl CompletionEvents {
    /// To `channel`.
    pub fn new(channel: &CChannel) -> Arc<Self> {
        Arc::new(Self { channel: channel.channel.clone(), unacknowledged: Unacknowledged::default() })
    }

    /// Drops what is queued for the completion queue at `cookie` and waits for the program to acknowledge what it took.
    pub fn close(&self, cookie: u64) {
        self.unacknowledged.done(self.channel.remove(cookie));
        self.unacknowledged.wait();
    }
}

impl CompletionSink for CompletionEvents {
    fn completion_event(&self, cookie: u64) {
        self.unacknowledged.queued();
        self.channel.push(cookie);
    }

    fn armed(&self) {
        self.channel.armed();
    }
}

/// The next cookie, if there is one.
fn next(channel: &Channel, first: bool) -> Option<u64> {
    if first { channel.take_first() } else { channel.take() }
}

/// ibv_get_cq_event(3). A thread that blocks here sleeps on the sockets itself. A cancellation point.
///
/// # Safety
/// The pointers are what the C interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    entry::wait(
        "ibv_get_cq_event",
        // SAFETY: the caller's promise, here and below.
        || Ok(unsafe { look::<CChannel>(channel) }?.channel.clone()),
        |channel, first| {
            let Some(cookie) = next(channel, first) else { return Ok(None) };
            let found: *mut ibv_cq = pointer(cookie);
            // SAFETY: alive: a completion queue's events leave the queue before its memory goes.
            unsafe {
                *cq = found;
                *cq_context = (*found).cq_context;
            }
            Ok(Some(()))
        },
    )
}

/// ibv_get_async_event(3). A cancellation point.
///
/// # Safety
/// The pointers are what the C interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ibv_get_async_event(
    context: *mut ibv_context,
    event: *mut ibv_async_event,
) -> c_int {
    entry::wait(
        "ibv_get_async_event",
        // SAFETY: the caller's promise, here and below.
        || Ok(unsafe { look::<Context>(context) }?.events.clone()),
        |events, first| {
            let Some(cookie) = next(events, first) else { return Ok(None) };
            let kind = (cookie & ((1 << KIND_BITS) - 1)) as ibv_event_type;
            // SAFETY: which member of the union is meant follows from the kind; all of them are pointers but the port's number.
            unsafe {
                (*event).event_type = kind;
                match kind {
                    IBV_EVENT_DEVICE_FATAL
                    | IBV_EVENT_PORT_ACTIVE
                    | IBV_EVENT_PORT_ERR
                    | IBV_EVENT_GID_CHANGE => {
                        (*event).element.port_num = (cookie >> KIND_BITS) as c_int;
                    }
                    _ => (*event).element.qp = pointer(cookie >> KIND_BITS),
                }
            }
            Ok(Some(()))
        },
    )
}

/// An object's address as a cookie.
pub fn cookie<T>(c: *mut T) -> u64 {
    // Exposed: the cookie comes back as a pointer.
    c.expose_provenance() as u64
}

fn pointer<T>(cookie: u64) -> *mut T {
    std::ptr::with_exposed_provenance_mut(cookie as usize)
}

entry! {
    /// ibv_create_comp_channel(3).
    verb fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
        let open = look::<Context>(context)?;
        let channel = Channel::new(open.nic.engine())?;
        Ok(object::give(Box::new(CChannel {
            c: Visible::new(ibv_comp_channel { context, fd: channel.fd(), refcnt: 0 }),
            channel,
            users: Users::default(),
            _context: open.users.hold(),
        })))
    }

    /// ibv_destroy_comp_channel(3).
    verb fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> Code {
        look::<CChannel>(channel)?.users.none()?;
        drop(object::take::<CChannel>(channel)?);
        Ok(())
    }

    /// ibv_get_cq_event(3).
    verb fn ibv_ack_cq_events(cq: *mut ibv_cq, nevents: u32) -> () {
        let queue = look::<CCq>(cq)?;
        (*cq).comp_events_completed = (*cq).comp_events_completed.wrapping_add(nevents);
        if let Some(events) = &queue.events {
            events.unacknowledged.done(nevents as usize);
        }
        Ok(())
    }

    /// ibv_get_async_event(3).
    verb fn ibv_ack_async_event(event: *mut ibv_async_event) -> () {
        let event = &*entry::required(event, "event")?;
        match event.event_type {
            IBV_EVENT_CQ_ERR => {
                let cq = event.element.cq;
                let queue = look::<CCq>(cq)?;
                (*cq).async_events_completed = (*cq).async_events_completed.wrapping_add(1);
                queue.async_events.acknowledged();
            }
            IBV_EVENT_QP_FATAL
            | IBV_EVENT_QP_REQ_ERR
            | IBV_EVENT_QP_ACCESS_ERR
            | IBV_EVENT_COMM_EST
            | IBV_EVENT_SQ_DRAINED
            | IBV_EVENT_PATH_MIG
            | IBV_EVENT_PATH_MIG_ERR
            | IBV_EVENT_QP_LAST_WQE_REACHED => {
                let qp = event.element.qp;
                let pair = look::<CQp>(qp)?;
                (*qp).events_completed = (*qp).events_completed.wrapping_add(1);
                pair.async_events.acknowledged();
            }
            IBV_EVENT_SRQ_ERR | IBV_EVENT_SRQ_LIMIT_REACHED => {
                let srq = event.element.srq;
                let shared = look::<CSrq>(srq)?;
                (*srq).events_completed = (*srq).events_completed.wrapping_add(1);
                shared.async_events.acknowledged();
            }
            _ => {}
        }
        Ok(())
    }
}
