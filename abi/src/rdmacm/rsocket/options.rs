//! Options of sockets. An option without meaning over a queue pair is accepted where librdmacm accepts it.

use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;

use libc::{linger, socklen_t};
use uwarp_abi_types::preload::{
    NOTHING_NEW, SOL_UWARP_PRELOAD, SOMETHING_NEW, UWARP_JOINED, UWARP_LAST_WORDS, UWARP_LOOK, UWARP_PREPARE,
    UWARP_PROGRESS, UWARP_TAKE_OVER, UWARP_UNREAD, UWARP_WATCH, progress, take_over, watch,
};
use uwarp_driver::event_loop::settles;
use uwarp_rsocket::options::Options;
use uwarp_rsocket::poll::{bit, bits};
use uwarp_rsocket::table::{self, Any};
use uwarp_rsocket::upgrade::Role;
use uwarp_rsocket::wire::{scale, unscale};
use uwarp_rsocket::{Datagrams, Errno, Socket};

use crate::convention::MinusOne;
use crate::entry;
use crate::failure::{Failure, required};

/// `SOL_RDMA` of `<rdma/rsocket.h>` and its options.
const SOL_RDMA: c_int = 0x10000;
const RDMA_SQSIZE: c_int = 0;
const RDMA_RQSIZE: c_int = 1;
const RDMA_INLINE: c_int = 2;
const RDMA_IOMAPSIZE: c_int = 3;
const RDMA_ROUTE: c_int = 4;

/// What a path of this device carries in one piece, for programs that ask for it; nothing depends on it.
const MAXSEG: c_int = 4096;
/// Bytes of `struct tcp_info` as of Linux 2.6: what programs of rsockets know.
const TCP_INFO_LEN: usize = 104;
/// `tcpi_state`.
const ESTABLISHED: u8 = 1;
const CLOSED: u8 = 7;
const LISTENING: u8 = 10;

fn unknown() -> Failure {
    Failure::unsupported("the option")
}

/// # Safety
/// `value` has `len` bytes.
unsafe fn int(value: *const c_void, len: socklen_t) -> Result<c_int, Failure> {
    if value.is_null() {
        return Err(Errno::FAULT.into());
    }
    if (len as usize) < size_of::<c_int>() {
        return Err(Failure::invalid("optlen"));
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { value.cast::<c_int>().read_unaligned() })
}

/// A buffer's size as programs set it: twice as much is used, as by the kernel.
fn twice(size: c_int) -> u32 {
    u32::try_from(size).unwrap_or(0).saturating_mul(2)
}

fn short(number: c_int) -> u16 {
    u16::try_from(number.clamp(0, 0xFFFE)).unwrap_or(0xFFFE)
}

/// # Safety
/// `value` has `len` bytes.
unsafe fn set_of_socket(
    socket: &Socket,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> Result<(), Failure> {
    if name == libc::SO_LINGER {
        if value.is_null() || (len as usize) < size_of::<linger>() {
            return Err(Failure::invalid("optlen"));
        }
        // SAFETY: the caller's promise.
        let linger = unsafe { value.cast::<linger>().read_unaligned() };
        let seconds = (linger.l_onoff != 0).then(|| u32::try_from(linger.l_linger).unwrap_or(0));
        return Ok(socket.set_options(false, |o| o.linger = seconds)?);
    }
    // SAFETY: the caller's promise.
    let number = unsafe { int(value, len) }?;
    let on = number != 0;
    match name {
        libc::SO_REUSEADDR => socket.set_options(false, |o| o.reuse_address = on)?,
        libc::SO_OOBINLINE => socket.set_options(false, |o| o.oob_inline = on)?,
        libc::SO_RCVBUF => socket.set_options(false, |o| o.receive_buffer = twice(number))?,
        libc::SO_SNDBUF => socket.set_options(false, |o| o.send_buffer = twice(number))?,
        libc::SO_KEEPALIVE => socket.set_keepalive(on),
        _ => return Err(unknown()),
    }
    Ok(())
}

fn set_of_tcp(socket: &Socket, name: c_int, number: c_int) -> Result<(), Failure> {
    match name {
        libc::TCP_NODELAY => socket.set_options(false, |o| o.no_delay = number != 0)?,
        libc::TCP_KEEPIDLE => {
            let seconds = u32::try_from(number).ok().filter(|seconds| *seconds > 0);
            let seconds = seconds.ok_or_else(|| Failure::invalid("seconds"))?;
            socket.set_options(false, |o| o.keep_idle = seconds)?;
            if socket.options().keepalive {
                socket.set_keepalive(true);
            }
        }
        libc::TCP_KEEPCNT | libc::TCP_KEEPINTVL | libc::TCP_MAXSEG | libc::TCP_CONGESTION => {}
        _ => return Err(unknown()),
    }
    Ok(())
}

fn set_of_rdma(socket: &Socket, name: c_int, number: c_int) -> Result<(), Failure> {
    match name {
        RDMA_SQSIZE => socket.set_options(true, |o| o.sends = short(number))?,
        RDMA_RQSIZE => socket.set_options(true, |o| o.receives = short(number))?,
        RDMA_INLINE => socket.set_options(true, |o| o.inline = short(number))?,
        RDMA_IOMAPSIZE => socket.set_options(true, |o| o.mappings = unscale(scale(short(number))))?,
        // There is one path to each peer.
        RDMA_ROUTE => socket.set_options(true, |_| {})?,
        _ => return Err(unknown()),
    }
    Ok(())
}

/// # Safety
/// `value` has `len` bytes.
unsafe fn set(
    socket: &Socket,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    let number = || unsafe { int(value, len) };
    match (level, name) {
        // SAFETY: the caller's promise.
        (libc::SOL_SOCKET, _) => unsafe { set_of_socket(socket, name, value, len) },
        // A name, not a number.
        (libc::IPPROTO_TCP, libc::TCP_CONGESTION) => Ok(()),
        (SOL_RDMA, RDMA_ROUTE) => set_of_rdma(socket, name, 0),
        (libc::IPPROTO_TCP, _) => set_of_tcp(socket, name, number()?),
        (libc::IPPROTO_IP, libc::IP_TOS) => {
            let tos = number()?.to_le_bytes()[0];
            Ok(socket.set_options(false, |o| o.tos = tos)?)
        }
        (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) => {
            let on = number()? != 0;
            Ok(socket.set_options(false, |o| o.only_v6 = on)?)
        }
        (SOL_RDMA, _) => set_of_rdma(socket, name, number()?),
        (SOL_UWARP_PRELOAD, UWARP_WATCH) => {
            if value.is_null() || (len as usize) < size_of::<watch>() {
                return Err(Failure::invalid("optlen"));
            }
            // SAFETY: the caller's promise.
            let watch { changed, key, settle } = unsafe { value.cast::<watch>().read_unaligned() };
            socket.observe(Box::new(move || changed(key, settles().into())));
            socket.nic().engine().settle_by(Box::new(move || settle()));
            Ok(())
        }
        (SOL_UWARP_PRELOAD, UWARP_TAKE_OVER | UWARP_PREPARE) => {
            if value.is_null() || (len as usize) < size_of::<take_over>() {
                return Err(Failure::invalid("optlen"));
            }
            // SAFETY: the caller's promise.
            let take_over { fd, initiates } = unsafe { value.cast::<take_over>().read_unaligned() };
            let role = if initiates == 0 { Role::Responder } else { Role::Initiator };
            if name == UWARP_TAKE_OVER {
                return Ok(socket.take_over(role)?);
            }
            if fd < 0 {
                socket.give_up_what_was_prepared();
                return Ok(());
            }
            // SAFETY: libuwarp-sockets.so keeps it open during the call.
            Ok(socket.prepare_to_take_over(unsafe { BorrowedFd::borrow_raw(fd) }, role)?)
        }
        _ => Err(unknown()),
    }
}

/// Options of libuwarp-sockets.so. `before` is what the program's variable holds.
fn of_preload(socket: &Socket, name: c_int, before: c_int) -> Result<c_int, Failure> {
    match name {
        UWARP_LOOK => {
            let ready = socket.look(before != 0);
            let news = ready.news.map_or(0, |news| if news { SOMETHING_NEW } else { NOTHING_NEW });
            Ok((bits(ready, bit::IN | bit::OUT | bit::RDHUP) | news).into())
        }
        UWARP_JOINED => Ok(match socket.has_taken_over() {
            Ok(done) => done.into(),
            Err(errno) => -errno.raw_os_error(),
        }),
        UWARP_UNREAD => Ok(c_int::try_from(socket.unread()?).unwrap_or(c_int::MAX)),
        _ => Err(unknown()),
    }
}

/// The value of an option that is a number.
fn number(socket: &Socket, level: c_int, name: c_int) -> Result<c_int, Failure> {
    let o: Options = socket.options();
    let int = |value: u32| c_int::try_from(value).unwrap_or(c_int::MAX);
    Ok(match (level, name) {
        (libc::SOL_SOCKET, libc::SO_REUSEADDR) => o.reuse_address.into(),
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => o.keepalive.into(),
        (libc::SOL_SOCKET, libc::SO_OOBINLINE) => o.oob_inline.into(),
        (libc::SOL_SOCKET, libc::SO_BROADCAST) => 0,
        (libc::SOL_SOCKET, libc::SO_RCVBUF) => int(o.receive_buffer),
        (libc::SOL_SOCKET, libc::SO_SNDBUF) => int(o.send_buffer),
        (libc::SOL_SOCKET, libc::SO_ERROR) => socket.take_error().map_or(0, Errno::raw_os_error),
        (libc::SOL_SOCKET, libc::SO_TYPE) => libc::SOCK_STREAM,
        (libc::SOL_SOCKET, libc::SO_ACCEPTCONN) => socket.is_listening().into(),
        (libc::SOL_SOCKET, libc::SO_DOMAIN) if socket.is_v6() => libc::AF_INET6,
        (libc::SOL_SOCKET, libc::SO_DOMAIN) => libc::AF_INET,
        (libc::SOL_SOCKET, libc::SO_PROTOCOL) => libc::IPPROTO_TCP,
        (libc::IPPROTO_IP, libc::IP_TOS) => o.tos.into(),
        (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) => o.only_v6.into(),
        (libc::IPPROTO_TCP, libc::TCP_NODELAY) => o.no_delay.into(),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => int(o.keep_idle()),
        (libc::IPPROTO_TCP, libc::TCP_KEEPCNT | libc::TCP_KEEPINTVL) => 1,
        (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => MAXSEG,
        (SOL_RDMA, RDMA_SQSIZE) => o.sends.into(),
        (SOL_RDMA, RDMA_RQSIZE) => o.receives.into(),
        (SOL_RDMA, RDMA_INLINE) => o.inline.into(),
        (SOL_RDMA, RDMA_IOMAPSIZE) => o.mappings.into(),
        _ => return Err(unknown()),
    })
}

/// The value of an option, as bytes.
fn value(socket: &Socket, level: c_int, name: c_int) -> Result<Vec<u8>, Failure> {
    match (level, name) {
        (libc::SOL_SOCKET, libc::SO_LINGER) => {
            let linger = socket.options().linger;
            let seconds = c_int::try_from(linger.unwrap_or(0)).unwrap_or(c_int::MAX);
            Ok([c_int::from(linger.is_some()).to_ne_bytes(), seconds.to_ne_bytes()].concat())
        }
        (libc::IPPROTO_TCP, libc::TCP_INFO) => {
            let mut info = vec![0; TCP_INFO_LEN];
            let state = match socket.is_listening() {
                true => LISTENING,
                false if socket.is_connected() => ESTABLISHED,
                false => CLOSED,
            };
            info[..1].fill(state);
            Ok(info)
        }
        // One path to each peer, of which there is nothing to say.
        (SOL_RDMA, RDMA_ROUTE) => Ok(Vec::new()),
        _ => Ok(number(socket, level, name)?.to_ne_bytes().to_vec()),
    }
}

/// Sizes have no effect on datagram sockets: a datagram has one place for it, or is dropped.
///
/// # Safety
/// `value` has `len` bytes.
unsafe fn set_of_datagrams(
    socket: &Datagrams,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    let number = unsafe { int(value, len) }?;
    match (level, name) {
        (libc::SOL_SOCKET, libc::SO_REUSEADDR) => Ok(socket.set_reuse_address(number != 0)?),
        (libc::SOL_SOCKET, libc::SO_SNDBUF | libc::SO_RCVBUF | libc::SO_BROADCAST) => Ok(()),
        (SOL_RDMA, RDMA_SQSIZE | RDMA_RQSIZE | RDMA_INLINE) => Ok(()),
        _ => Err(unknown()),
    }
}

fn number_of_datagrams(level: c_int, name: c_int) -> Result<c_int, Failure> {
    match (level, name) {
        (libc::SOL_SOCKET, libc::SO_TYPE) => Ok(libc::SOCK_DGRAM),
        (libc::SOL_SOCKET, libc::SO_PROTOCOL) => Ok(libc::IPPROTO_UDP),
        (libc::SOL_SOCKET, libc::SO_ERROR | libc::SO_BROADCAST) => Ok(0),
        _ => Err(unknown()),
    }
}

entry! {
    /// rsocket(7).
    fn rsetsockopt(
        socket: c_int,
        level: c_int,
        name: c_int,
        value: *const c_void,
        len: socklen_t,
    ) -> MinusOne {
        match table::any(socket)? {
            Any::Stream(socket) => set(&socket, level, name, value, len),
            Any::Datagrams(socket) => set_of_datagrams(&socket, level, name, value, len),
        }
    }

    /// rsocket(7).
    fn rgetsockopt(
        socket: c_int,
        level: c_int,
        name: c_int,
        value: *mut c_void,
        len: *mut socklen_t,
    ) -> MinusOne {
        let socket = table::any(socket)?;
        let (to, len) = (required(value, "optval")?, required(len, "optlen")?);
        let bytes = match socket {
            Any::Stream(_) if (level, name) == (SOL_UWARP_PRELOAD, UWARP_LAST_WORDS) => {
                let last_words: extern "C" fn() = uwarp_rsocket::last_words;
                (last_words as *const c_void).expose_provenance().to_ne_bytes().to_vec()
            }
            Any::Stream(socket) if (level, name) == (SOL_UWARP_PRELOAD, UWARP_PROGRESS) => {
                if (*len as usize) < size_of::<progress>() {
                    return Err(Failure::invalid("optlen"));
                }
                to.cast::<progress>().write_unaligned(super::event_loop::progress_of(&socket));
                return Ok(());
            }
            Any::Stream(socket) if level == SOL_UWARP_PRELOAD => {
                let before = int(to, *len)?;
                of_preload(&socket, name, before)?.to_ne_bytes().to_vec()
            }
            Any::Stream(socket) => self::value(&socket, level, name)?,
            Any::Datagrams(_) => number_of_datagrams(level, name)?.to_ne_bytes().to_vec(),
        };
        let fits = bytes.len().min(*len as usize);
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast::<u8>(), fits);
        *len = socklen_t::try_from(fits).unwrap_or(0);
        Ok(())
    }
}
