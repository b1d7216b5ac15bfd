//! Hostile peers: a scripted attacker with an encoder of its own against a program over the built library, in
//! a process of its own.
//!
//! Whatever the attacker does, the same must hold afterwards: the Terminate that the RFCs name, or an end in
//! bounded time; one asynchronous event and every posted work request completed; not a byte changed that the
//! attacker had no right to (the regions lie between pages without access, and everything else is painted);
//! no descriptor left; memory bounded; no crash, no hang; and an honest client of the same process goes on
//! undisturbed, with its data compared. ([`by_number`] has programs and rules of its own.)
//! `docs/security.md` says which attack of RFC 5042 is tried where.

mod adoption;
mod atomics;
mod by_number;
mod client;
mod endings;
mod fields;
mod floods;
mod lookups;
mod over_rd;
mod parts;
mod rows;
mod sequences;
mod setup;
mod silence;
mod windows;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use crate::by_number::{Place, Stage};
use crate::silence::What;
use libtest_mimic::{Arguments, Trial};
use uwarp_conformance::attacker::encode::Codes;
use uwarp_conformance::attacker::peer::Peer;
use uwarp_conformance::attacker::victim::{Report, Victim};
use uwarp_conformance::dist::Dist;
use uwarp_conformance::{Failure, Outcome, cc, require};

/// An attack, with the victim's arguments and environment.
struct Attack {
    name: &'static str,
    run: fn(&mut Victim) -> Outcome,
    args: &'static [&'static str],
    env: &'static [(&'static str, &'static str)],
}

macro_rules! attacks {
    ($args:expr, $env:expr; $($function:path,)*) => {
        [$(Attack { name: stringify!($function), run: $function, args: $args, env: $env }),*]
    };
}

fn attacks() -> Vec<Attack> {
    let mut all = Vec::new();
    all.extend(attacks![&[], &[];
        setup::every_byte_of_the_key,
        setup::every_flag,
        setup::every_revision,
        setup::every_length,
        setup::lengths_that_lie,
        setup::read_depths_and_model,
        setup::first_fpdus_that_are_no_indication,
        setup::cut_short_at_every_byte,
        setup::one_byte_at_a_time,
        setup::data_before_the_reply,
        setup::abandoned_at_every_phase,
        setup::half_open_flood,
        setup::slow_senders,
        setup::connection_storm,
        client::every_byte_of_the_key,
        client::every_flag,
        client::every_revision,
        client::every_length,
        client::read_depths_and_model,
        client::cut_short_at_every_byte,
        client::other_answers,
        client::answers_to_what_is_placed,
        client::a_server_that_lies_later,
        fields::fpdu_lengths,
        fields::fpdu_pads_and_crcs,
        fields::ddp_control,
        fields::rdmap_control,
        fields::invalidate_field_of_other_messages,
        fields::stags,
        fields::stags_over_one_buffer,
        fields::tagged_offsets,
        fields::queue_numbers,
        fields::message_numbers,
        fields::message_offsets,
        fields::read_requests,
        fields::terminates,
        rows::as_a_stranger,
        rows::posing_as_uwarp,
        sequences::responses_nobody_asked_for,
        sequences::responses_that_lie,
        sequences::after_invalidation,
        sequences::after_deregistration,
        sequences::deregistered_under_fire,
        sequences::deregistered_while_it_is_read,
        sequences::terminate_storm,
        sequences::data_after_terminate,
        sequences::data_after_the_end,
        sequences::acknowledgements_that_lie,
        sequences::introductions_that_lie,
        sequences::large_segments_that_lie,
        sequences::rights_of_the_queue_pair,
        sequences::overflowing_completion_queue,
        sequences::missing_receive_in_limited_time,
        endings::reset_at_every_phase,
        endings::silence_at_every_phase,
        endings::never_reads_never_closes,
        floods::guessing_stags,
        floods::reads_beyond_the_depth,
        floods::reads_that_nobody_takes,
        floods::sends_without_receives,
        floods::sends_without_receives_before_a_response,
        floods::nothing_at_all,
        floods::tiny_segments,
        floods::a_byte_at_a_time,
    ]);
    all.extend(attacks![&["spin"], &[];
        rows::against_a_program_that_polls,
        floods::tiny_segments_against_a_program_that_polls,
    ]);
    all.extend(attacks![&[], &[("UWARP_MARKERS", "on")]; fields::markers, rows::with_markers,]);
    all.extend(attacks![&[], &[("UWARP_CRC", "off")];
        fields::without_crc,
        fields::large_segments_without_crc,
    ]);
    all
}

/// Over reliable datagrams.
fn attacks_over_rd() -> Vec<Attack> {
    let all = attacks![&[], over_rd::OVER_RD;
        over_rd::streams_that_say_nothing,
        over_rd::streams_abandoned_half_way,
        over_rd::ends_that_are_not_acknowledged,
        over_rd::resets_and_services_that_nobody_has,
        over_rd::numbers_that_are_used_again,
        over_rd::credits_that_lie_and_data_beyond_the_limit,
        silence::a_server_that_is_stopped_goes_on,
        silence::a_client_that_is_stopped_goes_on,
    ];
    all.into()
}

/// The same on what not every program uses: atomic operations and memory windows.
fn attacks_on_extensions() -> Vec<Attack> {
    let mut all = Vec::new();
    all.extend(attacks![&[], &[];
        atomics::unaligned_atomics,
        atomics::atomics_out_of_bounds,
        atomics::atomics_without_the_right,
        atomics::atomic_requests_that_lie,
        atomics::atomics_beyond_the_depth,
        atomics::atomic_responses_that_lie,
        atomics::deregistered_under_atomics,
        atomics::contended_atomics,
        windows::keys_of_windows_that_are_gone,
        windows::windows_of_others,
        windows::bounds_of_windows,
        windows::zero_based_windows,
        windows::rights_of_windows,
        windows::invalidations_of_windows,
        windows::windows_taken_away_under_fire,
    ]);
    all.extend(attacks![&["spin"], &[];
        atomics::contended_atomics_against_a_program_that_polls,
        windows::windows_taken_away_by_a_program_that_polls,
    ]);
    all
}

macro_rules! from {
    ($($place:ident: $function:path,)*) => {
        vec![$((stringify!($function), $function as _, Place::$place)),*]
    };
}

type ByNumber = (&'static str, fn(&mut Stage<'_>) -> Outcome, Place);

/// On queue pairs that are brought up by number, and on lookups, by another user of the same host and from
/// another host. From there nobody gets a port of the peer's.
fn attacks_by_number() -> Vec<ByNumber> {
    from![
        SameHost: by_number::requests_in_anothers_name,
        OtherHost: by_number::requests_in_anothers_name,
        SameHost: by_number::cookies_of_the_ports_last_owner,
        SameHost: by_number::the_port_of_a_dead_connector,
        SameHost: by_number::the_port_of_a_dead_listener,
        SameHost: by_number::a_dead_listeners_port_that_is_silent,
        SameHost: by_number::silence_after_the_reply,
        SameHost: by_number::early_requests,
        OtherHost: by_number::early_requests,
        SameHost: by_number::a_flood_of_requests_for_cookies,
        OtherHost: by_number::a_flood_of_requests_for_cookies,
        SameHost: lookups::answers_from_elsewhere,
        OtherHost: lookups::answers_from_elsewhere,
    ]
}

/// On connections that a program hands over, by the same.
fn attacks_on_adoption() -> Vec<ByNumber> {
    let mut all: Vec<ByNumber> = Vec::new();
    for place in [Place::SameHost, Place::OtherHost] {
        all.push((
            "requests_to_a_program_that_hands_over",
            adoption::requests_to_a_program_that_hands_over,
            place,
        ));
        all.push((
            "answers_to_a_program_that_hands_over",
            adoption::answers_to_a_program_that_hands_over,
            place,
        ));
    }
    all
}

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    // Some wait for time limits; none keeps both processors busy for long.
    args.test_threads = args.test_threads.or(Some(2));
    let world = Arc::new(World { dist: Dist::find(), programs: Mutex::default() });
    let strangers_world = world.clone();
    let silent = silent(&world);
    let of_strangers = attacks_by_number().into_iter().map(|attack| ("named", attack));
    let of_parts: Vec<ByNumber> =
        from![SameHost: parts::parts_of_a_stranger, OtherHost: parts::parts_of_a_stranger,];
    let of_parts = of_parts.into_iter().map(|attack| ("parted", attack));
    let of_strangers = of_strangers
        .chain(of_parts)
        .chain(attacks_on_adoption().into_iter().map(|attack| ("handed", attack)));
    let trials = attacks()
        .into_iter()
        .chain(attacks_on_extensions())
        .chain(attacks_over_rd())
        .map(|attack| {
            let world = world.clone();
            Trial::test(attack.name, move || Ok(world.run(&attack)?))
        })
        .chain(of_strangers.map(|(program, (name, attack, place))| {
            let world = strangers_world.clone();
            Trial::test(format!("{name} [{place:?}]"), move || Ok(world.strangers(program, attack, place)?))
        }))
        .chain(silent)
        .collect();
    libtest_mimic::run(&args, trials).exit_code()
}

/// Peers over reliable datagrams that are stopped or killed.
fn silent(world: &Arc<World>) -> Vec<Trial> {
    let mut trials = Vec::new();
    for place in [Place::SameHost, Place::OtherHost] {
        for what in [What::Stopped, What::Killed] {
            let world = world.clone();
            trials.push(Trial::test(format!("silence::by_number {what:?} [{place:?}]"), move || {
                let dist = world.dist.as_ref().map_err(Failure::clone)?;
                Ok(silence::by_number(what, place, dist, &world.program("named")?)?)
            }));
        }
    }
    let world = world.clone();
    trials.push(Trial::test("silence::a_client_that_is_killed_is_noticed", move || {
        let dist = world.dist.as_ref().map_err(Failure::clone)?;
        let mut victim = Victim::start(&world.program("victim")?, dist, &[], over_rd::OVER_RD)?;
        Ok(silence::a_client_that_is_killed_is_noticed(&mut victim)?)
    }));
    trials
}

struct World {
    dist: Outcome<Dist>,
    programs: Mutex<HashMap<&'static str, Outcome<PathBuf>>>,
}

impl World {
    fn run(&self, attack: &Attack) -> Outcome {
        let dist = self.dist.as_ref().map_err(Failure::clone)?;
        let program = self.program("victim")?;
        let mut victim = Victim::start(&program, dist, attack.args, attack.env)?;
        (attack.run)(&mut victim)?;
        victim.recovers()
    }

    fn strangers(
        &self,
        program: &'static str,
        attack: fn(&mut Stage<'_>) -> Outcome,
        place: Place,
    ) -> Outcome {
        let dist = self.dist.as_ref().map_err(Failure::clone)?;
        crate::by_number::run(attack, place, dist, &self.program(program)?)
    }

    fn program(&self, name: &'static str) -> Outcome<PathBuf> {
        let mut built = self.programs.lock().unwrap_or_else(|e| e.into_inner());
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("hostile");
        built.entry(name).or_insert_with(|| cc::build(name, &dir)).clone()
    }
}

/// Receives that were posted and not used.
const FLUSHED: &str = "e5,e5";

/// What must have become of a connection.
struct Fate {
    /// The victim's Terminate.
    codes: Option<Codes>,
    /// As [`Report`] has them.
    changed: &'static str,
    recvs: &'static str,
    sends: &'static str,
    /// No asynchronous event, whatever the codes.
    quiet: bool,
}

impl Fate {
    /// Terminated; nothing was done to the victim.
    const fn terminated(codes: Codes) -> Self {
        Self { codes: Some(codes), changed: "", recvs: FLUSHED, sends: "", quiet: false }
    }

    /// Nothing is wrong: the attacker hangs up in the end.
    const fn harmless() -> Self {
        Self { codes: None, changed: "", recvs: FLUSHED, sends: "", quiet: false }
    }

    const fn changed(self, changed: &'static str) -> Self {
        Self { changed, ..self }
    }

    const fn recvs(self, recvs: &'static str) -> Self {
        Self { recvs, ..self }
    }

    const fn sends(self, sends: &'static str) -> Self {
        Self { sends, ..self }
    }

    const fn quiet(self) -> Self {
        Self { quiet: true, ..self }
    }
}

/// The asynchronous event that goes with a Terminate: 1 is fatal, 2 a bad request, 3 an access error. A
/// stream that just ends has none: the victim's device passes for RoCE's (docs/adr/011).
fn event_of(codes: Codes) -> &'static str {
    match codes {
        (0 | 1, 1, _) => "3",
        (0 | 1, 2, _) => "2",
        (2, 0, 1) => "",
        _ => "1",
    }
}

/// Sends these bytes on an established connection and compares what becomes of it.
fn strike(victim: &mut Victim, mut peer: Peer, bytes: &[u8], what: &str, fate: &Fate) -> Outcome {
    peer.send(bytes)?;
    meet(victim, peer, what, fate)
}

/// What the attacker does is done; compares what becomes of it.
fn meet(victim: &mut Victim, mut peer: Peer, what: &str, fate: &Fate) -> Outcome {
    if fate.codes.is_none() {
        peer.finish();
    }
    let say = |f: Failure| Failure(format!("{what}: {f}"));
    let answer = peer.answer().map_err(say)?;
    let codes = answer.terminate().map_err(say)?;
    require!(codes == fate.codes, "{what}: Terminate {codes:?}, wanted {:?}", fate.codes);
    drop(peer);
    let report = victim.report().map_err(say)?;
    let wanted = Report {
        how: "DISCONNECTED".into(),
        established: true,
        state: "ERR".into(),
        events: fate.codes.filter(|_| !fate.quiet).map_or("", event_of).into(),
        recvs: fate.recvs.into(),
        sends: fate.sends.into(),
        changed: fate.changed.into(),
    };
    require!(report == wanted, "{what}:\n  got {report:?}\n  want {wanted:?}");
    victim.innocent(1).map_err(say)
}
