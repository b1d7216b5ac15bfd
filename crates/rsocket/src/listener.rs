//! A listening socket: connections are accepted as they come, up to its backlog, and wait for `raccept`.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};

use rustix::io::Errno;
use uwarp_cm::Id;
use uwarp_process::Mutex;

use crate::events::{Events, Listens};
use crate::machine::Sizes;
use crate::stream::{Link, Stream};
use crate::waiting::Waiters;
use crate::wire::ConnData;

/// Requests that wait beside the backlog, until one of the connections in front is taken.
const MOST_WAITING: usize = 1024;

/// A connection that a listener has accepted.
pub struct Connection {
    /// Its id.
    pub id: Arc<Id>,
    /// Its stream.
    pub stream: Arc<Stream>,
    peer: ConnData,
}

#[derive(Default)]
struct Queue {
    closed: bool,
    /// Not accepted yet.
    requests: VecDeque<(Arc<Id>, ConnData)>,
    /// Accepted; the peer must confirm. By their keys.
    accepting: HashMap<usize, Connection>,
    /// For the program.
    ready: VecDeque<Connection>,
}

/// A listening socket.
pub struct Listener {
    me: Weak<Self>,
    events: Arc<Events>,
    id: Arc<Id>,
    sizes: Mutex<Sizes, 29>,
    backlog: usize,
    waiters: Arc<Waiters>,
    queue: Mutex<Queue, 22>,
}

impl Listener {
    /// Listens. `sizes`: of the connections.
    pub fn start(
        events: &Arc<Events>,
        id: &Arc<Id>,
        sizes: Sizes,
        backlog: i32,
        waiters: &Arc<Waiters>,
    ) -> Result<Arc<Self>, Errno> {
        // As of the kernel's sockets: one more than requested.
        let backlog = usize::try_from(backlog).unwrap_or(0).min(4096) + 1;
        let listener = Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            events: Arc::clone(events),
            id: Arc::clone(id),
            sizes: Mutex::new(sizes),
            backlog,
            waiters: Arc::clone(waiters),
            queue: Mutex::default(),
        });
        events.listen(id, listener.as_listens());
        id.listen(0).map_err(|error| Errno::from_raw_os_error(error.errno()))?;
        Ok(listener)
    }

    fn as_listens(&self) -> Weak<dyn Listens> {
        self.me.clone()
    }

    /// Its id.
    pub fn id(&self) -> &Arc<Id> {
        &self.id
    }

    /// The sizes of connections that come from now on.
    pub fn set_sizes(&self, sizes: Sizes) {
        *self.sizes.lock() = sizes;
    }

    /// The next connection.
    pub fn take(&self) -> Option<Connection> {
        let connection = self.queue.lock().ready.pop_front();
        if connection.is_some() {
            self.accept_waiting();
        }
        connection
    }

    /// Whether a connection waits.
    pub fn has_connection(&self) -> bool {
        !self.queue.lock().ready.is_empty()
    }

    /// Accepts the oldest request, if there is room now.
    fn accept_waiting(&self) {
        let mut queue = self.queue.lock();
        if queue.accepting.len() + queue.ready.len() >= self.backlog {
            return;
        }
        let Some((id, peer)) = queue.requests.pop_front() else { return };
        drop(queue);
        self.accept(id, peer);
    }

    fn accept(&self, id: Arc<Id>, peer: ConnData) {
        let waiters = Arc::new(Waiters::default());
        let sizes = *self.sizes.lock();
        let stream = match Stream::new(self.events.cm(), sizes, &waiters) {
            Ok(stream) => stream,
            Err(errno) => {
                tracing::warn!("cannot accept a connection: {errno}");
                return id.destroy();
            }
        };
        let key = self.events.accept(&id, &stream, self.as_listens());
        let mut queue = self.queue.lock();
        if queue.closed {
            drop(queue);
            return self.events.destroy(&id);
        }
        let connection = Connection { id: Arc::clone(&id), stream: Arc::clone(&stream), peer };
        queue.accepting.insert(key, connection);
        drop(queue);
        if let Err(error) = id.accept(stream.qp(), None, &stream.conn_data()) {
            tracing::debug!("a connection was not accepted: {error}");
            self.settled(key, false);
        }
    }

    /// Stops; connections that the program has not taken are closed.
    pub fn close(&self) {
        self.events.destroy(&self.id);
        let mut queue = self.queue.lock();
        queue.closed = true;
        let Queue { requests, accepting, ready, .. } = std::mem::take(&mut *queue);
        queue.closed = true;
        drop(queue);
        for (id, _) in requests {
            id.destroy();
        }
        for connection in accepting.into_values().chain(ready) {
            self.events.destroy(&connection.id);
        }
    }
}

impl Listens for Listener {
    fn requested(&self, id: Arc<Id>, private_data: &[u8]) {
        let Some(peer) = ConnData::parse(private_data) else {
            tracing::warn!("a peer connects that does not speak the rsocket protocol");
            return id.destroy();
        };
        let mut queue = self.queue.lock();
        if queue.closed || queue.requests.len() >= MOST_WAITING {
            drop(queue);
            return id.destroy();
        }
        queue.requests.push_back((id, peer));
        drop(queue);
        self.accept_waiting();
    }

    fn settled(&self, key: usize, established: bool) {
        let mut queue = self.queue.lock();
        let Some(connection) = queue.accepting.remove(&key) else { return };
        if established {
            connection.stream.set_link(Link::Up(connection.peer));
            queue.ready.push_back(connection);
            drop(queue);
            self.waiters.wake();
        } else {
            drop(queue);
            self.events.destroy(&connection.id);
            drop(connection);
            self.accept_waiting();
        }
    }
}
