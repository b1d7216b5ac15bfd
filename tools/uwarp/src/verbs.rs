//! Lists the devices of the library, through the same entry points as any program.
//!
//! It loads the library and calls C functions of it, hence its `unsafe`.

use std::ffi::{CStr, OsString, c_char, c_int};
use std::fmt;
use std::io;
use std::mem;
use std::net::Ipv6Addr;
use std::path::Path;
use std::ptr::{self, NonNull};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use uwarp_abi_types::verbs::{
    IBV_LINK_LAYER_ETHERNET, IBV_LINK_LAYER_INFINIBAND, IBV_NODE_RNIC, IBV_TRANSPORT_IWARP, ibv_context,
    ibv_device, ibv_device_attr, ibv_gid_entry, ibv_port_attr,
};

/// A device as programs see it.
pub struct Device {
    pub name: String,
    /// Name of its character device below /dev/infiniband.
    pub uverbs: String,
    /// In network byte order.
    pub guid: [u8; 8],
    /// In network byte order.
    pub sys_image_guid: [u8; 8],
    pub firmware: String,
    pub is_rnic: bool,
    pub is_iwarp: bool,
    pub ports: Vec<Port>,
}

pub struct Port {
    pub number: u8,
    pub state: String,
    pub link_layer: LinkLayer,
    /// Bytes; verbs know only powers of two from 256 to 4096.
    pub active_mtu: u32,
    pub max_message: u32,
    pub lid: u16,
    pub gids: Vec<Gid>,
    pub pkeys: Vec<u16>,
    /// As `ibv_query_port` fills it.
    pub attributes: ibv_port_attr,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum LinkLayer {
    Ethernet,
    Infiniband,
    Unspecified,
}

pub struct Gid {
    pub index: u32,
    pub raw: Ipv6Addr,
    /// `IBV_GID_TYPE_*`.
    pub kind: u32,
    /// Index of the network interface; 0 if the library names none.
    pub interface: u32,
}

/// Why the devices could not be listed.
#[derive(Debug)]
pub enum Error {
    /// The loader refused; the text is its own.
    Load(String),
    /// A function of the library answered with an error.
    Call { function: &'static str, error: io::Error },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Load(reason) => write!(f, "the loader says: {reason}"),
            Error::Call { function, error } => write!(f, "{function} says: {error}"),
        }
    }
}

/// Loads the library under `path`, with `environment` set for it, and lists its devices.
///
/// The library stays loaded. To be called before this process has a second thread.
pub fn devices(path: &Path, environment: &[(&'static str, OsString)]) -> Result<Vec<Device>, Error> {
    for (name, value) in environment {
        // SAFETY: the command is single-threaded up to here, as this function's contract requires.
        unsafe { std::env::set_var(name, value) };
    }
    let verbs = Verbs::load(path)?;
    let mut count: c_int = 0;
    // SAFETY: the signature is that of <infiniband/verbs.h>, and `count` outlives the call.
    let list = unsafe { (verbs.get_device_list)(&mut count) };
    let list = NonNull::new(list).ok_or_else(|| Error::last("ibv_get_device_list"))?;
    let mut devices = Vec::new();
    for index in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the list holds `count` pointers to devices, valid until it is freed below.
        let device = unsafe { list.add(index).read() };
        devices.push(verbs.describe(device)?);
    }
    // SAFETY: the list came from ibv_get_device_list and is freed once; no device of it is used any more.
    unsafe { (verbs.free_device_list)(list.as_ptr()) };
    Ok(devices)
}

/// The functions used, under the names and types of `<infiniband/verbs.h>`.
struct Verbs {
    get_device_list: unsafe extern "C" fn(*mut c_int) -> *mut *mut ibv_device,
    free_device_list: unsafe extern "C" fn(*mut *mut ibv_device),
    get_device_name: unsafe extern "C" fn(*mut ibv_device) -> *const c_char,
    get_device_guid: unsafe extern "C" fn(*mut ibv_device) -> u64,
    open_device: unsafe extern "C" fn(*mut ibv_device) -> *mut ibv_context,
    close_device: unsafe extern "C" fn(*mut ibv_context) -> c_int,
    query_device: unsafe extern "C" fn(*mut ibv_context, *mut ibv_device_attr) -> c_int,
    query_port: unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int,
    query_pkey: unsafe extern "C" fn(*mut ibv_context, u8, c_int, *mut u16) -> c_int,
    query_gid_ex: unsafe extern "C" fn(*mut ibv_context, u32, u32, *mut ibv_gid_entry, u32, usize) -> c_int,
    port_state_str: unsafe extern "C" fn(u32) -> *const c_char,
}

impl Verbs {
    fn load(path: &Path) -> Result<Verbs, Error> {
        // SAFETY: libuwarp has no constructor that requires anything of its caller. Now, so that a symbol
        // that is missing is an error here and not a crash later.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(Error::load)?;
        // Threads of the library may run until the process ends, so its code must stay.
        let library: &'static Library = Box::leak(Box::new(library));
        // SAFETY: the types above are those of the header for these names. ibv_query_port's own type names a
        // shorter structure, a prefix of the one passed.
        unsafe {
            Ok(Verbs {
                get_device_list: symbol(library, c"ibv_get_device_list")?,
                free_device_list: symbol(library, c"ibv_free_device_list")?,
                get_device_name: symbol(library, c"ibv_get_device_name")?,
                get_device_guid: symbol(library, c"ibv_get_device_guid")?,
                open_device: symbol(library, c"ibv_open_device")?,
                close_device: symbol(library, c"ibv_close_device")?,
                query_device: symbol(library, c"ibv_query_device")?,
                query_port: symbol(library, c"ibv_query_port")?,
                query_pkey: symbol(library, c"ibv_query_pkey")?,
                query_gid_ex: symbol(library, c"_ibv_query_gid_ex")?,
                port_state_str: symbol(library, c"ibv_port_state_str")?,
            })
        }
    }

    fn describe(&self, device: *mut ibv_device) -> Result<Device, Error> {
        // SAFETY: `device` is in a list that has not been freed; the name lives as long as the device.
        let (name, uverbs, guid, node_type, transport) = unsafe {
            let device_ref = &*device;
            let name = text((self.get_device_name)(device));
            let uverbs = text(device_ref.dev_name.as_ptr());
            (name, uverbs, (self.get_device_guid)(device), device_ref.node_type, device_ref.transport_type)
        };
        // SAFETY: as above.
        let context = unsafe { (self.open_device)(device) };
        if context.is_null() {
            return Err(Error::last("ibv_open_device"));
        }
        let attributes = self.attributes(context);
        // SAFETY: the context is open and used no more after this.
        unsafe { (self.close_device)(context) };
        let (attributes, ports) = attributes?;
        Ok(Device {
            name,
            uverbs,
            guid: guid.to_ne_bytes(),
            sys_image_guid: attributes.sys_image_guid.to_ne_bytes(),
            firmware: text(attributes.fw_ver.as_ptr()),
            is_rnic: node_type == IBV_NODE_RNIC,
            is_iwarp: transport == IBV_TRANSPORT_IWARP,
            ports,
        })
    }

    fn attributes(&self, context: *mut ibv_context) -> Result<(ibv_device_attr, Vec<Port>), Error> {
        // SAFETY: all fields are integers, for which zero is a value.
        let mut attributes: ibv_device_attr = unsafe { mem::zeroed() };
        // SAFETY: the context is open, and the structure is as large as the header's.
        check("ibv_query_device", unsafe { (self.query_device)(context, &mut attributes) })?;
        let ports = (1..=attributes.phys_port_cnt)
            .map(|number| self.port(context, number))
            .collect::<Result<_, _>>()?;
        Ok((attributes, ports))
    }

    fn port(&self, context: *mut ibv_context, number: u8) -> Result<Port, Error> {
        // SAFETY: all fields are integers, for which zero is a value.
        let mut port: ibv_port_attr = unsafe { mem::zeroed() };
        // SAFETY: the context is open, and the structure is at least as large as what the function fills.
        check("ibv_query_port", unsafe { (self.query_port)(context, number, &mut port) })?;
        let mut gids = Vec::new();
        for index in 0..u32::try_from(port.gid_tbl_len).unwrap_or(0) {
            // SAFETY: all fields are integers or arrays of them, for which zero is a value.
            let mut entry: ibv_gid_entry = unsafe { mem::zeroed() };
            let size = size_of::<ibv_gid_entry>();
            // SAFETY: the context is open, and `size` is the structure's own.
            let status = unsafe {
                (self.query_gid_ex)(context, number.into(), index, ptr::from_mut(&mut entry), 0, size)
            };
            // ENODATA: an empty slot.
            if status == 0 {
                // SAFETY: every pattern of 16 bytes is a value of `raw`.
                let raw = Ipv6Addr::from(unsafe { entry.gid.raw });
                gids.push(Gid { index, raw, kind: entry.gid_type, interface: entry.ndev_ifindex });
            }
        }
        let pkeys = (0..port.pkey_tbl_len).filter_map(|index| {
            let mut pkey = 0;
            // SAFETY: the context is open, and `pkey` outlives the call.
            let status = unsafe { (self.query_pkey)(context, number, index.into(), &mut pkey) };
            (status == 0).then_some(u16::from_be(pkey))
        });
        let pkeys = pkeys.collect();
        Ok(Port {
            number,
            // SAFETY: the function returns a constant string for every number.
            state: text(unsafe { (self.port_state_str)(port.state) }),
            link_layer: match port.link_layer.into() {
                IBV_LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
                IBV_LINK_LAYER_INFINIBAND => LinkLayer::Infiniband,
                _ => LinkLayer::Unspecified,
            },
            // enum ibv_mtu: 1 is 256, and each next one twice as much.
            active_mtu: 128_u32.checked_shl(port.active_mtu).unwrap_or(0),
            max_message: port.max_msg_sz,
            lid: port.lid,
            gids,
            pkeys,
            attributes: port,
        })
    }
}

impl Error {
    fn load(error: libloading::Error) -> Error {
        // The loader's message is in the source; libloading's text around it does not help a user.
        let words = std::error::Error::source(&error).map(ToString::to_string);
        Error::Load(words.unwrap_or_else(|| error.to_string()))
    }

    fn last(function: &'static str) -> Error {
        Error::Call { function, error: io::Error::last_os_error() }
    }
}

/// The verbs' convention: 0, or an error number.
fn check(function: &'static str, status: c_int) -> Result<(), Error> {
    match status {
        0 => Ok(()),
        number => Err(Error::Call { function, error: io::Error::from_raw_os_error(number.abs()) }),
    }
}

/// # Safety
/// `T` must be the type of a pointer to the function of that name.
unsafe fn symbol<T: Copy>(library: &'static Library, name: &CStr) -> Result<T, Error> {
    // SAFETY: as the caller vouches for.
    unsafe { library.get::<T>(name.to_bytes_with_nul()) }.map(|symbol| *symbol).map_err(Error::load)
}

/// Copies a C string; an absent one is empty.
fn text(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY: callers pass strings that end with a NUL and do not change meanwhile.
    unsafe { CStr::from_ptr(string) }.to_string_lossy().into_owned()
}
