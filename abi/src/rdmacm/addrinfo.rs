//! `rdma_getaddrinfo`: names to addresses, by the system's getaddrinfo(3).
//!
//! All memory is malloc's, because programs replace members and `rdma_freeaddrinfo` frees what it finds.

use std::ffi::{CStr, c_char, c_int};
use std::ptr::{null, null_mut};

use libc::{addrinfo, sockaddr, socklen_t};
use uwarp_abi_types::rdmacm::*;
use uwarp_abi_types::verbs::{IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD, IBV_QPT_XRC_RECV, IBV_QPT_XRC_SEND};

use crate::convention::MinusOne;
use crate::entry;
use crate::failure::{Failure, required};
use crate::object::zeroed;

/// AF_IB, which Linux reserves and which is not supported here.
const AF_IB: c_int = 27;

fn no_memory() -> Failure {
    Failure::new(libc::ENOMEM, "no memory")
}

/// The hints in getaddrinfo's form.
fn to_system(hints: &rdma_addrinfo) -> addrinfo {
    // SAFETY: plain C data.
    let mut system: addrinfo = unsafe { zeroed() };
    let flags = hints.ai_flags.cast_unsigned();
    if flags & RAI_PASSIVE != 0 {
        system.ai_flags |= libc::AI_PASSIVE;
    }
    if flags & RAI_NUMERICHOST != 0 {
        system.ai_flags |= libc::AI_NUMERICHOST;
    }
    if hints.ai_family != AF_IB {
        system.ai_family = hints.ai_family;
    }
    system.ai_socktype = match hints.ai_qp_type.cast_unsigned() {
        IBV_QPT_RC | IBV_QPT_UC | IBV_QPT_XRC_SEND | IBV_QPT_XRC_RECV => libc::SOCK_STREAM,
        IBV_QPT_UD => libc::SOCK_DGRAM,
        _ => 0,
    };
    system.ai_protocol = match (hints.ai_port_space.cast_unsigned(), system.ai_socktype) {
        (RDMA_PS_TCP, _) | (RDMA_PS_IB, libc::SOCK_STREAM) => libc::IPPROTO_TCP,
        (RDMA_PS_UDP | RDMA_PS_IPOIB, _) | (RDMA_PS_IB, libc::SOCK_DGRAM) => libc::IPPROTO_UDP,
        _ => 0,
    };
    system
}

/// A copy of an address.
///
/// # Safety
/// `address` points to `length` bytes.
unsafe fn copy(address: *const sockaddr, length: socklen_t) -> Result<*mut sockaddr, Failure> {
    // SAFETY: the caller's promise; malloc's memory is large enough and new.
    unsafe {
        let new = libc::malloc(length as usize);
        if new.is_null() {
            return Err(no_memory());
        }
        std::ptr::copy_nonoverlapping(address.cast::<u8>(), new.cast(), length as usize);
        Ok(new.cast())
    }
}

/// Puts a result of getaddrinfo into `info`.
///
/// # Safety
/// Both are valid.
unsafe fn from_system(
    info: *mut rdma_addrinfo,
    hints: Option<&rdma_addrinfo>,
    found: &addrinfo,
) -> Result<(), Failure> {
    let hint = |member: fn(&rdma_addrinfo) -> c_int| hints.map_or(0, member);
    // SAFETY: the caller's promise.
    unsafe {
        (*info).ai_qp_type = match (hint(|h| h.ai_qp_type), found.ai_socktype) {
            (0, libc::SOCK_STREAM) => IBV_QPT_RC.cast_signed(),
            (0, libc::SOCK_DGRAM) => IBV_QPT_UD.cast_signed(),
            (given, _) => given,
        };
        (*info).ai_port_space = match (hint(|h| h.ai_port_space), found.ai_protocol) {
            (0, libc::IPPROTO_TCP) => RDMA_PS_TCP.cast_signed(),
            (0, libc::IPPROTO_UDP) => RDMA_PS_UDP.cast_signed(),
            (given, _) => given,
        };
        (*info).ai_family = found.ai_family;
        let name = if found.ai_canonname.is_null() { null_mut() } else { libc::strdup(found.ai_canonname) };
        let address = copy(found.ai_addr, found.ai_addrlen)?;
        if found.ai_flags & libc::AI_PASSIVE != 0 {
            (*info).ai_flags = RAI_PASSIVE.cast_signed();
            (*info).ai_src_canonname = name;
            ((*info).ai_src_addr, (*info).ai_src_len) = (address, found.ai_addrlen);
        } else {
            (*info).ai_dst_canonname = name;
            ((*info).ai_dst_addr, (*info).ai_dst_len) = (address, found.ai_addrlen);
        }
    }
    Ok(())
}

/// Looks up; `Ok(Err(code))` is getaddrinfo's refusal.
///
/// # Safety
/// The strings are C strings or NULL, the hints valid or NULL.
pub(super) unsafe fn lookup(
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
) -> Result<Result<*mut rdma_addrinfo, c_int>, Failure> {
    // SAFETY: the caller's promise, here and below.
    unsafe {
        let hints = hints.as_ref();
        if node.is_null() && service.is_null() && hints.is_none() {
            return Err(Failure::invalid("nothing to look up"));
        }
        if hints.is_some_and(|hints| hints.ai_flags.cast_unsigned() & RAI_SA != 0) {
            return Err(Failure::unsupported("InfiniBand service records"));
        }
        let info = libc::calloc(1, size_of::<rdma_addrinfo>()).cast::<rdma_addrinfo>();
        if info.is_null() {
            return Err(no_memory());
        }
        let filled = fill(info, node, service, hints);
        match filled {
            Ok(0) => Ok(Ok(info)),
            Ok(code) => {
                free(info);
                Ok(Err(code))
            }
            Err(failure) => {
                free(info);
                Err(failure)
            }
        }
    }
}

/// # Safety
/// As [`lookup`]; `info` is valid.
unsafe fn fill(
    info: *mut rdma_addrinfo,
    node: *const c_char,
    service: *const c_char,
    hints: Option<&rdma_addrinfo>,
) -> Result<c_int, Failure> {
    // SAFETY: the caller's promise; what getaddrinfo gave is freed once.
    unsafe {
        if !node.is_null() || !service.is_null() {
            let system = hints.map(to_system);
            let mut found: *mut addrinfo = null_mut();
            let code = libc::getaddrinfo(
                node,
                service,
                system.as_ref().map_or(null(), std::ptr::from_ref),
                &raw mut found,
            );
            if code != 0 {
                explain(node, code, hints);
                return Ok(code);
            }
            let converted = match found.as_ref() {
                Some(first) => from_system(info, hints, first),
                None => Ok(()),
            };
            libc::freeaddrinfo(found);
            converted?;
        } else if let Some(hints) = hints {
            (*info).ai_flags = hints.ai_flags;
            (*info).ai_family = hints.ai_family;
            (*info).ai_qp_type = hints.ai_qp_type;
            (*info).ai_port_space = hints.ai_port_space;
            if hints.ai_dst_len > 0 {
                (*info).ai_dst_addr = copy(hints.ai_dst_addr, hints.ai_dst_len)?;
                (*info).ai_dst_len = hints.ai_dst_len;
            }
        }
        if let Some(hints) = hints
            && (*info).ai_src_len == 0
            && hints.ai_src_len > 0
        {
            (*info).ai_src_addr = copy(hints.ai_src_addr, hints.ai_src_len)?;
            (*info).ai_src_len = hints.ai_src_len;
        }
    }
    Ok(0)
}

/// Programs print the code as if it were an errno: "Success". Not for one that only asks whether this is a
/// number.
///
/// # Safety
/// `node` is a string or NULL.
unsafe fn explain(node: *const c_char, code: c_int, hints: Option<&rdma_addrinfo>) {
    let numeric = hints.is_some_and(|hints| hints.ai_flags.cast_unsigned() & RAI_NUMERICHOST != 0);
    if node.is_null() || numeric {
        return;
    }
    // SAFETY: the caller's promise; the C library's sentences are constant.
    let (node, why) = unsafe { (CStr::from_ptr(node), CStr::from_ptr(libc::gai_strerror(code))) };
    tracing::warn!("no address for {}: {}", node.to_string_lossy(), why.to_string_lossy());
}

/// Frees a list.
///
/// # Safety
/// Its members are malloc's or NULL, and nothing uses it any more.
pub unsafe fn free(mut info: *mut rdma_addrinfo) {
    // SAFETY: the caller's promise; free(3) takes NULL.
    unsafe {
        while !info.is_null() {
            let next = (*info).ai_next;
            for member in [
                (*info).ai_connect,
                (*info).ai_route,
                (*info).ai_src_canonname.cast(),
                (*info).ai_dst_canonname.cast(),
                (*info).ai_src_addr.cast(),
                (*info).ai_dst_addr.cast(),
                info.cast(),
            ] {
                libc::free(member);
            }
            info = next;
        }
    }
}

entry! {
    /// rdma_getaddrinfo(3): 0, -1 with `errno`, or an error code of getaddrinfo(3).
    fn rdma_getaddrinfo(
        node: *const c_char,
        service: *const c_char,
        hints: *const rdma_addrinfo,
        res: *mut *mut rdma_addrinfo,
    ) -> MinusOne<c_int> {
        required(res, "res")?;
        match lookup(node, service, hints)? {
            Ok(info) => {
                *res = info;
                Ok(0)
            }
            Err(code) => Ok(code),
        }
    }

    /// rdma_getaddrinfo(3).
    fn rdma_freeaddrinfo(res: *mut rdma_addrinfo) -> () {
        free(res);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::errno;
    use crate::rdmacm::address;

    /// # Safety
    /// As [`lookup`].
    unsafe fn get(
        node: *const c_char,
        service: *const c_char,
        hints: Option<&rdma_addrinfo>,
    ) -> (c_int, *mut rdma_addrinfo) {
        let mut res = null_mut();
        let hints = hints.map_or(null(), std::ptr::from_ref);
        // SAFETY: the caller's promise.
        let code = unsafe { rdma_getaddrinfo(node, service, hints, &raw mut res) };
        (code, res)
    }

    #[test]
    fn a_client_and_a_server_address() {
        // SAFETY: valid strings and structures; each result is freed once.
        unsafe {
            let mut hints: rdma_addrinfo = zeroed();
            hints.ai_port_space = RDMA_PS_TCP.cast_signed();
            let (code, res) = get(c"127.0.0.1".as_ptr(), c"7471".as_ptr(), Some(&hints));
            assert_eq!(code, 0);
            assert_eq!(address::load((*res).ai_dst_addr).unwrap(), "127.0.0.1:7471".parse().unwrap());
            assert_eq!((*res).ai_src_len, 0);
            assert_eq!((*res).ai_qp_type.cast_unsigned(), IBV_QPT_RC);
            assert_eq!((*res).ai_port_space.cast_unsigned(), RDMA_PS_TCP);
            rdma_freeaddrinfo(res);

            hints.ai_flags = RAI_PASSIVE.cast_signed();
            hints.ai_family = libc::AF_INET;
            let (code, res) = get(null(), c"7471".as_ptr(), Some(&hints));
            assert_eq!(code, 0);
            assert_eq!(address::load((*res).ai_src_addr).unwrap(), "0.0.0.0:7471".parse().unwrap());
            assert_eq!((*res).ai_flags.cast_unsigned(), RAI_PASSIVE);
            assert!((*res).ai_dst_addr.is_null());
            rdma_freeaddrinfo(res);
        }
    }

    #[test]
    fn hints_alone_are_copied() {
        let (mut source, length) = address::storage("[::1]:5".parse().unwrap());
        let (mut peer, _) = address::storage("[::1]:6".parse().unwrap());
        // SAFETY: valid structures; the result is freed once.
        unsafe {
            let mut hints: rdma_addrinfo = zeroed();
            hints.ai_family = libc::AF_INET6;
            (hints.ai_src_addr, hints.ai_src_len) = ((&raw mut source).cast(), length);
            (hints.ai_dst_addr, hints.ai_dst_len) = ((&raw mut peer).cast(), length);
            let (code, res) = get(null(), null(), Some(&hints));
            assert_eq!(code, 0);
            assert_eq!(address::load((*res).ai_src_addr).unwrap().port(), 5);
            assert_eq!(address::load((*res).ai_dst_addr).unwrap().port(), 6);
            rdma_freeaddrinfo(res);
        }
    }

    #[test]
    fn what_cannot_be_looked_up() {
        // SAFETY: valid strings and structures.
        unsafe {
            assert_eq!((get(null(), null(), None).0, errno()), (-1, libc::EINVAL));
            let mut hints: rdma_addrinfo = zeroed();
            hints.ai_flags = RAI_NUMERICHOST.cast_signed();
            assert_eq!(get(c"not-a-number".as_ptr(), null(), Some(&hints)).0, libc::EAI_NONAME);
            hints.ai_flags = RAI_SA.cast_signed();
            assert_eq!(get(null(), c"1".as_ptr(), Some(&hints)).0, -1);
            assert_eq!(errno(), libc::EOPNOTSUPP);
            rdma_freeaddrinfo(null_mut());
        }
    }
}
