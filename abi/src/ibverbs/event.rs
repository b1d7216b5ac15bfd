//! Where the events of objects go: completion channels, and the asynchronous events of a context.
//!
//! Both are queues with a descriptor ([`uwarp_driver::Channel`]) of 64-bit cookies. A completion event's
//! cookie is the address of the completion queue; an asynchronous event's is the address of the object with
//! the kind in the low byte (user addresses have at most 57 bits).

use std::ffi::{c_int, c_void};
use std::sync::{Arc, OnceLock, Weak};

use uwarp_abi_types::verbs::*;
use uwarp_driver::Channel;
use uwarp_rnic::{AsyncEvent, AsyncSink, CompletionSink, Cq, EventKind};

use super::context::Context;
use super::old;
use crate::convention::Code;
use crate::entry;
use crate::failure::Failure;
use crate::object::{self, Object, Unacknowledged, Use, Users, Visible, look};
use crate::wait::wait;

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

/// Kinds fit in a byte; see the module's documentation.
pub(super) const KIND_BITS: u32 = 8;

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
        let cookie = event.cookie << KIND_BITS | u64::from(event.kind as u32);
        if event.kind != EventKind::PeerError {
            self.channel.push(cookie);
        } else if !self.channel.push_once(cookie) {
            // One that the program has not taken says the same.
            self.unacknowledged.done(1);
        }
    }
}

/// Where the events of a context's port go. The program acknowledges them, but nothing waits for that.
pub struct PortEvents {
    channel: Arc<Channel>,
}

impl PortEvents {
    /// To the context's queue.
    pub fn new(channel: &Arc<Channel>) -> Arc<Self> {
        Arc::new(Self { channel: channel.clone() })
    }
}

impl AsyncSink for PortEvents {
    fn async_event(&self, event: AsyncEvent) {
        tracing::info!(target: "uwarp::abi", kind = ?event.kind, "the port has changed");
        self.channel.push(event.cookie << KIND_BITS | u64::from(event.kind as u32));
    }
}

/// Where the completion events of one completion queue go.
pub struct CompletionEvents {
    channel: Arc<Channel>,
    cq: OnceLock<Weak<Cq>>,
    unacknowledged: Unacknowledged,
}

impl CompletionEvents {
    /// To `channel`.
    pub fn new(channel: &CChannel) -> Arc<Self> {
        Arc::new(Self {
            channel: channel.channel.clone(),
            cq: OnceLock::new(),
            unacknowledged: Unacknowledged::default(),
        })
    }

    /// Of this completion queue.
    pub fn belongs_to(&self, cq: &Arc<Cq>) {
        // Each completion queue has its own.
        let _ = self.cq.set(Arc::downgrade(cq));
    }

    /// The program acknowledged `n`.
    pub fn acknowledged(&self, n: usize) {
        self.unacknowledged.done(n);
    }

    /// Drops what is queued for the completion queue at `cookie` and waits for the program to acknowledge
    /// what it took.
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

    fn armed(&self) -> bool {
        self.cq.get().is_some_and(|cq| self.channel.armed(cq))
    }

    fn fed_by(&self, source: Option<u64>) {
        if let Some(cq) = self.cq.get() {
            self.channel.fed_by(source, cq);
        }
    }
}

/// The next cookie, if there is one; `first` as [`wait`] gives it.
pub(super) fn next(channel: &Channel, first: bool) -> Option<u64> {
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
    wait(
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

/// An object's address as a cookie.
pub fn cookie<T>(c: *mut T) -> u64 {
    // Exposed: the cookie comes back as a pointer.
    c.expose_provenance() as u64
}

/// An object by its cookie.
pub(super) fn pointer<T>(cookie: u64) -> *mut T {
    std::ptr::with_exposed_provenance_mut(cookie as usize)
}

/// ibv_create_comp_channel(3).
///
/// # Safety
/// `context` is alive or NULL.
pub unsafe fn create_comp_channel(context: *mut ibv_context) -> Result<*mut ibv_comp_channel, Failure> {
    // Programs of 2006 call this function, too.
    let context = old::real_context(context);
    // SAFETY: the caller's promise.
    let opened = unsafe { look::<Context>(context) }?;
    let channel = Channel::new(opened.nic.engine())?;
    Ok(object::give(CChannel {
        c: Visible::new(ibv_comp_channel { context, fd: channel.fd(), refcnt: 0 }),
        channel,
        users: Users::default(),
        _context: opened.users.hold(),
    }))
}

/// ibv_destroy_comp_channel(3).
///
/// # Safety
/// `channel` is alive or NULL, and not used any more if this succeeds.
pub unsafe fn destroy_comp_channel(channel: *mut ibv_comp_channel) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        look::<CChannel>(channel)?.users.none()?;
        drop(object::take::<CChannel>(channel)?);
    }
    Ok(())
}

entry! {
    /// ibv_create_comp_channel(3).
    fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
        create_comp_channel(context)
    }

    /// ibv_destroy_comp_channel(3).
    fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> Code {
        destroy_comp_channel(channel)
    }
}
