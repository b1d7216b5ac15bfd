//! What one 64-byte message costs in the RNIC alone, without sockets: nanoseconds per Send and per Write, in
//! three parts.
//!
//! `cargo run --release -p uwarp-rnic --example hot_path [messages]`

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uwarp_rnic::event::{AsyncEvent, AsyncSink};
use uwarp_rnic::mr::Access;
use uwarp_rnic::qp::{Now, QpCaps, QpInit, RcCore, StreamParams};
use uwarp_rnic::{Cq, Mr, Pd, RecvWr, SendFlags, SendOp, SendWr, Sge};

struct Silent;
impl AsyncSink for Silent {
    fn async_event(&self, _: AsyncEvent) {}
}

fn end(pd: &Arc<Pd>) -> (RcCore, Arc<Cq>) {
    let cq = Cq::new(1024, 0, None, Arc::new(Silent));
    let caps =
        QpCaps { max_send_wr: 64, max_recv_wr: 64, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 64 };
    let init = QpInit {
        pd: pd.clone(),
        send_cq: cq.clone(),
        recv_cq: cq.clone(),
        srq: None,
        caps,
        sq_sig_all: false,
        cookie: 0,
        async_sink: Arc::new(Silent),
    };
    let mut core = RcCore::new(1, init, None);
    core.attach(&Now::unread(), StreamParams { peer_is_uwarp: true, ..StreamParams::default() }).unwrap();
    (core, cq)
}

fn main() {
    let messages: u32 = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(2_000_000);
    let mut memory = vec![0u8; 4096];
    let addr = memory.as_mut_ptr().expose_provenance() as u64;
    let pd = Pd::new();
    let mr = Mr::register(&pd, addr, 4096, addr, Access::LOCAL_WRITE | Access::REMOTE_WRITE).unwrap();
    let (mut a, a_cq) = end(&pd);
    let (mut b, b_cq) = end(&pd);
    let list = [Sge { addr, length: 64, lkey: mr.stag() }];
    let sink = [Sge { addr: addr + 64, length: 64, lkey: mr.stag() }];
    let send = SendOp::Send { invalidate: None };
    let write = SendOp::Write { stag: mr.stag(), to: addr + 128 };
    let both = SendFlags::SIGNALED | SendFlags::INLINE;
    let mut wire = Vec::with_capacity(4096);
    let now = Now::unread;
    for (name, op, flags) in [
        ("Send, inline", send, both),
        ("Send", send, SendFlags::SIGNALED),
        ("Write, inline", write, both),
        ("Write", write, SendFlags::SIGNALED),
    ] {
        let mut parts = [Duration::ZERO; 3];
        for timed in [false, true] {
            let start = Instant::now();
            for i in 0..messages {
                let is_send = matches!(op, SendOp::Send { .. });
                if is_send {
                    b.post_recv(&RecvWr { wr_id: 1, sges: &sink }).unwrap();
                }
                let t0 = timed.then(Instant::now);
                a.post_send(&SendWr { wr_id: i.into(), op, flags, sges: &list }).unwrap();
                wire.clear();
                if let Some(out) = a.poll_transmit(&now()) {
                    wire.extend_from_slice(out.only_staged().unwrap());
                }
                a.transmitted(&now(), wire.len());
                let t1 = timed.then(Instant::now);
                black_box(b.rx_plan(&[], 65536, &mut smallvec::SmallVec::new()));
                assert_eq!(b.handle_input(&now(), &wire), wire.len());
                let t2 = timed.then(Instant::now);
                // Acknowledges placed messages, now and then, or completions are held back.
                let mut acks = 0;
                if let Some(bytes) = b.poll_transmit(&now()).and_then(|out| out.only_staged()) {
                    acks = bytes.len();
                    assert_eq!(a.handle_input(&now(), bytes), acks);
                }
                b.transmitted(&now(), acks);
                let mut n = a_cq.poll(16, |wc| _ = black_box(wc));
                n += b_cq.poll(16, |wc| _ = black_box(wc));
                // A send may complete with a later one's acknowledgement, which comes once in many messages.
                assert!(n >= usize::from(is_send));
                if let Some(out) = b.poll_transmit(&now()) {
                    wire.clear();
                    wire.extend_from_slice(out.only_staged().unwrap());
                    b.transmitted(&now(), wire.len());
                    a.handle_input(&now(), &wire);
                }
                black_box((a.poll_timeout(), b.poll_timeout()));
                if let (Some(t0), Some(t1), Some(t2)) = (t0, t1, t2) {
                    for (part, time) in parts.iter_mut().zip([t1 - t0, t2 - t1, t2.elapsed()]) {
                        *part += time;
                    }
                }
            }
            if !timed {
                print!("{name:14} {:4} ns", start.elapsed().as_nanos() / u128::from(messages));
            }
        }
        let [post, input, poll] = parts.map(|p| p.as_nanos() / u128::from(messages));
        println!("   with the clock read: post and build {post}, input {input}, polls {poll}");
    }
}
