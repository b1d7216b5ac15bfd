//! `uwarp doctor` finds what it is there to find. The library here is a stand-in from the C compiler: whole on the
//! outside, with symbols that answer nothing.

mod common;

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use common::{cc, uwarp};
use serde_json::Value;

fn write(path: PathBuf, content: &str) -> PathBuf {
    fs::write(&path, content).unwrap();
    path
}

/// A libuwarp.so that defines a symbol of each library, and every version but those in `without`.
fn library(directory: &Path, without: &[&str]) {
    let source = write(
        directory.join("library.c"),
        "void *ibv_get_device_list(int *n) { *n = 0; return 0; }\nint rdma_listen(void) { return -1; }\n",
    );
    let nodes = include_str!("../../../abi/symbols.txt").lines().filter_map(|line| line.strip_prefix('['));
    let map: String = nodes
        .filter_map(|line| line.split([' ', ']']).next())
        .filter(|version| !without.contains(version))
        .map(|version| match version {
            "IBVERBS_1.1" => "IBVERBS_1.1 { global: ibv_get_device_list; local: *; };\n".to_owned(),
            "RDMACM_1.0" => "RDMACM_1.0 { global: rdma_listen; };\n".to_owned(),
            _ => format!("{version} {{ }};\n"),
        })
        .collect();
    let script = format!("-Wl,--version-script={}", write(directory.join("map"), &map).display());
    cc(&["-shared", "-fPIC", "-Wl,-soname,libuwarp.so", &script], &directory.join("libuwarp.so"), &[&source]);
    for name in ["libibverbs.so.1", "librdmacm.so.1", "libibverbs.so", "librdmacm.so"] {
        symlink("libuwarp.so", directory.join(name)).unwrap();
    }
}

/// A libibverbs of somebody else, and a program linked against it.
fn program(directory: &Path, flags: &[&str]) -> String {
    let source = write(directory.join("other.c"), "void *ibv_get_device_list(int *n) { return n; }\n");
    let map = write(directory.join("other.map"), "IBVERBS_1.1 { global: *; };\n");
    let other = directory.join("libibverbs.so.1");
    let script = format!("-Wl,--version-script={}", map.display());
    cc(&["-shared", "-fPIC", "-Wl,-soname,libibverbs.so.1", &script], &other, &[&source]);
    let source = write(
        directory.join("main.c"),
        "void *ibv_get_device_list(int *);\nint main(void) { int n; return ibv_get_device_list(&n) != 0; }\n",
    );
    let program = directory.join("program");
    cc(flags, &program, &[&source, &other]);
    program.to_str().unwrap().to_owned()
}

/// What doctor says about one check, and its exit status.
fn check(
    libdir: &Path,
    name: &str,
    variables: &[(&str, &str)],
    program: &[&str],
) -> (String, String, Option<i32>) {
    let output = uwarp(libdir)
        .envs(variables.iter().copied())
        .args(["doctor", "--json", "--"])
        .args(program)
        .output()
        .unwrap();
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    let checks = answer["checks"].as_array().unwrap();
    let found =
        checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("no {name} in {answer}"));
    let word = |key: &str| found[key].as_str().unwrap_or_default().to_owned();
    (word("status"), format!("{} {}", word("found"), word("remedy")), output.status.code())
}

#[test]
fn whole_library_passes_and_its_silence_about_devices_fails() {
    let libdir = tempfile::tempdir().unwrap();
    library(libdir.path(), &[]);
    assert_eq!(check(libdir.path(), "library", &[], &[]).0, "ok");
    assert_eq!(check(libdir.path(), "versions", &[], &[]).0, "ok");
    let (status, words, code) = check(libdir.path(), "device", &[], &[]);
    assert_eq!((status.as_str(), code), ("fail", Some(1)));
    assert!(words.contains("ibv_free_device_list"), "the loader's own words: {words}");
}

#[test]
fn missing_version_and_astray_link_are_named() {
    let libdir = tempfile::tempdir().unwrap();
    library(libdir.path(), &["IBVERBS_1.14"]);
    let (status, words, _) = check(libdir.path(), "versions", &[], &[]);
    assert!(status == "fail" && words.contains("IBVERBS_1.14"), "{words}");
    let link = libdir.path().join("librdmacm.so.1");
    fs::remove_file(&link).unwrap();
    fs::write(&link, "").unwrap();
    let (status, words, _) = check(libdir.path(), "library", &[], &[]);
    assert!(status == "fail" && words.contains("librdmacm.so.1"), "{words}");
}

#[test]
fn program_that_takes_ours_passes() {
    let (libdir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    library(libdir.path(), &[]);
    // A RUNPATH comes after LD_LIBRARY_PATH, so it does no harm.
    let runpath = format!("-Wl,--enable-new-dtags,-rpath,{}", elsewhere.path().display());
    let program = program(elsewhere.path(), &[&runpath]);
    let (status, words, _) = check(libdir.path(), "libraries", &[], &[&program]);
    assert!(status == "ok" && words.contains("it takes libibverbs"), "{words}");
}

#[test]
fn rpath_to_another_library_is_found() {
    let (libdir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    library(libdir.path(), &[]);
    let rpath = format!("-Wl,--disable-new-dtags,-rpath,{}", elsewhere.path().display());
    let program = program(elsewhere.path(), &[&rpath]);
    let (status, words, _) = check(libdir.path(), "libraries", &[], &[&program]);
    assert!(status == "fail" && words.contains("RPATH in the program"), "{words}");
}

#[test]
fn program_that_does_not_start_at_all_is_told_apart() {
    let (libdir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    library(libdir.path(), &["IBVERBS_1.1"]);
    let program = program(elsewhere.path(), &[]);
    let (status, words, _) = check(libdir.path(), "libraries", &[], &[&program]);
    assert!(status == "fail" && words.contains("IBVERBS_1.1"), "{words}");
}

/// As the man page has it: `--` is needed for none but a program whose name begins with a dash.
#[test]
fn program_and_its_arguments_need_no_double_dash() {
    let libdir = tempfile::tempdir().unwrap();
    library(libdir.path(), &[]);
    let output = uwarp(libdir.path()).args(["doctor", "--json", "sh", "-c", "--json"]).output().unwrap();
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    let found = answer["checks"].as_array().unwrap().iter().find(|check| check["name"] == "program");
    assert!(found.is_some_and(|check| check["found"].as_str().unwrap().contains("/sh")), "{answer}");
}

#[test]
fn static_missing_and_foreign_programs_are_named() {
    let libdir = tempfile::tempdir().unwrap();
    library(libdir.path(), &[]);
    let source = write(libdir.path().join("static.c"), "int main(void) { return 0; }\n");
    let path = libdir.path().join("static");
    cc(&["-static"], &path, &[&source]);
    let program = path.to_str().unwrap();
    let (status, words, _) = check(libdir.path(), "program", &[], &[program]);
    assert!(status == "fail" && words.contains("statically"), "{words}");
    let (status, words, _) = check(libdir.path(), "program", &[("PATH", "/nowhere")], &["rping"]);
    assert!(status == "fail" && words.contains("rdmacm-utils"), "{words}");
    // A dynamic program for another processor (e_machine, here of a PDP-10).
    let mut bytes = fs::read("/bin/true").unwrap();
    bytes[18..20].copy_from_slice(&64_u16.to_ne_bytes());
    fs::write(&path, bytes).unwrap();
    let (status, words, _) = check(libdir.path(), "program", &[], &[program]);
    assert!(status == "fail" && words.contains("ELF machine 64"), "{words}");
    // And one of which a part is missing.
    let bytes = fs::read("/bin/true").unwrap();
    fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    let (status, words, _) = check(libdir.path(), "program", &[], &[program]);
    assert!(status == "fail" && words.contains("cut short"), "{words}");
}

/// A 32-bit program of x86 as short as one can be: a header, one segment, and the loader it asks for.
fn program_of_32_bits(path: &Path) -> String {
    let loader = b"/lib/ld-linux.so.2\0";
    let (header_len, segment_len) = (52_u32, 32_u32);
    let mut bytes = b"\x7fELF\x01\x01\x01".to_vec();
    bytes.resize(16, 0);
    let half =
        |bytes: &mut Vec<u8>, values: &[u16]| bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    let word =
        |bytes: &mut Vec<u8>, values: &[u32]| bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    // ET_EXEC, EM_386.
    half(&mut bytes, &[2, 3]);
    word(&mut bytes, &[1, 0, header_len, 0, 0]);
    half(&mut bytes, &[52, 32, 1, 40, 0, 0]);
    // PT_INTERP.
    let (at, len) = (header_len + segment_len, loader.len() as u32);
    word(&mut bytes, &[3, at, 0, 0, len, len, 4, 1]);
    bytes.extend(loader);
    fs::write(path, bytes).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    path.to_str().unwrap().to_owned()
}

/// It would be sent to look for 32-bit libraries otherwise, and none of them is uwarp.
#[test]
#[cfg(target_arch = "x86_64")]
fn program_of_32_bits_is_told_that_there_is_no_uwarp_for_it() {
    let libdir = tempfile::tempdir().unwrap();
    library(libdir.path(), &[]);
    let program = program_of_32_bits(&libdir.path().join("program"));
    let (status, words, _) = check(libdir.path(), "program", &[], &[&program]);
    assert_eq!(status, "fail");
    for word in ["32-bit x86", "the library is for x86-64", "there is no uwarp for 32-bit programs"] {
        assert!(words.contains(word), "{word:?} is not in: {words}");
    }
    let output = uwarp(libdir.path()).args(["doctor", "--json", "--", &program]).output().unwrap();
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(
        answer["checks"].as_array().unwrap().iter().all(|check| check["name"] != "libraries"),
        "{answer}"
    );
}

#[test]
fn settings_and_ports_of_the_environment_are_judged() {
    let libdir = tempfile::tempdir().unwrap();
    library(libdir.path(), &[]);
    let (status, words, _) = check(libdir.path(), "settings", &[("UWARP_CRC", "perhaps")], &[]);
    assert!(status == "fail" && words.contains("UWARP_CRC=perhaps"), "{words}");
    let taken = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let range = format!("{port}-{port}");
    let (status, words, _) = check(libdir.path(), "ports", &[("UWARP_PORT_RANGE", &range)], &[]);
    assert!(status == "fail" && words.contains("0 of the first 1"), "{words}");
    drop(taken);
    assert_eq!(check(libdir.path(), "ports", &[("UWARP_PORT_RANGE", &range)], &[]).0, "ok");
}
