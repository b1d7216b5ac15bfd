//! `libuwarp-fs.so`: lets a program and its children see the device below /sys/class/infiniband,
//! /sys/class/infiniband_verbs and /dev/infiniband, without root and although the kernel has no such device.
//!
//! `uwarp run --files on` makes a directory tree of real files, writes what the verbs say into it, and
//! preloads this library. Each function here has the name of one of libc that takes a path. If the path leads
//! into one of the three places, the function goes to the tree instead; else it passes the call on as it is.
//! The RNIC itself is not in here. Why it is made so, and what it cannot show: docs/adr/036.
//!
//! * [`place`]: which paths these are. [`route`]: the tree, and the path that a call is to use.
//! * `uwarp_preload`: the functions that ours stand before.
//! * [`calls`]: functions that go by a path and return a number or a file; [`stat`]: what a file is;
//!   [`names`]: functions that return paths. [`dir`], [`walk`]: listing directories.
//! * [`counters`]: what `uwarp stat` reads, written when a program opens it.

#![deny(unsafe_code)]
// Tests do not stand before libc, so nothing calls what does.
#![cfg_attr(test, allow(dead_code))]

// Reason for all of these: C functions, called and offered.
#[allow(unsafe_code)]
mod calls;
#[allow(unsafe_code)]
mod counters;
#[allow(unsafe_code)]
mod dir;
#[allow(unsafe_code)]
mod names;
mod place;
#[allow(unsafe_code)]
mod route;
#[allow(unsafe_code)]
mod stat;
#[allow(unsafe_code)]
mod walk;
