//! The end of an id, from any state.

use rustix::io::Errno;
use uwarp_rnic::qp::Now;

use super::{Action, Life, Machine, Part, Reply, Report};
use crate::state::Step;

impl Life {
    /// The program destroys it. The shell takes back the events that are queued already, and destroys the ids
    /// of queued requests.
    pub fn destroy(&mut self, now: &Now) {
        if self.life.take(Step::Destroy).is_err() {
            return;
        }
        // All of it is read before anything is closed: the state alone no longer says what there was.
        let part = std::mem::replace(&mut self.part, Part::Nothing);
        (self.ready, self.unreported_end, self.timewait) = (None, None, None);
        (self.held, self.left) = (None, false);
        self.withdraw_reports(now);
        if self.answer.take().is_some() {
            self.actions.push_back(Action::Answer(Err(Errno::INVAL)));
        }
        self.discard(now, part);
        self.settle();
    }

    /// Takes back what is reported to the program and was not polled yet.
    fn withdraw_reports(&mut self, now: &Now) {
        for action in std::mem::take(&mut self.actions) {
            match action {
                Action::Report(Report::Event(_)) => {}
                // Nobody waits for it, and the queue pair may be in other use soon.
                Action::Fail => {}
                // Not begun yet.
                Action::Connect { .. } | Action::Listen | Action::Accept { .. } => {}
                // The program will never see this id.
                Action::Report(Report::Request(new)) => {
                    let mut life = new.life;
                    self.discard(now, std::mem::replace(&mut life.part, Part::Nothing));
                }
                action => self.actions.push_back(action),
            }
        }
    }

    /// Ends a part of the id, whatever it is.
    pub(super) fn discard(&mut self, now: &Now, part: Part) {
        match part {
            Part::Nothing => {}
            Part::Active(mut active) => {
                active.cancel();
                self.pass_closing(active.as_mut());
            }
            Part::Listener(mut listener) => {
                listener.cancel();
                self.pass_closing(listener.as_mut());
            }
            Part::Client(_) | Part::Server(_) => {}
            Part::Request { conn, mut handshake, gone } => {
                if gone.is_none() {
                    self.reject_with(now, conn, &mut handshake, &[]);
                }
            }
            Part::Question(question) => {
                self.report(Report::Reply(Reply { question, pair: None, private_data: Vec::new() }));
            }
            Part::Replying { conn, .. } | Part::Parked { conn, .. } => self.close(conn),
            Part::Attaching { conn, .. } => {
                self.actions.push_back(Action::Disconnect { conn, answered: false });
                self.leaving = Some(conn);
            }
            Part::Stream { conn } => self.actions.push_back(Action::Disconnect { conn, answered: false }),
        }
    }

    /// What a machine inside does when it is cancelled; it reports nothing then.
    fn pass_closing<M: Machine>(&mut self, inner: &mut M) {
        while let Some(action) = inner.poll_action() {
            if let Ok(action) = action.pass() {
                self.actions.push_back(action);
            }
        }
    }
}
