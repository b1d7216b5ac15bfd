//! Replicas that are wrong on purpose, each in one thing. The case must fail, and say why.

use uwarp_conformance::attacker::encode::Setup;
use uwarp_conformance::{Outcome, fail, require};

use crate::adapter::{Adapter, Depths, Rtr, Verdict};
use crate::cases::{CASES, Case, IRDMA, SIW, SIW_P2P};
use crate::program::World;
use crate::scenes::Scene;

/// What is wrong.
#[derive(Clone, Copy)]
enum Wrong {
    /// The responder names one indication and waits for the other.
    AwaitsTheOther,
    /// The initiator demands that the reply name the Write alone, as if it were cxgb4 with that parameter.
    DemandsTheWrite,
    /// The reply's key.
    Key,
    /// The reply's ORD is beyond what uwarp serves.
    ReadsTooMuch,
    /// The reply names no indication.
    NamesNone,
    /// What a Read gets.
    Data,
}

struct Mutant {
    of: &'static dyn Adapter,
    wrong: Wrong,
}

impl Adapter for Mutant {
    fn request(&self, depths: Depths, private_data: &[u8]) -> Setup {
        self.of.request(depths, private_data)
    }

    fn judge_reply(&self, request: &Setup, depths: Depths, answer: &[u8]) -> Verdict {
        let verdict = self.of.judge_reply(request, depths, answer);
        let names_the_read = answer.get(22).is_some_and(|bits| bits & 0x40 != 0);
        match self.wrong {
            Wrong::DemandsTheWrite if names_the_read => Verdict::Terminate((2, 0, 7)),
            _ => verdict,
        }
    }

    fn judge_request(&self, request: &[u8]) -> Verdict {
        match (self.wrong, self.of.judge_request(request)) {
            (Wrong::AwaitsTheOther, Verdict::Up(Rtr::Write { .. })) => {
                Verdict::Up(Rtr::Read { source: (1, 1), sink: (1, 1) })
            }
            (Wrong::AwaitsTheOther, Verdict::Up(Rtr::Read { .. })) => {
                Verdict::Up(Rtr::Write { stag: 1, to: 0 })
            }
            (_, verdict) => verdict,
        }
    }

    fn reply(&self, request: &Setup, depths: Depths, private_data: &[u8]) -> Vec<u8> {
        let mut bytes = self.of.reply(request, depths, private_data);
        match self.wrong {
            Wrong::Key => bytes[0] ^= 1,
            Wrong::ReadsTooMuch => bytes[22] |= 0x3F,
            Wrong::NamesNone => bytes[22] &= 0x3F,
            _ => {}
        }
        bytes
    }

    fn rejection(&self, request: &Setup, private_data: &[u8]) -> Option<Vec<u8>> {
        self.of.rejection(request, private_data)
    }

    fn one_segment(&self) -> bool {
        self.of.one_segment()
    }

    fn spoils(&self) -> bool {
        matches!(self.wrong, Wrong::Data)
    }
}

/// The case of this name with a replica that is wrong fails, and says this.
fn fails(world: &World, name: &str, mutant: &'static Mutant, why: &str) -> Outcome {
    fails_by_one(world, name, mutant, &[why])
}

/// For one of these reasons: which one depends on what has arrived when the connection ends.
fn fails_by_one(world: &World, name: &str, mutant: &'static Mutant, why: &[&str]) -> Outcome {
    let Some(case) = CASES.iter().find(|case| case.name == name) else { fail!("no case {name}") };
    let scene = Scene { adapter: mutant, ..case.scene };
    let mutated = Case { scene, ..*case };
    match crate::run(&mutated, world) {
        Err(failure) if why.iter().any(|why| failure.0.contains(why)) => Ok(()),
        Err(failure) => fail!("it fails, but does not say {why:?}: {failure}"),
        Ok(saw) => {
            require!(saw != case.saw, "the case passes with a wrong replica");
            require!(why.iter().any(|why| saw.contains(why)), "it does not say {why:?}: {saw}");
            Ok(())
        }
    }
}

type Mutation = fn(&World) -> Outcome;

pub const ALL: &[(&str, Mutation)] = &[
    ("wrong_one_that_names_the_write_and_awaits_the_read", |world| {
        const WRONG: &Mutant = &Mutant { of: SIW, wrong: Wrong::AwaitsTheOther };
        fails(world, "siw_accepts", WRONG, "the first FPDU is a Write")
    }),
    ("wrong_one_that_names_the_read_and_awaits_the_write", |world| {
        const WRONG: &Mutant = &Mutant { of: IRDMA, wrong: Wrong::AwaitsTheOther };
        fails(world, "irdma_accepts", WRONG, "the first FPDU is a Read")
    }),
    ("wrong_one_that_demands_the_write", |world| {
        const WRONG: &Mutant = &Mutant { of: SIW_P2P, wrong: Wrong::DemandsTheWrite };
        fails(world, "siw_connects_with_peer_to_peer", WRONG, "the adapter answers Terminate((2, 0, 7))")
    }),
    ("wrong_key", |world| {
        const WRONG: &Mutant = &Mutant { of: IRDMA, wrong: Wrong::Key };
        // uwarp closes before it has read all that the replica sends: then the system resets.
        let ends = ["hung up where a segment was due", "Connection reset by peer"];
        fails_by_one(world, "irdma_accepts", WRONG, &ends)
    }),
    ("wrong_depth", |world| {
        const WRONG: &Mutant = &Mutant { of: IRDMA, wrong: Wrong::ReadsTooMuch };
        fails(world, "irdma_accepts", WRONG, "a Terminate: Some((2, 0, 6))")
    }),
    ("wrong_indication", |world| {
        const WRONG: &Mutant = &Mutant { of: SIW, wrong: Wrong::NamesNone };
        fails(world, "siw_accepts", WRONG, "a Terminate: Some((2, 0, 7))")
    }),
    ("wrong_data", |world| {
        const WRONG: &Mutant = &Mutant { of: IRDMA, wrong: Wrong::Data };
        fails(world, "irdma_accepts", WRONG, "the Read has other content")
    }),
];
