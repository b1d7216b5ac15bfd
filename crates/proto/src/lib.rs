//! iWARP protocol machines without sockets or clock.
