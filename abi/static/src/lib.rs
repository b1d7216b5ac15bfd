//! `uwarp-abi` as a static library, with all its C functions, for `scripts/link-libuwarp`.
//!
//! A package of its own: cargo optimises across crates only where it makes no Rust library beside
//! the static one, and `uwarp-abi` is a Rust library, too, for its tests. So one call of cargo builds
//! everything that is installed, and compiles once what its parts share.

extern crate uwarp_abi as _;
