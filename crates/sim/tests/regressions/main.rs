//! Each test is named for what broke.

mod duo;
mod receiving;
mod sending;
