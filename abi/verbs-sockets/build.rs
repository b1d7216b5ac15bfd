//! How the library is linked.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // It has a thread and handlers, so it stays in the process.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libuwarp-verbs-sockets.so.1");
}
