//! TUN devices (`tuntap.rst` of the kernel's documentation).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::thread::LinkNameSpaceType;

/// `TUNSETIFF` of `<linux/if_tun.h>`: `_IOW('T', 202, int)`.
const SET_IFF: rustix::ioctl::Opcode = rustix::ioctl::opcode::write::<i32>(b'T', 202);
/// `IFF_TUN | IFF_NO_PI`: packets of IP, nothing before them.
const FLAGS: u16 = 0x0001 | 0x1000;
/// `IFNAMSIZ`.
const NAME: usize = 16;

/// `struct ifreq` as far as the call reads it.
#[repr(C)]
struct Request {
    name: [u8; NAME],
    flags: u16,
    rest: [u8; 22],
}

/// Makes a device in a network namespace, down and without an address. It goes away with the descriptor.
pub fn device_in(namespace: File, name: &str) -> io::Result<OwnedFd> {
    within(namespace, || {
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let device = rustix::fs::open("/dev/net/tun", flags, Mode::empty())?;
        let mut request = Request { name: [0; NAME], flags: FLAGS, rest: [0; 22] };
        // With a zero behind it.
        let most = request.name.len() - 1;
        for (place, byte) in request.name[..most].iter_mut().zip(name.bytes()) {
            *place = byte;
        }
        // SAFETY: TUNSETIFF reads and writes a `struct ifreq`, whose size `Request` has. (The number has the
        // size of an int in it, which is a mistake of the kernel's that it cannot take back.)
        unsafe {
            rustix::ioctl::ioctl(&device, rustix::ioctl::Updater::<SET_IFF, Request>::new(&mut request))
        }?;
        Ok(device)
    })
}

/// Calls it on a thread in that network namespace.
fn within<T: Send>(namespace: File, call: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let network = Some(LinkNameSpaceType::Network);
            rustix::thread::move_into_link_name_space(namespace.as_fd(), network)?;
            call()
        });
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread has panicked")))
    })
}

#[cfg(test)]
mod tests {
    use rustix::net::netdevice::name_to_index;
    use rustix::net::{AddressFamily, SocketType, socket};
    use rustix::thread::{UnshareFlags, unshare_unsafe};

    use super::*;
    use crate::{Bottleneck, Counts, DEVICE, Shape};

    /// A new one, which lives as long as the descriptor.
    fn namespace() -> File {
        let thread = std::thread::spawn(|| {
            // SAFETY: the thread leaves its network namespace; no descriptor is involved.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.expect("CAP_SYS_ADMIN");
            File::open("/proc/thread-self/ns/net").expect("a namespace")
        });
        thread.join().expect("a thread")
    }

    fn has_device(namespace: &File) -> bool {
        let namespace = namespace.try_clone().expect("a descriptor");
        let look = || {
            let socket = socket(AddressFamily::INET, SocketType::DGRAM, None)?;
            Ok(name_to_index(socket, DEVICE).is_ok())
        };
        within(namespace, look).expect("a look")
    }

    #[test]
    fn both_namespaces_get_a_device_as_long_as_the_path_lives() {
        let namespaces = [namespace(), namespace()];
        assert!(!namespaces.iter().any(has_device));
        let own = namespaces.each_ref().map(|namespace| namespace.try_clone().expect("a descriptor"));
        let path = Bottleneck::between(own, [Shape::default(); 2], 1).expect("devices");
        assert!(namespaces.iter().all(has_device));
        assert_eq!(path.counts(), [Counts::default(); 2]);
        drop(path);
        assert!(!namespaces.iter().any(has_device));
    }
}
