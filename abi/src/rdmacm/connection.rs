//! From an address to a connection and back.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use libc::sockaddr;
use uwarp_abi_types::rdmacm::*;
use uwarp_abi_types::verbs::*;
use uwarp_cm::{ConnParam, EventKind, QKEY, State};
use uwarp_driver::{Nic, Qp, QueuePair};

use super::id::{CId, Resolving};
use super::take::complete;
use super::{address, addrinfo};
use crate::convention::MinusOne;
use crate::entry;
use crate::failure::{Failure, required};
use crate::ibverbs::qp::CQp;
use crate::object::look;

/// Binds the id and shows its address, and its device where the address belongs to one. A loopback address
/// does not, as in Linux' rdma_cm: libfabric binds to "localhost", and would take the loopback address for
/// the device's own.
///
/// # Safety
/// `cid` is used by no other thread; `address` is NULL or an address.
pub unsafe fn bind(cid: &CId, address: *const sockaddr) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        let address = address::load(address)?;
        cid.id.bind(address)?;
        cid.show_addresses();
        if uwarp_cm::is_any(address.ip()) { Ok(()) } else { cid.show_device() }
    }
}

/// Resolves the address of a peer; waits for the answer if the id is of that kind.
///
/// # Safety
/// As [`bind`].
pub unsafe fn resolve_address(cid: &CId, src: *const sockaddr, dst: *const sockaddr) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        let peer = address::load(dst)?;
        let source = if src.is_null() { None } else { Some(address::load(src)?) };
        cid.id.resolve_address(source, peer)?;
        (*cid.c()).route.addr.anon_2.dst_storage = address::storage(peer).0;
        complete(cid)
    }
}

/// Resolves the route; waits for the answer if the id is of that kind.
///
/// # Safety
/// As [`bind`].
pub unsafe fn resolve_route(cid: &CId) -> Result<(), Failure> {
    cid.id.resolve_route()?;
    // SAFETY: the caller's promise.
    unsafe { complete(cid) }
}

/// The queue pair of a connection.
enum Pair {
    /// The id's.
    OfId(Arc<Qp>),
    /// The program gives its number, and moves it through its states itself.
    ByNumber(Arc<Qp>),
    /// The number is that of a datagram queue pair, which takes no connection: the program needs only the
    /// connection's events and private data (UCX).
    StandIn,
}

/// The id's queue pair, or the one whose number the program gives.
///
/// # Safety
/// The id and its queue pair are alive.
unsafe fn queue_pair(c: *mut rdma_cm_id, param: *const rdma_conn_param) -> Result<Pair, Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        if !(*c).qp.is_null() {
            return Ok(Pair::OfId(Arc::clone(look::<CQp>((*c).qp)?.rc()?)));
        }
        let number =
            param.as_ref().ok_or_else(|| Failure::invalid("neither queue pair nor conn_param"))?.qp_num;
        let found = match Nic::get().and_then(|nic| nic.queue_pair(number)) {
            Some(QueuePair::Rc(qp)) => Some(Pair::ByNumber(qp)),
            Some(QueuePair::Ud(_) | QueuePair::Rd(_) | QueuePair::Uc(_)) => Some(Pair::StandIn),
            None => None,
        };
        found.ok_or_else(|| Failure::invalid("no queue pair has the number in conn_param"))
    }
}

/// The number of the id's queue pair, or the one that the program gives.
///
/// # Safety
/// As [`queue_pair`].
unsafe fn datagram_qpn(c: *mut rdma_cm_id, param: *const rdma_conn_param) -> Result<u32, Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        match (*c).qp.as_ref() {
            Some(qp) => Ok(qp.qp_num),
            None => param
                .as_ref()
                .map(|given| given.qp_num)
                .ok_or_else(|| Failure::invalid("neither queue pair nor conn_param")),
        }
    }
}

/// # Safety
/// `param` is valid; its private data is as long as it says.
unsafe fn private_data<'a>(param: &rdma_conn_param) -> &'a [u8] {
    // SAFETY: the caller's promise.
    unsafe { bytes(param.private_data, param.private_data_len) }
}

/// # Safety
/// `data` is NULL or points to `length` bytes.
unsafe fn bytes<'a>(data: *const c_void, length: u8) -> &'a [u8] {
    if data.is_null() || length == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(data.cast(), length.into()) }
}

fn conn_param(c: &rdma_conn_param) -> ConnParam {
    ConnParam {
        responder_resources: c.responder_resources,
        initiator_depth: c.initiator_depth,
        flow_control: c.flow_control,
        retry_count: c.retry_count,
        rnr_retry_count: c.rnr_retry_count,
        srq: c.srq != 0,
        qp_num: c.qp_num,
    }
}

entry! {
    /// rdma_bind_addr(3).
    fn rdma_bind_addr(id: *mut rdma_cm_id, addr: *mut sockaddr) -> MinusOne {
        bind(look::<CId>(id)?, addr)
    }

    /// rdma_resolve_addr(3).
    fn rdma_resolve_addr(
        id: *mut rdma_cm_id,
        src_addr: *mut sockaddr,
        dst_addr: *mut sockaddr,
        _timeout_ms: c_int,
    ) -> MinusOne {
        resolve_address(look::<CId>(id)?, src_addr, dst_addr)
    }

    /// rdma_resolve_route(3).
    fn rdma_resolve_route(id: *mut rdma_cm_id, _timeout_ms: c_int) -> MinusOne {
        resolve_route(look::<CId>(id)?)
    }

    /// As `rdma_getaddrinfo`, answered by an event; the result is then taken with `rdma_query_addrinfo`.
    /// Names are looked up in the call.
    fn rdma_resolve_addrinfo(
        id: *mut rdma_cm_id,
        node: *const c_char,
        service: *const c_char,
        hints: *const rdma_addrinfo,
    ) -> MinusOne {
        let cid = look::<CId>(id)?;
        if !matches!(cid.private.lock().resolving, Resolving::No) {
            return Err(Failure::new(libc::EBUSY, "the program has not taken the last result"));
        }
        let info = addrinfo::lookup(node, service, hints)?
            .map_err(|code| Failure::new(libc::ENOENT, format!("getaddrinfo: code {code}")))?;
        cid.private.lock().resolving = Resolving::Done(info);
        cid.id.post(EventKind::NamesResolved, 0)?;
        complete(cid)
    }

    /// Takes the result of `rdma_resolve_addrinfo`.
    fn rdma_query_addrinfo(id: *mut rdma_cm_id, info: *mut *mut rdma_addrinfo) -> MinusOne {
        let cid = look::<CId>(id)?;
        required(info, "info")?;
        match std::mem::take(&mut cid.private.lock().resolving) {
            Resolving::Done(result) => {
                *info = result;
                Ok(())
            }
            Resolving::No => Err(Failure::new(libc::ENOENT, "nothing was resolved")),
        }
    }

    /// rdma_listen(3).
    fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> MinusOne {
        let cid = look::<CId>(id)?;
        cid.id.listen(backlog)?;
        cid.show_addresses();
        Ok(())
    }

    /// rdma_connect(3).
    fn rdma_connect(id: *mut rdma_cm_id, conn_param: *mut rdma_conn_param) -> MinusOne {
        let cid = look::<CId>(id)?;
        let mut data = cid.private.lock().connect_data.clone();
        data.extend_from_slice(conn_param.as_ref().map_or(&[], |given| private_data(given)));
        let param = conn_param.as_ref().map_or(ConnParam::DEFAULT, self::conn_param);
        if cid.id.is_datagram() {
            cid.id.look_up(&data)?;
        } else {
            match queue_pair(id, conn_param)? {
                Pair::OfId(qp) => cid.id.connect(&qp, param, &data)?,
                Pair::ByNumber(qp) => cid.id.connect_by_number(&qp, param, &data)?,
                Pair::StandIn => cid.id.connect_by_stand_in(param, &data)?,
            }
        }
        cid.private.lock().connect_data.clear();
        // The local port is known now.
        if !cid.is_sync() {
            cid.show_addresses();
        }
        complete(cid)
    }

    /// rdma_accept(3).
    fn rdma_accept(id: *mut rdma_cm_id, conn_param: *mut rdma_conn_param) -> MinusOne {
        let cid = look::<CId>(id)?;
        let data = conn_param.as_ref().map_or(&[][..], |given| private_data(given));
        if cid.id.is_datagram() {
            return Ok(cid.id.answer(datagram_qpn(id, conn_param)?, QKEY, data)?);
        }
        let param = conn_param.as_ref().map(self::conn_param);
        match queue_pair(id, conn_param)? {
            Pair::OfId(qp) | Pair::ByNumber(qp) => cid.id.accept(&qp, param, data)?,
            Pair::StandIn => cid.id.accept_by_stand_in(param.unwrap_or(ConnParam::DEFAULT), data)?,
        }
        complete(cid)
    }

    /// rdma_reject(3).
    fn rdma_reject(id: *mut rdma_cm_id, private_data: *const c_void, private_data_len: u8) -> MinusOne {
        look::<CId>(id)?.id.reject(bytes(private_data, private_data_len))?;
        Ok(())
    }

    /// rdma_reject(3), because a vendor's option is missing. MPA has no reasons, so it is an ordinary
    /// rejection.
    fn rdma_reject_ece(
        id: *mut rdma_cm_id,
        private_data: *const c_void,
        private_data_len: u8,
    ) -> MinusOne {
        look::<CId>(id)?.id.reject(bytes(private_data, private_data_len))?;
        Ok(())
    }

    /// rdma_establish(3): after `CONNECT_RESPONSE`, which ids without a queue pair get.
    fn rdma_establish(id: *mut rdma_cm_id) -> MinusOne {
        let cid = look::<CId>(id)?;
        if !(*id).qp.is_null() {
            return Err(Failure::invalid("rdma_establish is for queue pairs that the program moves itself"));
        }
        cid.id.establish()?;
        Ok(())
    }

    /// rdma_disconnect(3).
    fn rdma_disconnect(id: *mut rdma_cm_id) -> MinusOne {
        let cid = look::<CId>(id)?;
        cid.id.disconnect()?;
        // If the peer disconnected first and the program has taken the event already, there is no other event
        // to wait for.
        if cid.id.state() == State::Closed && cid.id.channel().is_empty() {
            return Ok(());
        }
        complete(cid)
    }

    /// rdma_notify(3): the connection manager knows of a queue pair's events already.
    fn rdma_notify(id: *mut rdma_cm_id, _event: ibv_event_type) -> MinusOne {
        match look::<CId>(id)?.id.state() {
            State::Idle | State::Bound | State::AddressResolved | State::RouteResolved | State::Listening => {
                Err(Failure::invalid("not connected"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::errno;

    #[test]
    fn private_data_may_be_null() {
        // SAFETY: NULL and length 0 are allowed.
        unsafe {
            assert!(bytes(std::ptr::null(), 7).is_empty());
            assert!(bytes(c"x".as_ptr().cast(), 0).is_empty());
            assert_eq!(bytes(c"xy".as_ptr().cast(), 2), b"xy");
        }
    }

    #[test]
    fn no_id_is_refused() {
        // SAFETY: NULL is what is tested.
        unsafe {
            assert_eq!((rdma_listen(std::ptr::null_mut(), 1), errno()), (-1, libc::EINVAL));
            assert_eq!((rdma_disconnect(std::ptr::null_mut()), errno()), (-1, libc::EINVAL));
        }
    }
}
