//! The device and its contexts.

use std::collections::HashMap;
use std::ffi::{c_char, c_int};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, LazyLock, Weak};

use parking_lot::Mutex;
use uwarp_abi_types::private::{verbs_device, verbs_device_ops};
use uwarp_abi_types::verbs::{ibv_context, ibv_device, verbs_context};
use uwarp_driver::{Channel, Nic, Qp};

use super::{cq, mr, netdev, qp, query, srq, unsupported, view};
use crate::entry;
use crate::entry::{Failure, MinusOne};
use crate::object::{self, Object, Visible, zeroed};

/// Ours, and nobody else's: vendor libraries compare its address with that of their own table.
static OPERATIONS: verbs_device_ops = verbs_device_ops { name: c"uwarp".as_ptr(), reserved: [0; 31] };

/// `abi_compat` of a context that has a `verbs_context` around it.
const EXTENDED: *mut std::ffi::c_void = std::ptr::without_provenance_mut(usize::MAX);

/// The one device. Lives as long as the process: programs keep pointers to it after `ibv_free_device_list`.
#[derive(Debug)]
pub struct Device {
    c: Visible<verbs_device>,
    /// Network byte order, as the verbs hand it out.
    guid: u64,
}

static DEVICE: LazyLock<Device> = LazyLock::new(|| {
    let shown = view::shown();
    // SAFETY: plain C data.
    let mut device: verbs_device = unsafe { zeroed() };
    device.device.node_type = shown.node_type;
    device.device.transport_type = shown.transport;
    copy_text(&mut device.device.name, "uwarp0");
    copy_text(&mut device.device.dev_name, "uverbs0");
    copy_text(&mut device.device.dev_path, "/sys/class/infiniband_verbs/uverbs0");
    copy_text(&mut device.device.ibdev_path, "/sys/class/infiniband/uwarp0");
    device.ops = &raw const OPERATIONS;
    Device { c: Visible::new(device), guid: u64::from_ne_bytes(make_guid()) }
});

fn copy_text(to: &mut [c_char], text: &str) {
    // The last byte stays zero.
    let room = to.len() - 1;
    for (to, from) in to[..room].iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

/// An EUI-64 that stays the same as long as the host does: from the hardware address of the first interface that has one,
/// with the "local" bit, as no such adapter was ever sold; else from the machine's identity.
fn make_guid() -> [u8; 8] {
    let mac = netdev::list().into_iter().find_map(|dev| if dev.loopback { None } else { dev.mac });
    if let Some([a, b, c, d, e, f]) = mac {
        return [a | 2, b, c, 0xff, 0xfe, d, e, f];
    }
    let identity = std::fs::read("/etc/machine-id").unwrap_or_else(|_| {
        let name = rustix::system::uname();
        name.nodename().to_bytes().to_vec()
    });
    // FNV-1a: any hash that is the same in every version will do.
    let hash = identity.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let mut guid = hash.to_be_bytes();
    guid[0] = guid[0] & !1 | 2;
    guid
}

impl Device {
    /// The device.
    pub fn get() -> &'static Self {
        &DEVICE
    }

    /// As C knows it.
    pub fn c(&self) -> *mut ibv_device {
        // The device is the first member.
        self.c.get().cast()
    }

    /// Node GUID, network byte order.
    pub fn guid(&self) -> u64 {
        self.guid
    }
}

/// An opened device.
#[repr(C)]
pub struct Context {
    c: Visible<verbs_context>,
    /// The NIC behind it.
    pub nic: Arc<Nic>,
    /// Its queue of asynchronous events.
    pub events: Arc<Channel>,
    /// Queue pairs that are alive, to be torn down when the program closes the device over them.
    pub qps: Mutex<HashMap<u32, Weak<Qp>>>,
    /// Objects made on it.
    pub users: object::Users,
    /// A descriptor programs may duplicate, poll and pass around; there is no kernel driver to command through it.
    _command: OwnedFd,
}

// SAFETY: repr(C); `ibv_context` is the last member of `verbs_context`, which is the first of `Context`.
unsafe impl Object for Context {
    type C = ibv_context;
    const OFFSET: usize = std::mem::offset_of!(verbs_context, context);
    const NAME: &'static str = "context";
}

impl Context {
    /// Opens the device once more.
    pub fn open() -> Result<*mut ibv_context, Failure> {
        let nic = Nic::open()?;
        let command = rustix::fs::open(
            c"/dev/null",
            rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::empty(),
        )?;
        let events = Channel::new(nic.engine())?;
        object::give_with(|_| {
            // SAFETY: plain C data.
            let mut vctx: verbs_context = unsafe { zeroed() };
            fill_operations(&mut vctx);
            vctx.context.device = Device::get().c();
            vctx.context.cmd_fd = command.as_raw_fd();
            vctx.context.async_fd = events.fd();
            vctx.context.num_comp_vectors = 1;
            vctx.context.abi_compat = EXTENDED;
            vctx.sz = size_of::<verbs_context>();
            Ok(Self {
                c: Visible::new(vctx),
                nic,
                events,
                qps: Mutex::default(),
                users: object::Users::default(),
                _command: command,
            })
        })
    }
}

/// What inline functions of verbs.h call through the context. What is NULL they answer themselves (`EOPNOTSUPP`).
fn fill_operations(vctx: &mut verbs_context) {
    vctx.query_port = Some(query::query_port);
    vctx.query_device_ex = Some(query::query_device_ex);
    vctx.create_cq_ex = Some(cq::create_cq_ex);
    vctx.create_qp_ex = Some(qp::create_qp_ex);
    vctx.create_srq_ex = Some(srq::create_srq_ex);
    vctx.advise_mr = Some(mr::advise_mr);
    vctx.reg_mr_ex = Some(mr::ibv_reg_mr_ex);
    let ops = &mut vctx.context.ops;
    ops._compat_query_device = Some(query::ibv_query_device);
    ops._compat_query_port = Some(query::ibv_query_port);
    ops.poll_cq = Some(cq::poll_cq);
    ops.req_notify_cq = Some(cq::req_notify_cq);
    ops.post_send = Some(qp::post_send);
    ops.post_recv = Some(qp::post_recv);
    ops.post_srq_recv = Some(srq::post_srq_recv);
    ops.alloc_mw = Some(unsupported::alloc_mw);
    ops.bind_mw = Some(unsupported::bind_mw);
    ops.dealloc_mw = Some(unsupported::dealloc_mw);
}

entry! {
    /// ibv_get_device_list(3).
    verb fn ibv_get_device_list(num_devices: *mut c_int) -> *mut *mut ibv_device {
        if let Some(num) = num_devices.as_mut() {
            *num = 1;
        }
        Ok(Box::into_raw(Box::new([Device::get().c(), std::ptr::null_mut()])).cast())
    }

    /// ibv_free_device_list(3).
    fn ibv_free_device_list(list: *mut *mut ibv_device) -> () {
        if !list.is_null() {
            drop(Box::from_raw(list.cast::<[*mut ibv_device; 2]>()));
        }
        Ok(())
    }

    /// ibv_get_device_name(3).
    fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
        entry::required(device, "device")?;
        Ok((&raw const (*device).name).cast())
    }

    /// ibv_get_device_guid(3).
    fn ibv_get_device_guid(device: *mut ibv_device) -> u64 {
        entry::required(device, "device")?;
        Ok(Device::get().guid())
    }

    /// ibv_get_device_index(3): -1, as there is no kernel device to have an index.
    fn ibv_get_device_index(device: *mut ibv_device) -> MinusOne<c_int> {
        entry::required(device, "device")?;
        Ok(-1)
    }

    /// ibv_open_device(3).
    verb fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
        if device != Device::get().c() {
            return Err(Failure::new(libc::ENODEV, "not a device of ours"));
        }
        Context::open()
    }

    /// ibv_close_device(3). Queue pairs the program left are closed; other objects it left keep the context's memory, so
    /// that destroying them later does no harm.
    verb fn ibv_close_device(context: *mut ibv_context) -> MinusOne {
        let open = object::look::<Context>(context)?;
        let left = std::mem::take(&mut *open.qps.lock());
        left.into_values().filter_map(|qp| qp.upgrade()).for_each(|qp| qp.destroy());
        if open.users.count() == 0 {
            drop(object::take::<Context>(context)?);
        }
        Ok(())
    }

    /// ibv_import_device(3): nothing stands behind a command descriptor of ours that another process could import.
    verb fn ibv_import_device(_cmd_fd: c_int) -> *mut ibv_context {
        Err(Failure::unsupported("importing a device"))
    }
}
