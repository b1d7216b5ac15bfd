//! Takes events from a channel, and updates the id that C sees.

use std::ffi::c_int;
use std::net::SocketAddr;
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

use uwarp_abi_types::rdmacm::*;
use uwarp_abi_types::verbs::IBV_QPS_RTS;
use uwarp_cm::{Event, EventChannel, EventKind, GetError, bringup};
use uwarp_driver::address;

use super::channel;
use super::event;
use super::id::{self, CId};
use crate::failure::{Failure, required};
use crate::ibverbs::qp::CQp;
use crate::object::{look, zeroed};
use crate::wait;

/// How long a call on a destroyed channel waits before it fails. With a kernel, a thread that begins to wait
/// after the program's last acknowledgement would usually be waiting already, until the process ends; rping
/// exits with an error if its wait fails. Longer than our streams take to close at exit.
const GONE: Duration = Duration::from_secs(4);

/// Takes the next event and updates its id. Waits for an event unless the program set the channel's
/// descriptor to non-blocking.
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
        Err(GetError::Closed) => Err(destroyed()),
    }
}

fn destroyed() -> Failure {
    Failure::new(libc::EBADF, "another thread has destroyed the id")
}

/// The next event, if there is one; `first` as [`wait::wait`] gives it.
///
/// # Safety
/// As [`next`].
pub unsafe fn take_next(queue: &EventChannel, first: bool) -> Result<Option<*mut rdma_cm_event>, Failure> {
    if queue.is_closed() {
        return Err(destroyed());
    }
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
    let answer = wait::wait(
        "rdma_get_cm_event",
        || {
            required(event, "event")?;
            channel::queue(channel).inspect_err(|failure| gone = failure.errno == libc::EBADF)
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
        wait::sleep(GONE);
    }
    answer
}

/// Waits for the event that answers a call, if the id is one whose calls block; keeps it in `id->event`, and
/// turns a status into an errno. If another thread destroys the id meanwhile, the id is gone afterwards.
///
/// # Safety
/// The program has the id and its channel alive and does not use them in another call, as librdmacm demands.
pub unsafe fn complete(cid: &CId) -> Result<(), Failure> {
    if !cid.is_sync() {
        return Ok(());
    }
    let c = cid.c();
    // SAFETY: the caller's promise, here and below.
    unsafe {
        cid.acknowledge_kept();
        let taken = next((*c).channel)?;
        // First: another thread may acknowledge it.
        let (kind, status) = ((*taken).event, (*taken).status);
        if !cid.keep(taken) {
            event::acknowledge(taken);
            return Err(destroyed());
        }
        match (kind, status) {
            (_, 0) => Ok(()),
            (RDMA_CM_EVENT_REJECTED, _) => Err(Failure::new(libc::ECONNREFUSED, "rejected")),
            (_, status) => Err(Failure::new(status.abs(), "the status of the event that answers the call")),
        }
    }
}

/// # Safety
/// As [`next`].
unsafe fn show(event: Event) -> Result<*mut rdma_cm_event, Failure> {
    // SAFETY: plain C data.
    let mut c: rdma_cm_event = unsafe { zeroed() };
    c.event = event::number(event.kind);
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
            EventKind::Established if event.datagram.is_some() => cid.show_addresses(),
            EventKind::MulticastJoin => {
                if let Some(to) = &event.datagram
                    && let Err(failure) = attach(c.id, to.local, to.peer)
                {
                    c.event = RDMA_CM_EVENT_MULTICAST_ERROR;
                    c.status = -failure.errno;
                }
            }
            EventKind::Established => {
                cid.show_addresses();
                if !(*c.id).qp.is_null() {
                    if let Ok(rc) = look::<CQp>((*c.id).qp).and_then(CQp::rc) {
                        bringup::established(rc);
                    }
                    (*(*c.id).qp).state = IBV_QPS_RTS;
                }
            }
            _ => {}
        }
    }
    event::explain(&event);
    event::give(c, event)
}

/// Attaches the id's queue pair, if it has one, to a group that it joins.
///
/// # Safety
/// The id and its queue pair are alive.
unsafe fn attach(id: *mut rdma_cm_id, local: SocketAddr, group: SocketAddr) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        let receives = look::<CId>(id)?
            .private
            .lock()
            .groups
            .iter()
            .any(|joined| joined.address == group && joined.receives);
        if (*id).qp.is_null() || !receives {
            return Ok(());
        }
        let interface = match local.ip() {
            ip if ip.is_loopback() => address::loopback_interface(),
            ip => address::all().into_iter().find(|own| own.ip == ip).map_or(0, |own| own.index),
        };
        look::<CQp>((*id).qp)?.ud()?.attach(group.ip(), interface)?;
    }
    Ok(())
}

/// The id of a request, with a channel of its own or the listener's, as the listener has it.
///
/// # Safety
/// `listener` is alive.
unsafe fn new_id(event: &Event, listener: *mut rdma_cm_id) -> Result<*mut rdma_cm_id, Failure> {
    // SAFETY: the caller's promise; no other code has the new id yet.
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
