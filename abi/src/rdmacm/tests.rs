//! The C interface as programs use it: with events, and with calls that block.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use libc::sockaddr_storage;
use uwarp_abi_types::rdmacm::*;
use uwarp_abi_types::verbs::*;

use super::address;
use super::addrinfo::*;
use super::channel::*;
use super::connection::*;
use super::device::*;
use super::endpoint::*;
use super::event::*;
use super::id::*;
use super::multicast::*;
use super::qp::*;
use super::rsocket::rsocket;
use super::take::*;
use crate::failure::errno;
use crate::object::zeroed;

/// Longest a test waits for what has to come; reached only when it fails.
const PATIENCE: Duration = Duration::from_secs(60);

fn at(text: &str) -> sockaddr_storage {
    address::storage(text.parse().unwrap()).0
}

/// What a call returned, and errno if it failed.
fn outcome(code: c_int) -> Result<(), c_int> {
    if code == 0 { Ok(()) } else { Err(errno()) }
}

/// A pointer that another thread may have.
struct Sent<T>(*mut T);
// SAFETY: ids and channels may be used from any thread.
unsafe impl<T> Send for Sent<T> {}

impl<T> Sent<T> {
    fn get(self) -> *mut T {
        self.0
    }
}

unsafe fn new_id(channel: *mut rdma_event_channel) -> *mut rdma_cm_id {
    let mut id = null_mut();
    // SAFETY: the channel is alive or NULL.
    assert_eq!(outcome(unsafe { rdma_create_id(channel, &raw mut id, null_mut(), RDMA_PS_TCP) }), Ok(()));
    id
}

unsafe fn next(channel: *mut rdma_event_channel, kind: rdma_cm_event_type) -> *mut rdma_cm_event {
    // SAFETY: the channel is alive.
    unsafe {
        let mut poll = libc::pollfd { fd: (*channel).fd, events: libc::POLLIN, revents: 0 };
        assert_eq!(libc::poll(&raw mut poll, 1, PATIENCE.as_millis() as c_int), 1, "no event came");
        let mut event = null_mut();
        assert_eq!(outcome(rdma_get_cm_event(channel, &raw mut event)), Ok(()));
        assert_eq!((*event).event, kind, "{:?}", CStr::from_ptr(rdma_event_str((*event).event)));
        event
    }
}

unsafe fn take(channel: *mut rdma_event_channel, kind: rdma_cm_event_type) {
    // SAFETY: the channel is alive.
    assert_eq!(outcome(unsafe { rdma_ack_cm_event(next(channel, kind)) }), Ok(()));
}

fn attr() -> ibv_qp_init_attr {
    // SAFETY: plain C data.
    let mut attr: ibv_qp_init_attr = unsafe { zeroed() };
    attr.cap =
        ibv_qp_cap { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 16 };
    attr.qp_type = IBV_QPT_RC;
    attr.sq_sig_all = 1;
    attr
}

fn parameters(data: &'static [u8]) -> rdma_conn_param {
    // SAFETY: plain C data.
    let mut param: rdma_conn_param = unsafe { zeroed() };
    param.private_data = data.as_ptr().cast();
    param.private_data_len = data.len() as u8;
    param.responder_resources = 2;
    param.initiator_depth = 3;
    param.rnr_retry_count = 7;
    param
}

unsafe fn data_of<'a>(event: *mut rdma_cm_event) -> &'a [u8] {
    // SAFETY: the event is one of a connection and not acknowledged yet.
    unsafe {
        let conn = (*event).param.conn;
        if conn.private_data.is_null() {
            return &[];
        }
        std::slice::from_raw_parts(conn.private_data.cast(), conn.private_data_len.into())
    }
}

/// Resolves address and route to this port of loopback, and checks what each shows in the id.
///
/// # Safety
/// As the man pages say.
unsafe fn resolve_with_device(active: *mut rdma_cm_id, port: u16) {
    // SAFETY: the caller's promise.
    unsafe {
        let client = (*active).channel;
        let mut address = at(&format!("127.0.0.1:{port}"));
        assert_eq!(outcome(rdma_resolve_addr(active, null_mut(), (&raw mut address).cast(), 2000)), Ok(()));
        assert!((*active).verbs.is_null(), "known when the event is taken");
        take(client, RDMA_CM_EVENT_ADDR_RESOLVED);
        assert!(!(*active).verbs.is_null() && !(*active).pd.is_null());
        assert_eq!((*active).port_num, 1);
        assert_eq!(u16::from_be(rdma_get_dst_port(active)), port);
        assert_eq!(outcome(rdma_resolve_route(active, 2000)), Ok(()));
        take(client, RDMA_CM_EVENT_ROUTE_RESOLVED);
        assert_eq!((*active).route.num_paths, 1, "as RoCE there is a path record");
        let path = &*(*active).route.path_rec;
        assert_eq!((path.sgid.raw, path.pkey), ((*active).route.addr.addr.ibaddr.sgid.raw, 0xFFFF));
    }
}

#[test]
fn a_connection_by_events() {
    // SAFETY: used as the man pages say.
    unsafe {
        let (server, client) = (rdma_create_event_channel(), rdma_create_event_channel());
        let listener = new_id(server);
        let mut context = 7;
        (*listener).context = (&raw mut context).cast::<c_void>();
        let mut address = at("127.0.0.1:0");
        assert_eq!(outcome(rdma_bind_addr(listener, (&raw mut address).cast())), Ok(()));
        assert!((*listener).verbs.is_null() && (*listener).pd.is_null(), "loopback says no device");
        let port = u16::from_be(rdma_get_src_port(listener));
        assert_ne!(port, 0);
        assert_eq!(outcome(rdma_listen(listener, 3)), Ok(()));

        let active = new_id(client);
        resolve_with_device(active, port);

        let mut wanted = attr();
        assert_eq!(outcome(rdma_create_qp(active, null_mut(), &raw mut wanted)), Ok(()));
        assert_eq!((*(*active).qp).state, IBV_QPS_INIT);
        assert!(!wanted.send_cq.is_null() && wanted.send_cq == (*active).send_cq);
        assert_eq!((*(*active).recv_cq).cq_context, active.cast());
        assert_eq!((*(*active).recv_cq).channel, (*active).recv_cq_channel);
        assert_eq!(
            outcome(rdma_create_qp(active, null_mut(), &raw mut wanted)),
            Err(libc::EINVAL),
            "has one"
        );
        assert_eq!(outcome(rdma_connect(active, &mut parameters(b"hello"))), Ok(()));
        assert_ne!(rdma_get_src_port(active), 0);

        let request = next(server, RDMA_CM_EVENT_CONNECT_REQUEST);
        assert_eq!((*request).listen_id, listener);
        assert_eq!(data_of(request), b"hello");
        let conn = (*request).param.conn;
        assert_eq!((conn.responder_resources, conn.initiator_depth), (3, 2));
        let passive = (*request).id;
        assert_eq!(((*passive).context, (*passive).channel), ((*listener).context, server));
        assert_eq!(rdma_get_dst_port(passive), rdma_get_src_port(active));
        let mut wanted = attr();
        assert_eq!(outcome(rdma_create_qp(passive, (*passive).pd, &raw mut wanted)), Ok(()));
        // The event's own parameters, as rping does it.
        assert_eq!(outcome(rdma_accept(passive, &raw mut (*request).param.conn)), Ok(()));
        rdma_ack_cm_event(request);

        let established = next(client, RDMA_CM_EVENT_ESTABLISHED);
        assert_eq!(((*established).status, data_of(established)), (0, b"hello".as_slice()));
        assert_eq!((*established).param.conn.qp_num, (*(*passive).qp).qp_num);
        rdma_ack_cm_event(established);
        take(server, RDMA_CM_EVENT_ESTABLISHED);
        assert_eq!((*(*active).qp).state, IBV_QPS_RTS);
        assert_eq!(
            (*passive).route.addr.anon_2.dst_sin.sin_port,
            (*active).route.addr.anon_1.src_sin.sin_port
        );
        assert_eq!(outcome(rdma_notify(active, IBV_EVENT_COMM_EST)), Ok(()));

        assert_eq!(outcome(rdma_disconnect(active)), Ok(()));
        take(client, RDMA_CM_EVENT_DISCONNECTED);
        take(server, RDMA_CM_EVENT_DISCONNECTED);
        for id in [active, passive] {
            rdma_destroy_qp(id);
            assert!((*id).qp.is_null() && (*id).send_cq.is_null() && (*id).recv_cq_channel.is_null());
            assert_eq!(outcome(rdma_destroy_id(id)), Ok(()));
        }
        assert_eq!(outcome(rdma_destroy_id(listener)), Ok(()));
        rdma_destroy_event_channel(server);
        rdma_destroy_event_channel(client);
    }
}

#[test]
fn endpoints_whose_calls_block() {
    // SAFETY: used as the man pages say.
    unsafe {
        let mut hints: rdma_addrinfo = zeroed();
        hints.ai_flags = RAI_PASSIVE.cast_signed();
        hints.ai_port_space = RDMA_PS_TCP.cast_signed();
        hints.ai_family = libc::AF_INET;
        let mut res = null_mut();
        assert_eq!(rdma_getaddrinfo(null(), c"0".as_ptr(), &raw const hints, &raw mut res), 0);
        let mut listener = null_mut();
        assert_eq!(outcome(rdma_create_ep(&raw mut listener, res, null_mut(), &mut attr())), Ok(()));
        rdma_freeaddrinfo(res);
        assert!((*listener).verbs.is_null(), "a wildcard says no device");
        assert_eq!(outcome(rdma_listen(listener, 0)), Ok(()));
        let port = u16::from_be(rdma_get_src_port(listener));

        let (established, wait) = mpsc::channel();
        let sent = Sent(listener);
        let server = std::thread::spawn(move || {
            let listener = sent.get();
            let mut id = null_mut();
            assert_eq!(outcome(rdma_get_request(listener, &raw mut id)), Ok(()));
            assert!(!(*id).qp.is_null(), "made with the endpoint's attributes");
            assert_eq!(data_of((*id).event), b"please");
            assert_ne!((*id).channel, (*listener).channel);
            assert_eq!(outcome(rdma_accept(id, null_mut())), Ok(()));
            assert_eq!((*(*id).event).event, RDMA_CM_EVENT_ESTABLISHED);
            established.send(()).unwrap();
            // The client ends it; the event is there when we look.
            assert_eq!(outcome(rdma_disconnect(id)), Ok(()));
            assert_eq!((*(*id).event).event, RDMA_CM_EVENT_DISCONNECTED);
            assert_eq!(outcome(rdma_disconnect(id)), Ok(()), "does not wait for a second one");
            rdma_destroy_ep(id);

            assert_eq!(outcome(rdma_get_request(listener, &raw mut id)), Ok(()));
            assert_eq!(outcome(rdma_reject(id, c"no".as_ptr().cast(), 2)), Ok(()));
            rdma_destroy_ep(id);
        });

        let service = std::ffi::CString::new(port.to_string()).unwrap();
        hints.ai_flags = 0;
        let connect = |data: &'static [u8]| {
            let mut res = null_mut();
            assert_eq!(
                rdma_getaddrinfo(c"127.0.0.1".as_ptr(), service.as_ptr(), &raw const hints, &raw mut res),
                0
            );
            let mut id = null_mut();
            assert_eq!(outcome(rdma_create_ep(&raw mut id, res, null_mut(), &mut attr())), Ok(()));
            rdma_freeaddrinfo(res);
            let code = outcome(rdma_connect(id, &mut parameters(data)));
            (id, code)
        };
        let (id, code) = connect(b"please");
        assert_eq!(code, Ok(()));
        assert_eq!((*(*id).event).event, RDMA_CM_EVENT_ESTABLISHED);
        wait.recv_timeout(PATIENCE).unwrap();
        assert_eq!(outcome(rdma_disconnect(id)), Ok(()));
        rdma_destroy_ep(id);

        let (id, code) = connect(b"");
        assert_eq!(code, Err(libc::ECONNREFUSED));
        assert_eq!((*(*id).event).event, RDMA_CM_EVENT_REJECTED);
        assert_eq!(data_of((*id).event), b"no");
        rdma_destroy_ep(id);
        server.join().unwrap();
        rdma_destroy_ep(listener);

        let (id, code) = connect(b"");
        assert_eq!(code, Err(libc::ECONNREFUSED), "nobody listens any more");
        assert_eq!((*(*id).event).status, 8, "IB_CM_REJ_INVALID_SERVICE_ID");
        rdma_destroy_ep(id);
    }
}

#[test]
fn options_and_what_is_refused() {
    // SAFETY: used as the man pages say.
    unsafe {
        let channel = rdma_create_event_channel();
        let id = new_id(channel);
        let set = |name: u32, value: &[u8]| {
            let value = value.as_ptr().cast_mut().cast();
            outcome(rdma_set_option(id, 0, name.cast_signed(), value, option_length(name)))
        };
        fn option_length(name: u32) -> usize {
            if matches!(name, RDMA_OPTION_ID_TOS | RDMA_OPTION_ID_ACK_TIMEOUT) { 1 } else { 4 }
        }
        assert_eq!(set(RDMA_OPTION_ID_TOS, &[0x28]), Ok(()));
        assert_eq!(set(RDMA_OPTION_ID_REUSEADDR, &[1, 0, 0, 0]), Ok(()));
        assert_eq!(set(RDMA_OPTION_ID_AFONLY, &[1, 0, 0, 0]), Ok(()));
        assert_eq!(set(RDMA_OPTION_ID_ACK_TIMEOUT, &[14]), Ok(()));
        assert_eq!(set(17, &[0; 4]), Err(libc::ENOSYS));
        let mut tos = 1u32;
        assert_eq!(outcome(rdma_set_option(id, 0, 0, (&raw mut tos).cast(), 4)), Err(libc::EINVAL));
        assert_eq!(outcome(rdma_set_option(id, 1, 1, (&raw mut tos).cast(), 4)), Err(libc::EOPNOTSUPP));
        let mut address = at("127.0.0.1:0");
        assert_eq!(outcome(rdma_bind_addr(id, (&raw mut address).cast())), Ok(()));
        assert_eq!(set(RDMA_OPTION_ID_REUSEADDR, &[0; 4]), Err(libc::EINVAL), "bound");
        assert_eq!(outcome(rdma_listen(id, 0)), Ok(()));
        assert_eq!(set(RDMA_OPTION_ID_AFONLY, &[0; 4]), Err(libc::EINVAL), "listening");
        assert_eq!(outcome(rdma_connect(id, null_mut())), Err(libc::EINVAL));
        assert_eq!(outcome(rdma_accept(id, null_mut())), Err(libc::EINVAL));
        assert_eq!(outcome(rdma_reject(id, null(), 0)), Err(libc::EINVAL));
        assert_eq!(outcome(rdma_disconnect(id)), Err(libc::EINVAL));
        assert_eq!(outcome(rdma_establish(id)), Err(libc::EINVAL));
        assert_eq!(outcome(rdma_notify(id, 0)), Err(libc::EINVAL));
        let mut out = null_mut();
        assert_eq!(outcome(rdma_get_request(id, &raw mut out)), Err(libc::EINVAL), "reports to a channel");
        rdma_destroy_id(id);

        let mut id = null_mut();
        assert_eq!(outcome(rdma_create_id(channel, &raw mut id, null_mut(), 5)), Err(libc::EINVAL));
        let id = new_id(channel);
        let mut wanted = attr();
        assert_eq!(
            outcome(rdma_create_qp(id, null_mut(), &raw mut wanted)),
            Err(libc::EINVAL),
            "no device yet"
        );
        let mut elsewhere = at("192.0.2.1:0");
        assert_eq!(outcome(rdma_bind_addr(id, (&raw mut elsewhere).cast())), Err(libc::EADDRNOTAVAIL));
        elsewhere.ss_family = 27; // AF_IB
        assert_eq!(outcome(rdma_bind_addr(id, (&raw mut elsewhere).cast())), Err(libc::EINVAL));
        assert_eq!(
            outcome(rdma_join_multicast(id, (&raw mut elsewhere).cast(), null_mut())),
            Err(libc::EINVAL)
        );
        assert_eq!((rsocket(libc::AF_UNIX, libc::SOCK_STREAM, 0), errno()), (-1, libc::EOPNOTSUPP));
        rdma_destroy_id(id);
        assert_eq!(outcome(rdma_ack_cm_event(null_mut())), Err(libc::EINVAL));

        let flags = libc::fcntl((*channel).fd, libc::F_GETFL);
        libc::fcntl((*channel).fd, libc::F_SETFL, flags | libc::O_NONBLOCK);
        let mut event = null_mut();
        assert_eq!(outcome(rdma_get_cm_event(channel, &raw mut event)), Err(libc::EAGAIN));
        rdma_destroy_event_channel(channel);
    }
}

#[test]
fn moving_between_channels() {
    // SAFETY: used as the man pages say.
    unsafe {
        let (first, second) = (rdma_create_event_channel(), rdma_create_event_channel());
        let id = new_id(first);
        let mut address = at("127.0.0.1:9");
        rdma_resolve_addr(id, null_mut(), (&raw mut address).cast(), 0);
        assert_eq!(outcome(rdma_migrate_id(id, second)), Ok(()));
        assert_eq!((*id).channel, second);
        take(second, RDMA_CM_EVENT_ADDR_RESOLVED);
        // To a channel of its own: from now on calls block.
        assert_eq!(outcome(rdma_migrate_id(id, null_mut())), Ok(()));
        assert_eq!(outcome(rdma_migrate_id(id, null_mut())), Err(libc::EINVAL));
        assert_eq!(outcome(rdma_resolve_route(id, 0)), Ok(()));
        assert_eq!((*(*id).event).event, RDMA_CM_EVENT_ROUTE_RESOLVED);
        assert_eq!(outcome(rdma_migrate_id(id, first)), Ok(()));
        assert!((*id).event.is_null());
        assert_eq!(outcome(rdma_write_cm_event(id, RDMA_CM_EVENT_USER, -3, 0x1234_5678_9ABC)), Ok(()));
        assert_eq!(outcome(rdma_write_cm_event(id, RDMA_CM_EVENT_ESTABLISHED, 0, 0)), Err(libc::EINVAL));
        let event = next(first, RDMA_CM_EVENT_USER);
        assert_eq!(((*event).id, (*event).status, (*event).param.arg), (id, -3, 0x1234_5678_9ABC));

        // rdma_destroy_id waits for the acknowledgement.
        let (done, waiting) = mpsc::channel();
        let sent = Sent(id);
        let destroyer = std::thread::spawn(move || {
            rdma_destroy_id(sent.get());
            done.send(()).unwrap();
        });
        assert!(waiting.recv_timeout(Duration::from_millis(50)).is_err());
        rdma_ack_cm_event(event);
        waiting.recv_timeout(PATIENCE).unwrap();
        destroyer.join().unwrap();
        rdma_destroy_event_channel(first);
        rdma_destroy_event_channel(second);
    }
}

#[test]
fn names_resolved_by_event() {
    // SAFETY: used as the man pages say.
    unsafe {
        let channel = rdma_create_event_channel();
        let id = new_id(channel);
        let mut info = null_mut();
        assert_eq!(outcome(rdma_query_addrinfo(id, &raw mut info)), Err(libc::ENOENT));
        for _ in 0..2 {
            let resolve =
                || outcome(rdma_resolve_addrinfo(id, c"127.0.0.1".as_ptr(), c"80".as_ptr(), null()));
            assert_eq!(resolve(), Ok(()));
            assert_eq!(resolve(), Err(libc::EBUSY));
            take(channel, RDMA_CM_EVENT_ADDRINFO_RESOLVED);
            assert_eq!(outcome(rdma_query_addrinfo(id, &raw mut info)), Ok(()));
            assert_eq!(address::load((*info).ai_dst_addr).unwrap(), "127.0.0.1:80".parse().unwrap());
            rdma_freeaddrinfo(info);
        }
        // A result that nobody takes goes with the id.
        rdma_resolve_addrinfo(id, c"127.0.0.1".as_ptr(), null(), null());
        rdma_destroy_id(id);
        rdma_destroy_event_channel(channel);
    }
}

#[test]
fn devices_and_attributes() {
    // SAFETY: used as the man pages say.
    unsafe {
        let mut count = 0;
        let list = rdma_get_devices(&raw mut count);
        assert_eq!(count, 1);
        assert!(!(*list).is_null() && (*list.add(1)).is_null());
        let channel = rdma_create_event_channel();
        let id = new_id(channel);
        let mut qp_attr: ibv_qp_attr = zeroed();
        let mut mask = 0;
        qp_attr.qp_state = IBV_QPS_INIT;
        assert_eq!(
            outcome(rdma_init_qp_attr(id, &raw mut qp_attr, &raw mut mask)),
            Err(libc::EINVAL),
            "no device"
        );
        let mut address = at("127.0.0.1:0");
        rdma_resolve_addr(id, null_mut(), (&raw mut address).cast(), 2000);
        take(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
        assert_eq!((*id).verbs, *list);
        rdma_free_devices(list);
        assert_eq!(outcome(rdma_init_qp_attr(id, &raw mut qp_attr, &raw mut mask)), Ok(()));
        let init = IBV_QP_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
        assert_eq!(mask.cast_unsigned(), init, "as for InfiniBand");
        assert_eq!(qp_attr.port_num, 1);
        qp_attr.qp_state = IBV_QPS_ERR;
        assert_eq!(outcome(rdma_init_qp_attr(id, &raw mut qp_attr, &raw mut mask)), Err(libc::EINVAL));
        let mut ece: ibv_ece = zeroed();
        assert_eq!(outcome(rdma_set_local_ece(id, &raw mut ece)), Err(libc::EINVAL));
        ece.vendor_id = 1;
        assert_eq!(outcome(rdma_set_local_ece(id, &raw mut ece)), Ok(()));
        assert_eq!(outcome(rdma_get_remote_ece(id, &raw mut ece)), Ok(()));
        assert_eq!(ece.vendor_id, 0);
        rdma_destroy_id(id);
        rdma_destroy_event_channel(channel);
    }
}

/// Waits until a thread of this process sleeps, and not for a moment only.
fn until_asleep(thread: libc::pid_t) {
    let (end, mut asleep) = (Instant::now() + PATIENCE, 0);
    while asleep < 50 {
        let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
        let sleeps = stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('S'));
        asleep = if sleeps { asleep + 1 } else { 0 };
        assert!(Instant::now() < end, "the thread does not sleep");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// rping destroys its channel while a thread waits there, and then exits.
#[test]
fn a_channel_destroyed_under_a_waiting_thread() {
    // SAFETY: the channel is alive when the thread begins to wait; afterwards nobody uses it.
    unsafe {
        let channel = rdma_create_event_channel();
        let id = new_id(channel);
        let sent = Sent(channel);
        let (begun, waiting) = mpsc::channel();
        let waiter = std::thread::spawn(move || {
            let channel = sent.get();
            let mut event = null_mut();
            begun.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
            rdma_get_cm_event(channel, &raw mut event);
        });
        until_asleep(waiting.recv().unwrap());
        rdma_destroy_id(id);
        rdma_destroy_event_channel(channel);
        // What wakes the sockets wakes the thread too.
        for _ in 0..50 {
            let mut address = at("127.0.0.1:0");
            let other = rdma_create_event_channel();
            let listener = new_id(other);
            rdma_bind_addr(listener, (&raw mut address).cast());
            rdma_listen(listener, 0);
            let at = (*listener).route.addr.anon_1.src_sin;
            drop(std::net::TcpStream::connect(("127.0.0.1", u16::from_be(at.sin_port))).unwrap());
            rdma_destroy_id(listener);
            rdma_destroy_event_channel(other);
        }
        assert!(!waiter.is_finished(), "no event came");
        assert_eq!(
            outcome(rdma_create_id(channel, &mut null_mut(), null_mut(), RDMA_PS_TCP)),
            Err(libc::EBADF)
        );
        rdma_destroy_event_channel(channel);
    }
}

/// Whether a call that blocks on an id returns an error when another thread destroys the id.
///
/// # Safety
/// The id is one whose calls block; only `call` uses it.
unsafe fn ends_with_its_id(id: *mut rdma_cm_id, call: unsafe fn(*mut rdma_cm_id) -> c_int) -> bool {
    let sent = Sent(id);
    let (begun, waiting) = mpsc::channel();
    let (ended, end) = mpsc::channel();
    std::thread::spawn(move || {
        let id = sent.get();
        // SAFETY: it has no conditions.
        begun.send(unsafe { libc::gettid() }).unwrap();
        // SAFETY: the id is alive when the call begins to wait.
        let _ = ended.send(outcome(unsafe { call(id) }));
    });
    until_asleep(waiting.recv().unwrap());
    // SAFETY: the caller's promise.
    unsafe {
        if !(*id).qp.is_null() {
            rdma_destroy_qp(id);
        }
        assert_eq!(outcome(rdma_destroy_id(id)), Ok(()));
    }
    end.recv_timeout(PATIENCE).is_ok_and(|outcome| outcome.is_err())
}

/// A program that gives up destroys the id from another thread. The call slept for ever.
#[test]
fn an_id_destroyed_under_a_connect_that_blocks() {
    // SAFETY: used as the man pages say.
    unsafe {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let id = new_id(null_mut());
        let mut peer = at(&silent.local_addr().unwrap().to_string());
        assert_eq!(outcome(rdma_resolve_addr(id, null_mut(), (&raw mut peer).cast(), 1000)), Ok(()));
        assert_eq!(outcome(rdma_resolve_route(id, 1000)), Ok(()));
        assert_eq!(outcome(rdma_create_qp(id, null_mut(), &mut attr())), Ok(()));
        assert!(ends_with_its_id(id, |id| rdma_connect(id, &mut parameters(b""))), "it does not return");
    }
}

#[test]
fn a_listener_destroyed_under_a_call_that_waits_for_requests() {
    // SAFETY: used as the man pages say.
    unsafe {
        let id = new_id(null_mut());
        let mut address = at("127.0.0.1:0");
        assert_eq!(outcome(rdma_bind_addr(id, (&raw mut address).cast())), Ok(()));
        assert_eq!(outcome(rdma_listen(id, 0)), Ok(()));
        assert!(ends_with_its_id(id, |id| rdma_get_request(id, &mut null_mut())), "it does not return");
    }
}
