//! A server, the moment it listens, and a client.

use std::time::Duration;

use crate::Outcome;
use crate::netns;
use crate::process::{Cmd, Output, Running};

/// How long a server may take until it listens. Generous: it only bounds a hang.
const LISTEN_LIMIT: Duration = Duration::from_secs(120);

/// Starts a server and returns when it listens on `port`.
pub fn serve(server: &Cmd, port: u16) -> Outcome<Running> {
    let running = server.spawn()?;
    running.until(LISTEN_LIMIT, "listening", |r| netns::listens(r.pid(), r.ns(), port))?;
    Ok(running)
}

/// Starts a server and returns when it has UDP port `port`.
pub fn serve_datagrams(server: &Cmd, port: u16) -> Outcome<Running> {
    let running = server.spawn()?;
    running.until(LISTEN_LIMIT, "receiving", |r| netns::receives(r.pid(), r.ns(), port))?;
    Ok(running)
}

/// How long a server may go on after its client has failed.
const FAILED_CLIENT_GRACE: Duration = Duration::from_secs(3);

/// What both ends printed.
pub struct Ends {
    /// The server's output.
    pub server: Output,
    /// The client's output.
    pub client: Output,
}

impl Ends {
    /// Fails, with the output of both, for the reason given.
    pub fn failure<T>(&self, why: impl std::fmt::Display) -> Outcome<T> {
        Err(crate::Failure(format!(
            "{why}\n--- client\n{}--- server\n{}",
            self.client.text(),
            self.server.text()
        )))
    }

    /// Fails unless both exited with 0.
    pub fn exited_ok(&self) -> Outcome {
        match (self.client.ok(), self.server.ok()) {
            (true, true) => Ok(()),
            (false, true) => self.failure("the client's exit status is not 0"),
            (true, false) => self.failure("the server's exit status is not 0"),
            (false, false) => self.failure("neither exit status is 0"),
        }
    }
}

/// Runs both to their ends. The server is expected to end by itself once its client is done; both must exit
/// with 0.
pub fn run(server: &Cmd, client: &Cmd, port: u16) -> Outcome<Ends> {
    let ends = run_any(server, client, port)?;
    ends.exited_ok()?;
    Ok(ends)
}

/// Like [`run`], without looking at the exit statuses.
pub fn run_any(server: &Cmd, client: &Cmd, port: u16) -> Outcome<Ends> {
    to_their_ends(serve(server, port)?, client)
}

/// Like [`run`], for a server that has a UDP port.
pub fn run_datagrams(server: &Cmd, client: &Cmd, port: u16) -> Outcome<Ends> {
    let ends = to_their_ends(serve_datagrams(server, port)?, client)?;
    ends.exited_ok()?;
    Ok(ends)
}

fn to_their_ends(running: Running, client: &Cmd) -> Outcome<Ends> {
    let client = match client.run() {
        Ok(out) => out,
        Err(why) => {
            // The server's output may explain why the client hangs: show it.
            let server = running.stop();
            crate::fail!("client: {why}--- server\n{}", server.text())
        }
    };
    if !client.ok() {
        // The server may be waiting for a client that never came; its full time limit would teach us nothing.
        return Ok(Ends { server: running.wait_at_most(FAILED_CLIENT_GRACE), client });
    }
    match running.wait() {
        Ok(server) => Ok(Ends { server, client }),
        Err(why) => crate::fail!("server: {why}--- client\n{}", client.text()),
    }
}

/// Runs a pair of perftests as iWARP, again when perftest lost its own race, and says so. With `-R` on iWARP,
/// and on nothing else, perftest 4.5 connects twice to one port, and its server opens the second listener
/// only when the first connection has told it to; a client that is there before it is refused, and then
/// crashes in its own retry, as it uses ids it has destroyed. Any provider meets this when the server's
/// machine is slow.
pub fn despite_perftests_race<T>(mut run: impl FnMut() -> Outcome<T>) -> Outcome<T> {
    const RERUNS: u32 = 3;
    let lost =
        |r: &Outcome<T>| r.as_ref().is_err_and(|why| why.0.contains("RDMA_CM_EVENT_REJECTED; error: -111"));
    let mut result = run();
    for rerun in 1..=RERUNS {
        let Err(why) = &result else { break };
        if !lost(&result) {
            break;
        }
        let command = why.0.lines().find(|line| line.starts_with("$ ")).unwrap_or_default();
        eprintln!(
            "perftest lost its own race for the second connection; rerun {rerun} of {RERUNS}: {command}"
        );
        result = run();
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::free_port;

    fn python(script: String) -> Cmd {
        Cmd::new("python3").arg("-c").arg(script)
    }

    fn echo_server(port: u16) -> Cmd {
        python(format!(
            "import socket as s,time;time.sleep(.3);l=s.socket();l.bind(('127.0.0.1',{port}));l.listen();\
             c,_=l.accept();c.sendall(c.recv(9));print('served')"
        ))
    }

    #[test]
    fn the_client_starts_when_the_server_listens() {
        let port = free_port();
        let client = python(format!(
            "import socket as s;c=s.create_connection(('127.0.0.1',{port}),60);\
             c.sendall(b'x');print(c.recv(9))"
        ));
        let ends = run(&echo_server(port), &client, port).unwrap();
        assert_eq!((ends.server.stdout.as_str(), ends.client.stdout.as_str()), ("served\n", "b'x'\n"));
    }

    #[test]
    fn only_perftests_race_is_run_again_and_not_for_ever() {
        let runs_of = |why: &str, losses: u32| {
            let mut runs = 0;
            let result = despite_perftests_race(|| {
                runs += 1;
                if runs <= losses { Err(crate::Failure(why.to_owned())) } else { Ok(()) }
            });
            (runs, result.is_ok())
        };
        let race = "RDMA CM event error:\nEvent: RDMA_CM_EVENT_REJECTED; error: -111.";
        assert_eq!(runs_of(race, 0), (1, true));
        assert_eq!(runs_of(race, 2), (3, true));
        assert_eq!(runs_of(race, 9), (4, false));
        assert_eq!(runs_of("RDMA_CM_EVENT_REJECTED; error: 28.", 1), (1, false));
    }

    #[test]
    fn a_failing_client_brings_the_servers_output_along() {
        let port = free_port();
        let client = python("raise SystemExit('no')".into());
        let err = run(&echo_server(port), &client, port).map(drop).unwrap_err().0;
        assert!(err.contains("err| no") && err.contains("neither exit status is 0"), "{err}");
    }
}
