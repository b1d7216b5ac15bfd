//! Connection parameters between the program, the peer and the queue pair: how the parameters of one become
//! those of another.

use std::time::Duration;

use uwarp_driver::StreamParams;
use uwarp_driver::config::{Ask, Config, View};
use uwarp_proto::setup::{Negotiated, PeerData, Request, Revision};
use uwarp_rnic::qp::{LinkCaps, rnr_limit};
use uwarp_wire::mpa::{self, Enhanced};

use crate::event::{ConnParam, MAX_PRIVATE_DATA};
use crate::timeouts::{NUDGE_AFTER, RETRIES, STRANGER_FIRST_FPDU};

/// The part of a peer's private data that a program can get. MPA allows 512 bytes; rdma_cm has one octet for
/// the length.
pub(crate) fn cut(mut private_data: Vec<u8>) -> Vec<u8> {
    if private_data.len() > MAX_PRIVATE_DATA {
        tracing::warn!(
            "{} bytes of private data received; the program gets the first {MAX_PRIVATE_DATA}",
            private_data.len()
        );
        private_data.truncate(MAX_PRIVATE_DATA);
    }
    private_data
}

/// The parameters of an established connection, for the program. `unknown`: if the peer has named no depths.
pub(crate) fn agreed(negotiated: &Negotiated, unknown: ConnParam) -> ConnParam {
    let mut param = unknown;
    if negotiated.peer_enhanced.is_some() {
        param.responder_resources = octet(negotiated.ird);
        param.initiator_depth = octet(negotiated.ord);
    }
    if let Some(peer) = negotiated.peer {
        param.rnr_retry_count = peer.rnr_retry;
        param.qp_num = peer.qpn;
    }
    param
}

/// The parameters of a request, for the program. `unknown`: if the peer has named no depths.
pub(crate) fn of_request(request: &Request, unknown: ConnParam) -> ConnParam {
    let mut param = depths_of(request.enhanced, unknown);
    if let Some(peer) = request.peer {
        param.rnr_retry_count = peer.rnr_retry;
        param.qp_num = peer.qpn;
    }
    param
}

/// The depths that the peer has named, as seen from here; `unknown` if it has named none.
pub(crate) fn depths_of(peer: Option<Enhanced>, unknown: ConnParam) -> ConnParam {
    let mut param = unknown;
    if let Some(peer) = peer {
        if peer.ord != mpa::NO_AUTO {
            param.responder_resources = octet(peer.ord);
        }
        if peer.ird != mpa::NO_AUTO {
            param.initiator_depth = octet(peer.ird);
        }
    }
    param
}

/// The revision that this end uses or requests.
pub(crate) fn revision(config: &Config) -> Revision {
    if config.mpa_revision == 1 { Revision::One } else { Revision::Two }
}

pub(crate) fn octet(depth: u16) -> u8 {
    u8::try_from(depth).unwrap_or(u8::MAX)
}

/// Our parameters, for a uwarp peer.
pub(crate) fn peer_data(qpn: u32, min_rnr_timer: u8, param: ConnParam) -> PeerData {
    PeerData {
        placement_acks: passes_for_infiniband(),
        rnr_retry: param.rnr_retry_count.min(7),
        min_rnr_timer,
        qpn,
        ..PeerData::new()
    }
}

/// The stream's parameters, for the queue pair. `timeout`: the local acknowledgement timeout that queries
/// show.
pub(crate) fn stream_params(
    negotiated: &Negotiated,
    param: ConnParam,
    timeout: u8,
    min_rnr_timer: u8,
) -> StreamParams {
    let stranger_client = negotiated.initiator && !negotiated.peer_is_uwarp;
    StreamParams {
        initiator: negotiated.initiator,
        framing: negotiated.framing(),
        ird: negotiated.ird,
        ord: negotiated.ord,
        peer_is_uwarp: negotiated.peer_is_uwarp,
        // The driver fills in what only the link knows.
        emss: 0,
        link: LinkCaps::default(),
        peer: negotiated.peer,
        timeout,
        retry_cnt: param.retry_count.min(RETRIES),
        rtr: negotiated.rtr,
        rtr_stag_to: negotiated.rtr_stag_to,
        wait_first_frame: !negotiated.initiator,
        first_frame_delay: if stranger_client { STRANGER_FIRST_FPDU } else { Duration::ZERO },
        nudge_after: (stranger_client && !negotiated.drops_reserved_flags).then_some(NUDGE_AFTER),
        rnr_timeout: rnr_limit(param.rnr_retry_count, min_rnr_timer),
        placement_acks: acknowledges(negotiated),
        placement_reads: passes_for_infiniband() && asks_stranger(Config::get().ask, negotiated),
        infiniband: passes_for_infiniband(),
        by_number: false,
        psns: None,
    }
}

/// Whether the stream has placement acknowledgements, in both directions: yes if either end wants them. A
/// responder learns the initiator's choice from the ready-to-receive indication, before it has sent anything;
/// the queue pair handles that.
fn acknowledges(negotiated: &Negotiated) -> bool {
    let peer_wants = negotiated.peer.is_some_and(|peer| peer.placement_acks);
    negotiated.peer_is_uwarp && (peer_wants || passes_for_infiniband())
}

/// Whether the device passes for InfiniBand or RoCE. Programs then rely on it that a send completes only when
/// the peer has placed it, and on the events of InfiniBand's connection manager.
pub(crate) fn passes_for_infiniband() -> bool {
    Config::get().view != View::Iwarp
}

/// Whether a peer that is not uwarp must confirm placement (docs/adr/008). It must have declared that it
/// takes a Read: without enhanced set-up, or if the programs negotiate depths themselves, that is not known,
/// and one Read too many would end the stream.
fn asks_stranger(ask: Ask, negotiated: &Negotiated) -> bool {
    let takes_one = negotiated.peer_enhanced.is_some_and(|peer| (1..mpa::NO_AUTO).contains(&peer.ird));
    takes_one
        && match ask {
            Ask::Off => false,
            Ask::On => true,
            // siw echoes our flags in its reply. An initiator does not show what it is.
            Ask::Auto => negotiated.initiator && negotiated.drops_reserved_flags,
        }
}
