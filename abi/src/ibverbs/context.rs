//! The device as C knows it, and an opened device.

use std::ffi::{c_char, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Weak};

use uwarp_abi_types::private::{verbs_device, verbs_device_ops};
use uwarp_abi_types::verbs::{ibv_context, ibv_device, verbs_context};
use uwarp_driver::port::Port;
use uwarp_driver::{Channel, Nic, RdmaDevice, netdev};
use uwarp_process::Mutex;

use super::event::PortEvents;
use super::view;
use crate::failure::Failure;
use crate::object::{self, Object, Visible, look, zeroed};

/// Only our device has this table: vendor libraries compare its address with the address of their own table.
static OPERATIONS: verbs_device_ops = verbs_device_ops { name: c"uwarp".as_ptr(), reserved: [0; 31] };

/// `abi_compat` of a context that has a `verbs_context` around it.
const EXTENDED: *mut c_void = std::ptr::without_provenance_mut(usize::MAX);

/// Makes what C sees of a device; returns where it is.
fn make(device: &RdmaDevice) -> usize {
    let shown = view::shown();
    // SAFETY: plain C data.
    let mut c: verbs_device = unsafe { zeroed() };
    c.device.node_type = shown.node_type;
    c.device.transport_type = shown.transport;
    let (name, command) = (device.name(), format!("uverbs{}", device.number()));
    copy_text(&mut c.device.name, name);
    copy_text(&mut c.device.dev_name, &command);
    copy_text(&mut c.device.dev_path, &format!("/sys/class/infiniband_verbs/{command}"));
    copy_text(&mut c.device.ibdev_path, &format!("/sys/class/infiniband/{name}"));
    c.ops = &raw const OPERATIONS;
    Box::leak(Box::new(Visible::new(c))).get().expose_provenance()
}

fn copy_text(to: &mut [c_char], text: &str) {
    // The last byte stays zero.
    let room = to.len() - 1;
    for (to, from) in to[..room].iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

/// A device as C knows it. Lives as long as the process: programs keep pointers to it after
/// `ibv_free_device_list`.
pub fn shown(device: &RdmaDevice) -> *mut ibv_device {
    // The device is the first member of what was made.
    std::ptr::with_exposed_provenance_mut(device.shown(make))
}

/// The device that C knows by this pointer, which may be any. A forked child may ask, so this takes no lock.
pub fn device(c: *mut ibv_device) -> Option<&'static RdmaDevice> {
    RdmaDevice::of_shown(c.addr())
}

/// Node GUID, network byte order, as the verbs have it.
pub fn guid(device: &RdmaDevice) -> u64 {
    u64::from_ne_bytes(device.guid())
}

/// That of the host, whatever devices it has, network byte order.
pub fn host_guid() -> u64 {
    u64::from_ne_bytes(netdev::guid())
}

/// The port of an opened device.
///
/// # Safety
/// `context` is alive or NULL.
pub unsafe fn port(context: *mut ibv_context) -> Result<&'static Port, Failure> {
    // SAFETY: the caller's promise.
    Ok(unsafe { look::<Context>(context) }?.device.port())
}

/// Refuses two objects of different devices, given by their contexts. With a kernel behind them, an object's
/// number means nothing in another context.
///
/// # Safety
/// Both are contexts that objects alive were made on.
pub unsafe fn same_device(one: *mut ibv_context, other: *mut ibv_context) -> Result<(), Failure> {
    // SAFETY: objects keep the memory of their context.
    let (one, other) = unsafe { (look::<Context>(one)?.device, look::<Context>(other)?.device) };
    if !std::ptr::eq(one, other) {
        return Err(Failure::invalid("the objects are of different devices"));
    }
    Ok(())
}

/// An opened device.
#[repr(C)]
pub struct Context {
    c: Visible<verbs_context>,
    /// The NIC behind it.
    pub nic: Arc<Nic>,
    /// Which of the devices it is.
    pub device: &'static RdmaDevice,
    /// Its queue of asynchronous events.
    pub events: Arc<Channel>,
    /// What puts the port's events there.
    _port_events: Arc<PortEvents>,
    /// Objects made on it.
    pub users: object::Users,
    /// A descriptor programs may duplicate, poll and pass around; there is no kernel driver that takes
    /// commands from it. `None`: the device is closed.
    command: Mutex<Option<OwnedFd>, 29>,
}

// SAFETY: repr(C); `ibv_context` is the last member of `verbs_context`, which is the first of `Context`.
unsafe impl Object for Context {
    type C = ibv_context;
    const OFFSET: usize = std::mem::offset_of!(verbs_context, context);
    const NAME: &'static str = "context";
}

/// What the program sees as the descriptor that takes its commands.
fn command() -> Result<OwnedFd, Failure> {
    use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create, open};
    let null = open(c"/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    // A bare chroot has no devices.
    null.or_else(|_| memfd_create(c"uwarp", MemfdFlags::CLOEXEC)).map_err(|error| {
        tracing::error!("cannot open /dev/null, nor a file in its place: {error}");
        error.into()
    })
}

impl Context {
    /// Opens a device once more. `fill_operations` sets what inline functions of verbs.h call through the
    /// context.
    pub fn open(
        device: &'static RdmaDevice,
        fill_operations: fn(&mut verbs_context),
    ) -> Result<*mut ibv_context, Failure> {
        let nic = Nic::open()?;
        let command = command()?;
        let events = Channel::new(nic.engine())?;
        let port_events = PortEvents::new(&events);
        let sink: Weak<PortEvents> = Arc::downgrade(&port_events);
        nic.watch_port(device.port(), sink);
        object::give_with(|_| {
            // SAFETY: plain C data.
            let mut vctx: verbs_context = unsafe { zeroed() };
            fill_operations(&mut vctx);
            vctx.context.device = shown(device);
            vctx.context.cmd_fd = command.as_raw_fd();
            vctx.context.async_fd = events.fd();
            vctx.context.num_comp_vectors = 1;
            vctx.context.abi_compat = EXTENDED;
            vctx.sz = size_of::<verbs_context>();
            let (c, users) = (Visible::new(vctx), object::Users::default());
            let command = Mutex::new(Some(command));
            Ok(Self { c, nic, device, events, _port_events: port_events, users, command })
        })
    }

    /// The device is closed with objects left: they keep the memory, and the kernel's objects nothing.
    pub fn leave(&self) {
        drop(self.command.lock().take());
        self.events.close();
    }
}
