//! Who is told of a queue pair's stream.

use uwarp_rnic::qp::Disconnect;

/// Learns how a stream begins and ends. Called without the queue pair's lock; must not block.
pub trait StreamObserver: Send + Sync {
    /// Both sides are up: for the responder, the initiator's first FPDU has arrived. Called once at most.
    fn established(&self);
    /// The stream has ended; the queue pair is in the error state and its work requests are flushed. In the
    /// roce and ib views it may still be in RTS, until the program reacts (docs/adr/011). Called once at
    /// most.
    fn disconnected(&self, why: Disconnect);
}
