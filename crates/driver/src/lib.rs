//! The loop: sockets, clock and RNIC; who makes progress and when.
