//! Where the connection manager's events go: to one channel for all sockets of the process, which the engine
//! watches. So requests are accepted, and ends are noticed, while the program is elsewhere.

use std::collections::HashMap;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use rustix::io::Errno;
use uwarp_cm::{Cm, Event, EventChannel, EventKind, Id};
use uwarp_driver::{OncePerProcess, Readiness, Source};
use uwarp_process::Mutex;

use crate::stream::{Link, Stream};
use crate::wire::ConnData;

/// What acts on a listener's events.
pub trait Listens: Send + Sync {
    /// A peer wants to connect.
    fn requested(&self, id: Arc<Id>, private_data: &[u8]);
    /// The connection that was accepted under this key is there, or will not come.
    fn settled(&self, key: usize, established: bool);
}

enum Handler {
    Listener(Weak<dyn Listens>),
    Connecting(Weak<Stream>),
    Accepted(Weak<Stream>, Weak<dyn Listens>),
}

/// The channel, and which socket each of its ids belongs to.
pub struct Events {
    cm: Arc<Cm>,
    channel: Arc<EventChannel>,
    handlers: Mutex<HashMap<usize, Handler>, 23>,
    next_key: AtomicUsize,
    /// Calls to [`Self::serve`] that are not finished. Events are handled by one thread at a time, in order.
    calls: AtomicUsize,
}

static EVENTS: OncePerProcess<Arc<Events>, 5> = OncePerProcess::new();

impl Events {
    /// Those of this process; the first call opens the device.
    pub fn of_process() -> Result<Arc<Self>, Errno> {
        if let Some(events) = EVENTS.get() {
            return Ok(events);
        }
        let cm = Cm::of_process().map_err(|error| Errno::from_raw_os_error(error.errno()))?;
        EVENTS.get_or_make(|| {
            let channel =
                EventChannel::new(cm.nic()).map_err(|error| Errno::from_raw_os_error(error.errno()))?;
            let fd: RawFd = channel.fd();
            let events = Arc::new(Self {
                cm: Arc::clone(&cm),
                channel,
                handlers: Mutex::default(),
                next_key: AtomicUsize::new(1),
                calls: AtomicUsize::new(0),
            });
            cm.nic()
                .engine()
                .register(fd, Arc::clone(&events) as Arc<dyn Source>)
                .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::MFILE))?;
            Ok(events)
        })
    }

    /// The connection manager.
    pub fn cm(&self) -> &Arc<Cm> {
        &self.cm
    }

    /// A new id that reports here. Its events are handled once it has a handler.
    pub fn new_id(&self) -> Arc<Id> {
        let id = Id::new(&self.cm, &self.channel);
        id.set_cookie(self.next_key.fetch_add(1, Ordering::Relaxed));
        id
    }

    /// The events of this id are those of a listener.
    pub fn listen(&self, id: &Id, listener: Weak<dyn Listens>) {
        self.handlers.lock().insert(id.cookie(), Handler::Listener(listener));
    }

    /// The events of this id are those of a stream that connects.
    pub fn connect(&self, id: &Id, stream: &Arc<Stream>) {
        self.handlers.lock().insert(id.cookie(), Handler::Connecting(stream.downgrade()));
    }

    /// The events of this id, which a request has brought, are those of a stream that was accepted. Returns
    /// the id's key.
    pub fn accept(&self, id: &Id, stream: &Arc<Stream>, listener: Weak<dyn Listens>) -> usize {
        let key = self.next_key.fetch_add(1, Ordering::Relaxed);
        id.set_cookie(key);
        self.handlers.lock().insert(key, Handler::Accepted(stream.downgrade(), listener));
        key
    }

    /// Destroys an id.
    pub fn destroy(&self, id: &Id) {
        self.handlers.lock().remove(&id.cookie());
        id.destroy();
    }

    /// Handles the events that wait, or leaves them to the thread that is at it.
    fn serve(&self) {
        if self.calls.fetch_add(1, Ordering::AcqRel) > 0 {
            return;
        }
        loop {
            let calls = self.calls.load(Ordering::Acquire);
            while let Some(event) = self.channel.take_next(false) {
                self.handle(event);
            }
            if self.calls.compare_exchange(calls, 0, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                return;
            }
        }
    }

    fn handle(&self, mut event: Event) {
        let private_data = std::mem::take(&mut event.private_data);
        let (id, kind, status) = (Arc::clone(&event.id), event.kind, event.status);
        let owner = Arc::clone(event.owner());
        event.acknowledge();
        let handlers = self.handlers.lock();
        match handlers.get(&owner.cookie()) {
            None => {
                drop(handlers);
                // Its socket was closed.
                if kind == EventKind::ConnectRequest {
                    id.destroy();
                }
            }
            Some(Handler::Listener(listener)) => {
                let listener = listener.upgrade();
                drop(handlers);
                match listener {
                    Some(listener) if kind == EventKind::ConnectRequest => {
                        listener.requested(id, &private_data);
                    }
                    _ if kind == EventKind::ConnectRequest => id.destroy(),
                    _ => {}
                }
            }
            Some(Handler::Connecting(stream)) => {
                let stream = stream.upgrade();
                drop(handlers);
                if let Some(stream) = stream {
                    connecting(&stream, &id, kind, status, &private_data);
                }
            }
            Some(Handler::Accepted(stream, listener)) => {
                let (stream, listener) = (stream.upgrade(), listener.upgrade());
                let key = owner.cookie();
                drop(handlers);
                match kind {
                    EventKind::Established => listener.into_iter().for_each(|l| l.settled(key, true)),
                    EventKind::ConnectError | EventKind::Unreachable | EventKind::Disconnected => {
                        stream.into_iter().for_each(|stream| stream.set_link(Link::Gone));
                        listener.into_iter().for_each(|l| l.settled(key, false));
                    }
                    _ => {}
                }
            }
        }
    }
}

/// What happens to a stream that this end connects.
fn connecting(stream: &Stream, id: &Id, kind: EventKind, status: i32, private_data: &[u8]) {
    match kind {
        EventKind::Established => match ConnData::parse(private_data) {
            Some(peer) => stream.set_link(Link::Up(peer)),
            None => {
                tracing::warn!(
                    "the peer accepted the connection, but it does not speak the rsocket protocol"
                );
                stream.set_link(Link::Failed(Errno::OPNOTSUPP));
                // Established just now, so it can be ended.
                let _ = id.disconnect();
            }
        },
        EventKind::Disconnected => stream.set_link(Link::Gone),
        EventKind::Rejected => stream.set_link(Link::Failed(Errno::CONNREFUSED)),
        EventKind::Unreachable if status >= 0 => stream.set_link(Link::Failed(Errno::TIMEDOUT)),
        EventKind::AddressError | EventKind::ConnectError | EventKind::Unreachable => {
            stream.set_link(Link::Failed(errno_of(status)));
        }
        _ => {}
    }
}

fn errno_of(status: i32) -> Errno {
    match status.checked_neg().filter(|errno| (1..4096).contains(errno)) {
        Some(errno) => Errno::from_raw_os_error(errno),
        None => Errno::CONNREFUSED,
    }
}

impl Source for Events {
    fn ready(&self, _: Readiness) {
        self.serve();
    }

    fn timeout(&self) {}
}
