//! Each test is named for what broke.

mod duo;
mod introducing;
mod receiving;
mod sending;
