//! Every scenario of the model, under a bounded number of orders of threads; `UWARP_MODEL_EXECUTIONS` raises
//! the number.

use uwarp_model::scenarios::{check, engine, locks, rings};

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
    locks:
        no_readiness_is_lost
        deregistering_waits_for_uses
        rights_change_beside_uses_and_invalidation;
    rings:
        no_completion_comes_between_arming_and_sleeping
        completions_come_out_once
        feeders_come_and_go
        a_refill_reaches_all_that_wait;
    engine:
        blocked_threads_are_woken
        what_comes_at_once_wakes_all_that_block
        what_comes_after_a_leader_is_served
        what_comes_after_a_leader_that_left_without_a_word_is_served
        a_leader_that_is_held_up_gets_its_event
        a_thread_that_waits_in_vain_is_dismissed
        an_event_that_is_left_is_taken_by_another
        events_of_other_threads_wake_those_that_block
        what_goes_with_its_object_takes_nothing_along
        a_timer_set_at_any_moment_runs_out_in_time
        a_leader_runs_timers
        a_descriptor_that_was_polled_is_not_forgotten
        a_descriptor_that_was_polled_is_not_forgotten_beside_a_leader
        that_polling_has_stopped_is_noticed
        a_program_that_waits_on_the_descriptor_is_woken
        exit_is_told_to_all;
}

#[test]
fn the_background_thread_enters_every_mode() {
    check(engine::every_mode_is_entered);
    let modes = engine::MODES.lock().unwrap();
    let modes: Vec<_> = modes.iter().map(String::as_str).collect();
    let all = ["AwaitingLeader", "Awake", "BesideLeads", "Napping", "Serving", "StandingBack", "TakingBack"];
    assert_eq!(modes, all);
}
