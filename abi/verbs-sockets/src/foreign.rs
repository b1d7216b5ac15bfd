//! Functions of librdmacm.so.1 and libibverbs.so.1. They are loaded when the first socket is set to
//! `IWARP_MODE`: which libraries these are is the loader's to decide, as for any program.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_int, c_void};

use libc::sockaddr;
use rustix::io::Errno;
use uwarp_abi_types::rdmacm::{
    rdma_cm_event, rdma_cm_id, rdma_conn_param, rdma_event_channel, rdma_port_space,
};
use uwarp_abi_types::verbs::{
    ibv_comp_channel, ibv_context, ibv_cq, ibv_device_attr, ibv_mr, ibv_pd, ibv_qp_init_attr,
};
use uwarp_process::PerProcess;

macro_rules! functions {
    ($($library:literal: $(fn $name:ident($($type:ty),*) $(-> $ret:ty)?;)*)*) => {
        /// The functions, each as its man page has it.
        pub struct Foreign {
            $($(pub $name: unsafe extern "C" fn($($type),*) $(-> $ret)?,)*)*
        }

        impl Foreign {
            fn load() -> Option<Self> {
                $(let library = open($library)?;
                $(let $name = find(library, concat!(stringify!($name), "\0"))?;)*)*
                // SAFETY: they have these types, by the libraries' headers.
                Some(unsafe {
                    Self { $($($name: std::mem::transmute::<
                        *mut c_void,
                        unsafe extern "C" fn($($type),*) $(-> $ret)?,
                    >($name),)*)* }
                })
            }
        }
    };
}

functions! {
    c"libibverbs.so.1":
    fn ibv_query_device(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    fn ibv_alloc_pd(*mut ibv_context) -> *mut ibv_pd;
    fn ibv_dealloc_pd(*mut ibv_pd) -> c_int;
    fn ibv_create_comp_channel(*mut ibv_context) -> *mut ibv_comp_channel;
    fn ibv_destroy_comp_channel(*mut ibv_comp_channel) -> c_int;
    fn ibv_create_cq(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    fn ibv_destroy_cq(*mut ibv_cq) -> c_int;
    fn ibv_get_cq_event(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    fn ibv_ack_cq_events(*mut ibv_cq, u32);
    fn ibv_reg_mr(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    fn ibv_dereg_mr(*mut ibv_mr) -> c_int;
    c"librdmacm.so.1":
    fn rdma_create_event_channel() -> *mut rdma_event_channel;
    fn rdma_get_cm_event(*mut rdma_event_channel, *mut *mut rdma_cm_event) -> c_int;
    fn rdma_ack_cm_event(*mut rdma_cm_event) -> c_int;
    fn rdma_create_id(*mut rdma_event_channel, *mut *mut rdma_cm_id, *mut c_void, rdma_port_space) -> c_int;
    fn rdma_destroy_id(*mut rdma_cm_id) -> c_int;
    fn rdma_bind_addr(*mut rdma_cm_id, *mut sockaddr) -> c_int;
    fn rdma_get_src_port(*mut rdma_cm_id) -> u16;
    fn rdma_listen(*mut rdma_cm_id, c_int) -> c_int;
    fn rdma_resolve_addr(*mut rdma_cm_id, *mut sockaddr, *mut sockaddr, c_int) -> c_int;
    fn rdma_resolve_route(*mut rdma_cm_id, c_int) -> c_int;
    fn rdma_create_qp(*mut rdma_cm_id, *mut ibv_pd, *mut ibv_qp_init_attr) -> c_int;
    fn rdma_destroy_qp(*mut rdma_cm_id);
    fn rdma_connect(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
    fn rdma_accept(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
    fn rdma_reject(*mut rdma_cm_id, *const c_void, u8) -> c_int;
    fn rdma_disconnect(*mut rdma_cm_id) -> c_int;
}

impl Foreign {
    /// Those of this process. `NODEV`: a library or function is not there.
    pub fn get() -> Result<&'static Self, Errno> {
        // If two threads load them at once, one finding is kept.
        static FOREIGN: PerProcess<Option<Foreign>> = PerProcess::new(Foreign::load);
        FOREIGN.as_ref().ok_or(Errno::NODEV)
    }
}

fn open(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a name.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
    (!library.is_null()).then_some(library)
}

/// `name` ends with a null byte.
fn find(library: *mut c_void, name: &str) -> Option<*mut c_void> {
    let name = CStr::from_bytes_with_nul(name.as_bytes()).ok()?;
    // SAFETY: a library, and a name.
    let function = unsafe { libc::dlsym(library, name.as_ptr()) };
    (!function.is_null()).then_some(function)
}

/// The error of a call that sets `errno`.
pub fn last() -> Errno {
    // SAFETY: the calling thread's own.
    Errno::from_raw_os_error(unsafe { *libc::__errno_location() })
}
