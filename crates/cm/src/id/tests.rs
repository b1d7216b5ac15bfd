//! Refusals of this host that no test from outside can bring about.

use std::fs::File;
use std::net::TcpListener;
use std::os::fd::AsFd as _;

use uwarp_driver::Nic;
use uwarp_llp::Link;
use uwarp_llp::carrier::{Close, Ends, Got, Listening, Refusal, SetUp, Watch};
use uwarp_rnic::qp::{QpCaps, QpInit};
use uwarp_rnic::{AsyncEvent, AsyncSink, Cq, Pd};

use super::*;
use crate::Timeouts;

struct Ignore;

impl AsyncSink for Ignore {
    fn async_event(&self, _: AsyncEvent) {}
}

/// What connects with this can be watched by no engine.
struct Unwatchable(Box<dyn Bound>);

struct UnwatchableConnection(Box<dyn SetUp>, File);

impl Bound for Unwatchable {
    fn local(&self) -> SocketAddr {
        self.0.local()
    }

    fn set_tos(&self, tos: u8) -> Result<(), Errno> {
        self.0.set_tos(tos)
    }

    fn listen(self: Box<Self>, backlog: usize) -> Result<Box<dyn Listening>, (Errno, Box<dyn Bound>)> {
        self.0.listen(backlog)
    }

    fn connect(self: Box<Self>, to: SocketAddr) -> Result<Box<dyn SetUp>, (Refusal, Box<dyn Bound>)> {
        let no_event = File::open("/dev/null").unwrap();
        self.0.connect(to).map(|inner| Box::new(UnwatchableConnection(inner, no_event)) as Box<dyn SetUp>)
    }

    fn watch(&self) -> Watch<'_> {
        self.0.watch()
    }
}

impl SetUp for UnwatchableConnection {
    fn ends(&self) -> Ends {
        self.0.ends()
    }

    fn set_tos(&self, tos: u8) -> Result<(), Errno> {
        self.0.set_tos(tos)
    }

    fn send_some(&self, bytes: &[u8]) -> Result<usize, Refusal> {
        self.0.send_some(bytes)
    }

    fn receive(&self, buffer: &mut [u8]) -> Result<Got, Refusal> {
        self.0.receive(buffer)
    }

    fn ended(&self) -> bool {
        self.0.ended()
    }

    fn close(self: Box<Self>, how: Close) {
        self.0.close(how);
    }

    fn watch(&self) -> Watch<'_> {
        Watch::Descriptor(self.1.as_fd())
    }

    fn into_link(self: Box<Self>) -> Link {
        self.0.into_link()
    }
}

/// The id could connect again, but from another port: the bound socket was gone with the attempt.
#[test]
fn an_id_that_may_not_connect_keeps_its_port() {
    let nic = Nic::open().unwrap();
    let cm = Cm::new(&nic, Timeouts::default());
    let channel = EventChannel::new(&nic).unwrap();
    let async_sink: Arc<dyn AsyncSink> = Arc::new(Ignore);
    let cq = Cq::new(8, 0, None, Arc::clone(&async_sink));
    let caps =
        QpCaps { max_send_wr: 1, max_recv_wr: 1, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
    let init = QpInit {
        pd: Pd::new(),
        send_cq: Arc::clone(&cq),
        recv_cq: cq,
        srq: None,
        caps,
        sq_sig_all: false,
        cookie: 0,
        async_sink,
    };
    let qp = Qp::create(&nic, init).unwrap();
    let peer = TcpListener::bind("127.0.0.1:0").unwrap();
    let id = Id::new(&cm, &channel);
    id.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let address = id.local_address().unwrap();
    id.resolve_address(None, peer.local_addr().unwrap()).unwrap();
    id.resolve_route().unwrap();
    {
        let mut inner = id.inner.lock();
        let bound = inner.bound.take().unwrap();
        inner.bound = Some(Box::new(Unwatchable(bound)));
    }
    assert_eq!(id.connect(&qp, ConnParam::DEFAULT, b""), Err(CmError::System(Errno::PERM)));
    assert_eq!((id.state(), id.local_address()), (State::RouteResolved, Some(address)));
    assert_eq!(peer.accept().unwrap().1, address, "the attempt that was given up");
    id.connect(&qp, ConnParam::DEFAULT, b"").unwrap();
    assert_eq!(peer.accept().unwrap().1, address);
    id.destroy();
    qp.destroy();
}
