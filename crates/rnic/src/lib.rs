//! The RNIC: protection domains, memory regions, queue pairs, completion queues.
