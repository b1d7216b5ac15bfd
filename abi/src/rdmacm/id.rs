//! Ids: created, destroyed, migrated to another channel, options.

use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::ptr::null_mut;
use std::sync::Arc;

use libc::sockaddr_storage;
use uwarp_abi_types::rdmacm::*;
use uwarp_abi_types::verbs::*;
use uwarp_cm::{Cm, CmError, EventKind, Id, State};
use uwarp_driver::RdmaDevice;
use uwarp_process::Mutex;

use super::{address, addrinfo, channel, device, event};
use crate::convention::MinusOne;
use crate::entry;
use crate::failure::{Failure, required};
use crate::ibverbs::query::{self, gid_of};
use crate::ibverbs::{context, view};
use crate::object::{self, Object, Visible, look, zeroed};

/// An id.
#[repr(C)]
pub struct CId {
    c: Visible<rdma_cm_id>,
    /// The connection manager's.
    pub id: Arc<Id>,
    /// Members that librdmacm keeps behind the public structure.
    pub private: Mutex<Private, 29>,
}

/// See [`CId::private`].
#[derive(Default)]
pub struct Private {
    /// Created without a channel: it has its own, and calls block until their event has come.
    pub sync: bool,
    /// The program destroys the id.
    pub ends: bool,
    /// For the queue pairs of requests that come to this endpoint.
    pub qp_init_attr: Option<ibv_qp_init_attr>,
    /// Goes in front of the private data of the next connect.
    pub connect_data: Vec<u8>,
    /// The program's own options for enhanced connection establishment: vendor and options.
    pub local_ece: (u32, u32),
    /// Groups that it has joined.
    pub groups: Vec<Group>,
    /// From `rdma_resolve_addrinfo` until `rdma_query_addrinfo`.
    pub resolving: Resolving,
}

/// A multicast group that an id has joined.
pub struct Group {
    /// Its address.
    pub address: SocketAddr,
    /// The queue pair is attached to it.
    pub receives: bool,
}

/// How far `rdma_resolve_addrinfo` has come.
#[derive(Default)]
pub enum Resolving {
    /// Not called.
    #[default]
    No,
    /// Done; the program has not taken the result.
    Done(*mut rdma_addrinfo),
}

// SAFETY: repr(C), the C structure first.
unsafe impl Object for CId {
    type C = rdma_cm_id;
    const NAME: &'static str = "id";
}

impl CId {
    /// Gives a new id to the program.
    pub fn give(
        id: Arc<Id>,
        event_channel: *mut rdma_event_channel,
        context: *mut c_void,
        ps: rdma_port_space,
        sync: bool,
    ) -> *mut rdma_cm_id {
        // SAFETY: plain C data.
        let mut c: rdma_cm_id = unsafe { zeroed() };
        c.channel = event_channel;
        c.context = context;
        c.ps = ps;
        c.qp_type = if is_datagram(ps) { IBV_QPT_UD } else { IBV_QPT_RC };
        let private = Mutex::new(Private { sync, ..Private::default() });
        let c = object::give(Self { c: Visible::new(c), id: Arc::clone(&id), private });
        // Events find the C structure by it.
        id.set_cookie(c.expose_provenance());
        c
    }

    /// The id whose event this is.
    pub fn of(id: &Id) -> *mut rdma_cm_id {
        std::ptr::with_exposed_provenance_mut(id.cookie())
    }

    /// As C knows it.
    pub fn c(&self) -> *mut rdma_cm_id {
        object::address(self)
    }

    /// Whether its calls block.
    pub fn is_sync(&self) -> bool {
        self.private.lock().sync
    }

    /// Puts the event that answers a call of this thread into `id->event`. False: another thread destroys the
    /// id, and waits until the event is acknowledged. Nothing may be done with the id or the event
    /// afterwards, except that.
    ///
    /// # Safety
    /// The event was taken from the id's own channel by this thread.
    pub unsafe fn keep(&self, event: *mut rdma_cm_event) -> bool {
        let private = self.private.lock();
        if !private.ends {
            // SAFETY: the id is alive until its events are acknowledged.
            unsafe { (*self.c()).event = event };
        }
        !private.ends
    }

    /// Acknowledges the event in `id->event`.
    ///
    /// # Safety
    /// The program is done with it.
    pub unsafe fn acknowledge_kept(&self) {
        let c = self.c();
        // SAFETY: the caller's promise.
        unsafe {
            let event = (*c).event;
            if !event.is_null() {
                (*c).event = null_mut();
                event::acknowledge(event);
            }
        }
    }

    /// Shows the program the addresses that are known now.
    ///
    /// # Safety
    /// No other thread writes the structure.
    pub unsafe fn show_addresses(&self) {
        let c = self.c();
        // SAFETY: the caller's promise; the unions' members are plain memory.
        unsafe {
            let route = &raw mut (*c).route.addr;
            if let Some(local) = self.id.local_address() {
                (*route).anon_1.src_storage = address::storage(local).0;
                // An id without a device has no GID.
                if !uwarp_cm::is_any(local.ip()) || !(*c).verbs.is_null() {
                    (*route).addr.ibaddr.sgid = gid_of(local.ip());
                }
            }
            if let Some(peer) = self.id.peer_address() {
                (*route).anon_2.dst_storage = address::storage(peer).0;
                (*route).addr.ibaddr.dgid = gid_of(peer.ip());
            }
            (*route).addr.ibaddr.pkey = 0xFFFF;
        }
    }

    /// Gives the id its device, now that its local address is known.
    ///
    /// # Safety
    /// No other thread writes the structure.
    pub unsafe fn show_device(&self) -> Result<(), Failure> {
        let c = self.c();
        // SAFETY: the caller's promise.
        unsafe {
            if (*c).verbs.is_null() {
                let local = self.id.local_address();
                let own = match local {
                    Some(local) => RdmaDevice::of_address(local),
                    None => RdmaDevice::list().first().copied(),
                };
                let own = own.ok_or_else(|| Failure::new(libc::ENODEV, "no interface is up"))?;
                let shared = device::shared(own)?;
                (*c).verbs = shared.verbs;
                // A listening endpoint's own domain stays.
                if (*c).pd.is_null() {
                    (*c).pd = shared.pd;
                }
                (*c).port_num = 1;
            }
        }
        Ok(())
    }

    /// A path record, for programs of the InfiniBand views, which look for one.
    ///
    /// # Safety
    /// No other thread writes the structure.
    pub unsafe fn show_path(&self) {
        if view::shown().transport != IBV_TRANSPORT_IB {
            return;
        }
        let c = self.c();
        // SAFETY: the caller's promise; the record is C's, freed by `destroy`.
        unsafe {
            if !(*c).route.path_rec.is_null() {
                return;
            }
            let record = libc::calloc(1, size_of::<ibv_sa_path_rec>()).cast::<ibv_sa_path_rec>();
            if record.is_null() {
                return;
            }
            let gids = (*c).route.addr.addr.ibaddr;
            (*record).sgid = gids.sgid;
            (*record).dgid = gids.dgid;
            (*record).hop_limit = 64;
            (*record).reversible = 1;
            (*record).numb_path = 1;
            (*record).pkey = 0xFFFF;
            (*record).mtu_selector = 2;
            (*record).mtu = context::port((*c).verbs).map_or(IBV_MTU_1024, query::active_mtu) as u8;
            (*record).rate_selector = 2;
            (*record).rate = IBV_RATE_10_GBPS as u8;
            (*record).packet_life_time_selector = 2;
            (*c).route.path_rec = record;
            (*c).route.num_paths = 1;
        }
    }
}

/// Makes an id; without a channel one whose calls block.
pub fn create(
    event_channel: *mut rdma_event_channel,
    context: *mut c_void,
    ps: rdma_port_space,
) -> Result<*mut rdma_cm_id, Failure> {
    if !matches!(ps, RDMA_PS_TCP | RDMA_PS_IB) && !is_datagram(ps) {
        return Err(Failure::invalid("unknown port space"));
    }
    let sync = event_channel.is_null();
    let event_channel = if sync { channel::create()? } else { event_channel };
    let reports_to = channel::queue(event_channel)?;
    let cm = Cm::of_process()?;
    let id = match u16::try_from(ps) {
        Ok(port_space) if is_datagram(ps) => Id::of_datagrams(&cm, &reports_to, port_space),
        _ => Id::new(&cm, &reports_to),
    };
    Ok(CId::give(id, event_channel, context, ps, sync))
}

fn is_datagram(ps: rdma_port_space) -> bool {
    matches!(ps, RDMA_PS_UDP | RDMA_PS_IPOIB)
}

/// Destroys an id. Waits for its events to be acknowledged.
///
/// # Safety
/// `id` is alive, and nothing else uses it.
pub unsafe fn destroy(id: *mut rdma_cm_id) -> Result<(), Failure> {
    // SAFETY: the caller's promise, here and below.
    unsafe {
        let cid = look::<CId>(id)?;
        cid.private.lock().ends = true;
        if cid.is_sync()
            && let Ok(own) = channel::queue((*id).channel)
        {
            // A thread that sleeps in a call of this id returns.
            own.close();
        }
        cid.acknowledge_kept();
        cid.id.destroy();
        if !(*id).route.path_rec.is_null() {
            libc::free((*id).route.path_rec.cast());
        }
        let own_channel = cid.is_sync().then_some((*id).channel);
        let cid = object::take::<CId>(id)?;
        if let Resolving::Done(info) = cid.private.lock().resolving {
            addrinfo::free(info);
        }
        drop(cid);
        if let Some(own) = own_channel {
            channel::destroy(own);
        }
        Ok(())
    }
}

/// Moves an id to another channel, or to one of its own.
///
/// # Safety
/// `id` is alive, and no other thread uses it.
pub unsafe fn migrate(id: *mut rdma_cm_id, event_channel: *mut rdma_event_channel) -> Result<(), Failure> {
    // SAFETY: the caller's promise, here and below.
    unsafe {
        let cid = look::<CId>(id)?;
        let was_sync = cid.is_sync();
        let sync = event_channel.is_null();
        if was_sync && sync {
            return Err(Failure::invalid("the id has a channel of its own already"));
        }
        let to = if sync { channel::create()? } else { event_channel };
        cid.id.migrate(&channel::queue(to)?)?;
        if was_sync {
            cid.acknowledge_kept();
            channel::destroy((*id).channel);
        }
        cid.private.lock().sync = sync;
        (*id).channel = to;
        // After this call no thread may handle an event from the old channel.
        cid.id.wait_acknowledged();
        Ok(())
    }
}

fn wrong_size() -> Failure {
    Failure::invalid("the option has a wrong size")
}

/// # Safety
/// `value` points to `length` bytes.
unsafe fn option<T: Copy>(value: *const c_void, length: usize) -> Result<T, Failure> {
    if value.is_null() || length != size_of::<T>() {
        return Err(wrong_size());
    }
    // SAFETY: the caller's promise and the check.
    Ok(unsafe { value.cast::<T>().read_unaligned() })
}

entry! {
    /// rdma_create_id(3).
    fn rdma_create_id(
        channel: *mut rdma_event_channel,
        id: *mut *mut rdma_cm_id,
        context: *mut c_void,
        ps: rdma_port_space,
    ) -> MinusOne {
        required(id, "id")?;
        *id = create(channel, context, ps)?;
        Ok(())
    }

    /// rdma_destroy_id(3). Blocks until the program has acknowledged the id's events.
    fn rdma_destroy_id(id: *mut rdma_cm_id) -> MinusOne {
        destroy(id)
    }

    /// rdma_migrate_id(3). Blocks until the program has acknowledged the id's events on the old channel.
    fn rdma_migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> MinusOne {
        migrate(id, channel)
    }

    /// rdma_set_option(3).
    fn rdma_set_option(
        id: *mut rdma_cm_id,
        level: c_int,
        optname: c_int,
        optval: *mut c_void,
        optlen: usize,
    ) -> MinusOne {
        let cid = look::<CId>(id)?;
        let late = || Err(CmError::Invalid("this option must be set earlier"));
        match (level.cast_unsigned(), optname.cast_unsigned()) {
            (RDMA_OPTION_ID, RDMA_OPTION_ID_TOS) => {
                let tos = option::<u8>(optval, optlen)?;
                cid.id.set_options(|_, options| { options.tos = Some(tos); Ok(()) })?;
            }
            (RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR) => {
                let reuse = option::<c_int>(optval, optlen)? != 0;
                cid.id.set_options(|state, options| {
                    if state != State::Idle && (!reuse || state == State::Listening) {
                        return late();
                    }
                    options.reuseaddr = reuse;
                    Ok(())
                })?;
            }
            (RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY) => {
                let only = option::<c_int>(optval, optlen)? != 0;
                cid.id.set_options(|state, options| {
                    if !matches!(state, State::Idle | State::Bound) {
                        return late();
                    }
                    options.afonly = Some(only);
                    Ok(())
                })?;
            }
            (RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT) => {
                let timeout = option::<u8>(optval, optlen)?;
                cid.id.set_options(|_, options| { options.ack_timeout = Some(timeout); Ok(()) })?;
            }
            (RDMA_OPTION_IB, RDMA_OPTION_IB_PATH) => {
                return Err(Failure::unsupported("InfiniBand path records"));
            }
            _ => return Err(Failure::new(libc::ENOSYS, "unknown option")),
        }
        Ok(())
    }

    /// Queues an event of the program's own on the id's channel, `RDMA_CM_EVENT_USER`.
    fn rdma_write_cm_event(
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

    /// rdma_get_src_port(3), network byte order.
    fn rdma_get_src_port(id: *mut rdma_cm_id) -> u16 {
        look::<CId>(id)?;
        let storage: sockaddr_storage = (*id).route.addr.anon_1.src_storage;
        Ok(address::port(&storage))
    }

    /// rdma_get_dst_port(3), network byte order.
    fn rdma_get_dst_port(id: *mut rdma_cm_id) -> u16 {
        look::<CId>(id)?;
        let storage: sockaddr_storage = (*id).route.addr.anon_2.dst_storage;
        Ok(address::port(&storage))
    }

    /// rdma_set_local_ece(3). Stored: our queue pairs have no such options to exchange.
    fn rdma_set_local_ece(id: *mut rdma_cm_id, ece: *mut ibv_ece) -> MinusOne {
        let cid = look::<CId>(id)?;
        let ece = required(ece, "ece")?;
        if !(*id).qp.is_null() || (*ece).vendor_id == 0 || (*ece).comp_mask != 0 {
            return Err(Failure::invalid("the id has a queue pair, or the structure is empty"));
        }
        cid.private.lock().local_ece = ((*ece).vendor_id, (*ece).options);
        Ok(())
    }

    /// rdma_get_remote_ece(3). MPA does not carry any.
    fn rdma_get_remote_ece(id: *mut rdma_cm_id, ece: *mut ibv_ece) -> MinusOne {
        look::<CId>(id)?;
        let ece = required(ece, "ece")?;
        if !(*id).qp.is_null() {
            return Err(Failure::invalid("the id has a queue pair"));
        }
        (*ece) = zeroed();
        Ok(())
    }
}
