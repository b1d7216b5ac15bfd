//! Who receives from the UDP socket of a port.

use std::net::IpAddr;
use std::sync::{Arc, Weak};

use smallvec::SmallVec;
use uwarp_llp::udp::Incoming;
use uwarp_rnic::ah::{QPN_MULTICAST, port_of};

use super::UdQp;
use crate::sync::RwLock;

/// Who receives from a port.
pub(super) enum Receivers {
    /// The queue pair that the header names; their places go by the low byte of the number.
    Numbers { port: u16, places: RwLock<Vec<Weak<UdQp>>, 19> },
    /// The members of the group that the datagram was sent to, each a copy.
    Groups(RwLock<Vec<Member>, 19>),
}

pub(super) struct Member {
    pub group: IpAddr,
    /// On which the queue pair is a member; 0: on all.
    pub interface: u32,
    pub qp: Weak<UdQp>,
}

impl Member {
    /// What another queue pair has joined on another interface comes to the same socket.
    fn gets(&self, incoming: &Incoming) -> bool {
        let everywhere = self.interface == 0 || incoming.interface == 0;
        self.group == incoming.to && (everywhere || self.interface == incoming.interface)
    }
}

impl Receivers {
    pub fn find(&self, qpn: u32, incoming: &Incoming) -> SmallVec<[Arc<UdQp>; 1]> {
        match self {
            Self::Numbers { port, places } if port_of(qpn) == *port => {
                let places = places.read();
                places.get((qpn & 0xFF) as usize).and_then(Weak::upgrade).into_iter().collect()
            }
            Self::Groups(members) if qpn == QPN_MULTICAST => {
                let members = members.read();
                let meant = members.iter().filter(|member| member.gets(incoming));
                meant.filter_map(|member| member.qp.upgrade()).collect()
            }
            _ => SmallVec::new(),
        }
    }

    pub fn enter(&self, qpn: u32, qp: Weak<UdQp>) {
        if let Self::Numbers { places, .. } = self
            && let Some(place) = places.write().get_mut((qpn & 0xFF) as usize)
        {
            *place = qp;
        }
    }
}
