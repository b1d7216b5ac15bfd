//! The device as C knows it, and an opened device.

use std::ffi::{c_char, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, LazyLock, Weak};

use uwarp_abi_types::private::{verbs_device, verbs_device_ops};
use uwarp_abi_types::verbs::{ibv_context, ibv_device, verbs_context};
use uwarp_driver::port::Port;
use uwarp_driver::{Channel, Nic, netdev};

use super::event::PortEvents;
use super::view;
use crate::failure::Failure;
use crate::object::{self, Object, Visible, zeroed};

/// Only our device has this table: vendor libraries compare its address with the address of their own table.
static OPERATIONS: verbs_device_ops = verbs_device_ops { name: c"uwarp".as_ptr(), reserved: [0; 31] };

/// `abi_compat` of a context that has a `verbs_context` around it.
const EXTENDED: *mut c_void = std::ptr::without_provenance_mut(usize::MAX);

static DEVICE: LazyLock<Visible<verbs_device>> = LazyLock::new(|| {
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
    Visible::new(device)
});

fn copy_text(to: &mut [c_char], text: &str) {
    // The last byte stays zero.
    let room = to.len() - 1;
    for (to, from) in to[..room].iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

/// The one device. Lives as long as the process: programs keep pointers to it after `ibv_free_device_list`.
pub fn device() -> *mut ibv_device {
    // The device is the first member.
    DEVICE.get().cast()
}

/// Node GUID, network byte order, as the verbs have it.
pub fn guid() -> u64 {
    u64::from_ne_bytes(netdev::guid())
}

/// An opened device.
#[repr(C)]
pub struct Context {
    c: Visible<verbs_context>,
    /// The NIC behind it.
    pub nic: Arc<Nic>,
    /// Its queue of asynchronous events.
    pub events: Arc<Channel>,
    /// What puts the port's events there.
    _port_events: Arc<PortEvents>,
    /// Objects made on it.
    pub users: object::Users,
    /// A descriptor programs may duplicate, poll and pass around; there is no kernel driver that takes
    /// commands from it.
    _command: OwnedFd,
}

// SAFETY: repr(C); `ibv_context` is the last member of `verbs_context`, which is the first of `Context`.
unsafe impl Object for Context {
    type C = ibv_context;
    const OFFSET: usize = std::mem::offset_of!(verbs_context, context);
    const NAME: &'static str = "context";
}

impl Context {
    /// Opens the device once more. `fill_operations` sets what inline functions of verbs.h call through the
    /// context.
    pub fn open(fill_operations: fn(&mut verbs_context)) -> Result<*mut ibv_context, Failure> {
        let nic = Nic::open()?;
        let command = rustix::fs::open(
            c"/dev/null",
            rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::empty(),
        )?;
        let events = Channel::new(nic.engine())?;
        let port_events = PortEvents::new(&events);
        let sink: Weak<PortEvents> = Arc::downgrade(&port_events);
        nic.watch_port(Port::of_host(), sink);
        object::give_with(|_| {
            // SAFETY: plain C data.
            let mut vctx: verbs_context = unsafe { zeroed() };
            fill_operations(&mut vctx);
            vctx.context.device = device();
            vctx.context.cmd_fd = command.as_raw_fd();
            vctx.context.async_fd = events.fd();
            vctx.context.num_comp_vectors = 1;
            vctx.context.abi_compat = EXTENDED;
            vctx.sz = size_of::<verbs_context>();
            let (c, users) = (Visible::new(vctx), object::Users::default());
            Ok(Self { c, nic, events, _port_events: port_events, users, _command: command })
        })
    }
}
