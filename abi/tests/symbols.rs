//! The names `libuwarp.so` exports.

mod common;

use std::process::Command;

#[test]
fn every_name_of_debian_12_and_of_the_newest_rdma_core_is_there_under_its_version() {
    let check = Command::new(common::root().join("scripts/check-symbols"))
        .arg(common::library().join("libuwarp.so"))
        .output()
        .expect("scripts/check-symbols runs");
    assert!(
        check.status.success(),
        "{}{}",
        String::from_utf8_lossy(&check.stdout),
        String::from_utf8_lossy(&check.stderr)
    );
}

#[test]
fn both_libraries_are_one_object_to_the_loader() {
    common::passes("loader", &["-ldl"]);
}
