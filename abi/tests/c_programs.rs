//! C programs compiled against the distribution's headers. Here is what needs no connection; programs that connect are in
//! `conformance/`.

mod common;

#[test]
fn vendor_libraries_say_that_the_device_is_not_theirs() {
    common::passes("vendor", &["-lmlx5", "-lefa", "-libverbs"]);
}

#[test]
fn objects_without_a_connection() {
    common::passes("objects", &["-libverbs"]);
}

#[test]
fn extended_completion_queues_and_work_request_builders() {
    common::passes("extended", &["-libverbs"]);
}

#[test]
fn every_verb_is_refused_in_a_forked_child() {
    common::passes("forked", &["-libverbs"]);
}

#[test]
fn nothing_starts_before_a_device_is_opened() {
    common::passes("idle", &["-libverbs"]);
}

#[test]
fn the_view_decides_what_the_device_passes_for() {
    let program = common::compile("view", &["-libverbs"]);
    let seen = ["iwarp", "roce", "ib"].map(|view| common::run(&program, &[("UWARP_VIEW", view)]));
    assert_eq!(
        seen,
        [
            "node 4 transport 1 link layer 2 gid type 0\n",
            "node 1 transport 0 link layer 2 gid type 2\n",
            "node 1 transport 0 link layer 1 gid type 0\n",
        ]
    );
}

#[test]
fn the_log_says_why_a_call_was_refused() {
    let program = common::compile("refused", &["-libverbs"]);
    let text = common::run(&program, &[("UWARP_LOG", "debug")]);
    assert!(text.contains("ibv_create_cq: cqe is outside what the device allows"), "{text}");
}

/// "Resource temporarily unavailable" alone sent people to look for memory and descriptors.
#[test]
fn a_device_that_gets_no_thread_names_the_limits() {
    let program = common::compile("no_threads", &["-libverbs"]);
    let text = common::run(&program, &[("UWARP_LOG", "error")]);
    for word in ["cannot start: ", "`ulimit -u`", "pids.max", "kernel.threads-max"] {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
}
