//! Ids of datagrams (`RDMA_PS_UDP`, `RDMA_PS_IPOIB`) have no stream. Connecting is a lookup; accepting
//! answers it.

use std::net::SocketAddr;

use uwarp_llp::carrier::Watch;
use uwarp_llp::udp::Socket;
use uwarp_rnic::mr::random_u32;

use super::Id;
use super::owner::Asking;
use crate::error::CmError;
use crate::state::Step;

impl Id {
    /// Asks the peer which queue pair serves its port. Answered by [`crate::EventKind::Established`], which
    /// names the queue pair, or by [`crate::EventKind::Unreachable`].
    pub fn look_up(&self, private_data: &[u8]) -> Result<(), CmError> {
        if !self.is_datagram() {
            return Err(CmError::Invalid("not an id of datagrams"));
        }
        self.runner.call_with(|life, _, now| {
            life.check(Step::Connect)?;
            let (Some(mut local), Some(peer)) = (life.local(), life.peer()) else {
                return Err(CmError::Invalid("no remote address"));
            };
            // Before anything is watched.
            let transaction = random_u32()?;
            local.set_port(0);
            let socket = Socket::bind_address(local)?;
            // Only a connected socket reports that no program listens.
            socket.connect(peer)?;
            let watched = self.runner.watch_datagrams(Watch::Descriptor(socket.fd()))?;
            life.look_up(now, transaction, private_data)?;
            self.owner().kept.lock().asking = Some(Asking::new(watched, socket));
            Ok(())
        })
    }

    /// Answers the lookup that this id stands for with this queue pair. No event follows.
    pub fn answer(&self, qpn: u32, qkey: u32, private_data: &[u8]) -> Result<(), CmError> {
        self.runner.call(|life, _| life.answer(qpn, qkey, private_data))
    }

    /// Reports that the program may join a group; `context` is the program's. Answered by
    /// [`crate::EventKind::MulticastJoin`], at once.
    pub fn join(&self, group: SocketAddr, context: usize) -> Result<(), CmError> {
        self.runner.call(|life, _| life.join(group, context))
    }
}
