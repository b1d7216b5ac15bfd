//! Every scenario of the model, under a bounded number of orders of threads; `UWARP_MODEL_EXECUTIONS` raises
//! the number.

use uwarp_model::scenarios::{check, datagrams, engine, futexes, locks, rings, runners};

macro_rules! scenarios {
    ($($module:ident: $($name:ident)*;)*) => {
        $($(
            #[test]
            fn $name() {
                check($module::$name);
            }
        )*)*
    };
}

scenarios! {
    futexes:
        a_mutex_has_one_holder_and_is_passed_on
        a_writer_is_alone_and_readers_and_writers_get_in
        who_waits_for_the_last_change_hears_of_it;
    locks:
        no_readiness_is_lost
        deregistering_waits_for_uses
        rights_change_beside_uses_and_invalidation
        a_region_with_windows_is_busy_or_gone
        a_window_goes_once_and_its_region_after_it;
    rings:
        no_completion_comes_between_arming_and_sleeping
        completions_come_out_once
        feeders_come_and_go
        a_refill_reaches_all_waiting_queue_pairs;
    runners:
        what_has_come_is_read_to_its_end
        what_is_posted_from_runner_to_runner_arrives
        a_call_gets_its_answer_from_any_thread
        a_runner_that_is_destroyed_is_gone;
    datagrams:
        datagrams_of_shared_queue_pairs_come_out_once
        room_is_noticed_beside_a_thread_that_polls
        datagrams_that_wait_for_more_go_out
        nothing_completes_after_destruction
        members_of_groups_come_and_go;
    engine:
        blocked_threads_are_woken
        events_at_the_same_time_wake_all_blocked_threads
        input_after_a_leader_is_served
        input_after_a_leader_that_never_returned_is_served
        a_delayed_leader_gets_its_event
        a_thread_that_waits_without_input_is_dismissed
        an_event_that_one_thread_leaves_is_taken_by_another
        events_of_other_threads_wake_blocked_threads
        destroying_an_object_removes_only_its_own_events
        a_timer_set_at_any_moment_expires_in_time
        a_leader_runs_timers
        a_descriptor_that_was_polled_is_served_afterwards
        a_descriptor_that_was_polled_is_served_beside_a_leader
        the_end_of_polling_is_noticed
        a_program_that_waits_on_the_descriptor_is_woken
        an_event_loop_with_a_channel_gets_its_events
        an_event_loop_is_called_for_what_no_descriptor_reports
        what_is_raised_wakes_who_sleeps
        what_a_look_finds_wakes_who_sleeps
        what_is_raised_wakes_an_event_loop
        exit_is_reported_to_all;
}

#[test]
fn the_background_thread_enters_every_mode() {
    check(engine::every_mode_is_entered);
    let modes = engine::MODES.lock().unwrap();
    let modes: Vec<_> = modes.iter().map(String::as_str).collect();
    let all = ["AwaitingLeader", "Awake", "BesideLeads", "Napping", "Serving", "StandingBack", "TakingBack"];
    assert_eq!(modes, all);
}
