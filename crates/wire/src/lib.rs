//! iWARP wire formats: MPA, DDP, RDMAP, Terminate, CRC32c.
