//! The devices that programs see: one with all addresses of the host, or one for each network interface
//! (`UWARP_DEVICES`, docs/adr/031).
//!
//! Behind each of them is the same [`crate::Nic`]: a process has one engine and one space of queue pair
//! numbers. A device is a port with addresses, and what belongs to it.

use std::net::SocketAddr;
use std::sync::{LazyLock, OnceLock};

use parking_lot::Mutex;

use crate::config::{Config, Devices};
use crate::fork::OncePerProcess;
use crate::port::Port;
use crate::{address, netdev};

/// A device that programs see. It lives as long as the process: programs keep pointers to what C shows of it.
pub struct RdmaDevice {
    number: usize,
    name: String,
    guid: [u8; 8],
    port: Port,
    shown: OnceLock<usize>,
    /// The opened device that ids share, by its cookie.
    pub shared: OncePerProcess<usize>,
}

/// Those of interfaces, in the order in which they were found. Locked for a look and for adding some.
static OF_INTERFACES: Mutex<Vec<&'static RdmaDevice>> = Mutex::new(Vec::new());

impl RdmaDevice {
    fn new(number: usize, interface: Option<&str>) -> Self {
        Self {
            number,
            name: format!("uwarp{number}"),
            guid: interface.map_or_else(netdev::guid, netdev::guid_of),
            port: Port::new(interface.map(str::to_owned)),
            shown: OnceLock::new(),
            shared: OncePerProcess::new(),
        }
    }

    /// Those that programs see now. With `per-interface`: the interfaces with an address that are up, the
    /// default route's first, the loopback interface only if there is no other; later, one that was seen
    /// before stays as long as it exists, and a new one gets the next number.
    pub fn list() -> Vec<&'static Self> {
        match Config::get().devices {
            Devices::One => vec![Self::of_host()],
            Devices::PerInterface => Self::of_interfaces(),
        }
    }

    /// All that this process has seen.
    pub fn known() -> Vec<&'static Self> {
        match Config::get().devices {
            Devices::One => vec![Self::of_host()],
            Devices::PerInterface => OF_INTERFACES.lock().clone(),
        }
    }

    /// The device that has this address. An address that none has, such as one of the loopback interface, is
    /// the first device's, as with rdma_cm in Linux. `None` if there is no device.
    pub fn of_address(at: SocketAddr) -> Option<&'static Self> {
        let known = Self::known();
        let has = |device: &&&Self| device.has(at);
        let any = Config::get().devices == Devices::One || at.ip().is_loopback();
        let found = if any { known.first() } else { known.iter().find(has) };
        found.copied().or_else(|| {
            let listed = Self::list();
            listed.iter().find(has).or(listed.first()).copied()
        })
    }

    /// Its number, from 0 on.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Its name: `uwarp` and its number.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its node GUID.
    pub fn guid(&self) -> [u8; 8] {
        self.guid
    }

    /// Its only port.
    pub fn port(&self) -> &Port {
        &self.port
    }

    /// Where C's structure of it is; `make` makes it, the first time.
    pub fn shown(&self, make: impl FnOnce(&Self) -> usize) -> usize {
        *self.shown.get_or_init(|| make(self))
    }

    fn has(&self, at: SocketAddr) -> bool {
        let scope = if let SocketAddr::V6(v6) = at { v6.scope_id() } else { 0 };
        let own = self.port.recent_addresses();
        own.iter().any(|own| own.ip == at.ip() && (scope == 0 || own.index == scope))
    }

    fn of_host() -> &'static Self {
        static OF_HOST: LazyLock<RdmaDevice> = LazyLock::new(|| RdmaDevice::new(0, None));
        &OF_HOST
    }

    fn of_interfaces() -> Vec<&'static Self> {
        let usable = address::list();
        let existing = netdev::list();
        let mut known = OF_INTERFACES.lock();
        for address in usable {
            if !known.iter().any(|device| device.port.interface() == Some(&address.interface)) {
                let new = Self::new(known.len(), Some(&address.interface));
                known.push(Box::leak(Box::new(new)));
            }
        }
        let exists = |device: &&&Self| existing.iter().any(|dev| device.port.interface() == Some(&dev.name));
        known.iter().filter(exists).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};

    #[test]
    fn each_interface_is_a_device_with_its_own_addresses_and_guid() {
        let devices = RdmaDevice::of_interfaces();
        let first = address::list().first().expect("an interface with an address").interface.clone();
        assert_eq!(devices[0].port().interface(), Some(&*first), "the default route's is the first one");
        for (number, device) in devices.iter().enumerate() {
            let interface = device.port().interface().expect("one");
            assert_eq!((device.number(), device.name()), (number, &*format!("uwarp{number}")));
            assert!(device.port().addresses().iter().all(|own| own.interface == interface));
            assert!(devices.iter().filter(|other| other.guid() == device.guid()).count() == 1);
            assert_eq!(device.guid()[0] & 3, 2, "local, and no group");
        }
        let again = RdmaDevice::of_interfaces();
        assert!(devices.iter().zip(&again).all(|(one, same)| std::ptr::eq(*one, *same)));
    }

    #[test]
    fn one_device_has_all_addresses() {
        assert_eq!(RdmaDevice::list().len(), 1);
        for ip in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1))] {
            let device = RdmaDevice::of_address(SocketAddr::new(ip, 0)).expect("one");
            assert_eq!((device.name(), device.port().interface()), ("uwarp0", None));
        }
    }
}
