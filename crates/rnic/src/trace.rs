//! Readable traces of segments and datagrams, for `UWARP_TRACE` and for golden tests.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};

use uwarp_process::OnceValue;
use uwarp_wire::ddp::Header;
use uwarp_wire::text::DatagramLine;

/// Direction of a segment or datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Sent by this end.
    Out,
    /// Received by this end.
    In,
}

/// `->`, `<-`
impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Out => "->",
            Self::In => "<-",
        })
    }
}

/// One segment as it passes.
#[derive(Debug, Clone, Copy)]
pub struct Segment<'a> {
    /// Number of the queue pair.
    pub qpn: u32,
    /// Direction.
    pub way: Way,
    /// DDP header.
    pub header: &'a Header,
    /// Start of the payload where it is an RDMAP header; may be empty.
    pub head: &'a [u8],
    /// Payload bytes in all.
    pub len: usize,
}

/// One datagram as it passes, or as it is dropped.
#[derive(Clone, Copy)]
pub struct Datagram<'a> {
    /// Number of the queue pair; none: it has reached no queue pair.
    pub qpn: Option<u32>,
    /// Direction.
    pub way: Way,
    /// Where it goes, or who sent it.
    pub peer: SocketAddr,
    /// The group that it was sent to, of a received one.
    pub group: Option<IpAddr>,
    /// Its start: all of its headers.
    pub head: &'a [u8],
    /// Bytes in all.
    pub len: usize,
    /// Why it goes no further.
    pub dropped: Option<&'a dyn fmt::Display>,
}

/// `-> 192.0.2.2:20000 UD src=0x4e2103 dst=0x4e2007 qkey=0x1 inc=0x9 Send L qn=0 msn=1 mo=0 len=11`
impl fmt::Display for Datagram<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Datagram { way, peer, head, len, .. } = *self;
        write!(f, "{way} {peer} ")?;
        if let Some(group) = self.group {
            write!(f, "group={group} ")?;
        }
        write!(f, "{}", DatagramLine { head, len })?;
        match self.dropped {
            Some(why) => write!(f, ", dropped: {why}"),
            None => Ok(()),
        }
    }
}

/// What passes.
#[derive(Clone, Copy)]
pub enum Passing<'a> {
    /// A segment of a connection.
    Segment(Segment<'a>),
    /// A datagram.
    Datagram(Datagram<'a>),
}

type Sink = dyn Fn(&Passing<'_>) + Send + Sync;

static ON: AtomicBool = AtomicBool::new(false);
static SINK: OnceValue<Box<Sink>> = OnceValue::new();

/// Passes every segment and every datagram from now on to `sink`, which must not block for long and must not
/// call into a queue pair. Only the first call has an effect.
pub fn start(sink: impl Fn(&Passing<'_>) + Send + Sync + 'static) {
    SINK.get_or_make(|| Box::new(sink));
    ON.store(true, Ordering::Release);
}

/// Whether there is a trace.
#[inline]
pub fn is_on() -> bool {
    ON.load(Ordering::Relaxed)
}

pub(crate) fn segment(qpn: u32, way: Way, header: &Header, head: &[u8], len: usize) {
    if is_on()
        && let Some(sink) = SINK.get()
    {
        sink(&Passing::Segment(Segment { qpn, way, header, head, len }));
    }
}

/// Traces a datagram. Ask [`is_on`] first where it costs something to know what it is.
pub fn datagram(datagram: Datagram<'_>) {
    if is_on()
        && let Some(sink) = SINK.get()
    {
        sink(&Passing::Datagram(datagram));
    }
}

/// The same for one that has reached no queue pair.
pub fn unclaimed(way: Way, peer: SocketAddr, bytes: &[u8], dropped: Option<&dyn fmt::Display>) {
    datagram(Datagram { qpn: None, way, peer, group: None, head: bytes, len: bytes.len(), dropped });
}
