//! Virtual clock and seeded network for protocol tests.
