//! A datagram queue pair, beside the connection of the same two ends and with its memory.

use std::time::{Duration, Instant};

use uwarp_abi_types::verbs::{
    IBV_QP_INIT_ATTR_PD, IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_QKEY, IBV_QP_RNR_RETRY, IBV_QP_SQ_PSN,
    IBV_QP_STATE, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPT_DRIVER, IBV_QPT_UD, ibv_qp_init_attr_ex,
};

use super::*;
use crate::bench::raw::Raw;

/// Room for the routing header in front of each received message.
pub const GRH: u32 = 40;
const QKEY: u32 = 0x1111_1111;
/// Receives posted in one call.
const RECEIVE_LIST: usize = 16;
/// How long it may take until the device has that one.
const GID_PATIENCE: Duration = Duration::from_secs(10);

/// Of a datagram queue pair.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Service {
    /// The verbs' own.
    Unreliable,
    /// uwarpdv_create_qp(3).
    Reliable,
}

/// `struct uwarpdv_qp_init_attr` of `<uwarpdv.h>`, as far as it is needed here.
#[repr(C)]
pub struct ReliableInit {
    comp_mask: u64,
    driver_qp_type: u32,
    flags: u32,
    msg_order: u64,
}

/// `UWARPDV_QPT_RD`; `UWARPDV_QP_GRH`, so that what is received stands where that of others does.
const RELIABLE: ReliableInit = ReliableInit { comp_mask: 0, driver_qp_type: 1, flags: 1, msg_order: 0 };

/// Where the datagrams of a [`Link`] go.
#[derive(Clone, Copy)]
pub struct Peer {
    ah: *mut ibv_ah,
    qpn: u32,
}

impl Peer {
    pub fn address(&self, request: &mut ibv_send_wr) {
        request.wr.ud.ah = self.ah;
        request.wr.ud.remote_qpn = self.qpn;
        request.wr.ud.remote_qkey = QKEY;
    }
}

/// The ends of many datagrams, for what a peer costs.
pub struct Peers {
    qps: Vec<*mut ibv_qp>,
    peers: Vec<Peer>,
    requests: Vec<List>,
}

impl Link {
    /// A datagram queue pair with its own queues. The ends exchange the addresses of their queue pairs over
    /// `raw`.
    pub fn datagrams(&self, service: Service, raw: &mut Raw) -> Result<Link> {
        let context = self.context();
        // SAFETY: the context is open.
        let channel = unsafe { (self.libraries.create_comp_channel)(context) };
        if channel.is_null() {
            return Err(last("ibv_create_comp_channel"));
        }
        // SAFETY: as above.
        let cq = || unsafe { (self.libraries.create_cq)(context, 4096, ptr::null_mut(), channel, 0) };
        let (send_cq, receive_cq) = (cq(), cq());
        if send_cq.is_null() || receive_cq.is_null() {
            return Err(last("ibv_create_cq"));
        }
        let mut link = Link { send_cq, receive_cq, channel, peer: None, ..*self };
        (link.qp, link.inline) = link.datagram_qp(service, RECEIVES)?;
        link.exchange_address(raw)?;
        // SAFETY: the queue pair is alive.
        raw.send_number(unsafe { (*link.qp).qp_num }.into())?;
        let gid = link.peers_gid(raw)?;
        link.peer = Some(Peer { ah: link.handle(gid)?, qpn: number(raw)? });
        (0..RECEIVES).try_for_each(|_| link.post_receive())?;
        Ok(link)
    }

    fn context(&self) -> *mut ibv_context {
        // SAFETY: the queue pair is alive.
        unsafe { (*self.qp).context }
    }

    /// In RTS, with its inline limit.
    fn datagram_qp(&self, service: Service, receives: u32) -> Result<(*mut ibv_qp, u32)> {
        // SAFETY: null pointers and zeros are values of all fields.
        let mut init: ibv_qp_init_attr_ex = unsafe { mem::zeroed() };
        init.comp_mask = IBV_QP_INIT_ATTR_PD;
        // SAFETY: the queue pair of the connection is alive.
        init.pd = unsafe { (*self.qp).pd };
        init.send_cq = self.send_cq;
        init.recv_cq = self.receive_cq;
        init.qp_type = IBV_QPT_UD;
        init.cap.max_send_wr = SEND_QUEUE;
        init.cap.max_recv_wr = receives;
        init.cap.max_send_sge = 1;
        init.cap.max_recv_sge = 1;
        init.cap.max_inline_data = 64;
        let qp = match service {
            Service::Unreliable => self.verbs_qp(&mut init)?,
            Service::Reliable => {
                init.qp_type = IBV_QPT_DRIVER;
                let (context, mut how) = (self.context(), RELIABLE);
                let len = size_of::<ReliableInit>() as u32;
                // SAFETY: the domain is that of the connection; both structures outlive the call.
                unsafe { (self.libraries.create_reliable_qp)(context, &mut init, &mut how, len) }
            }
        };
        if qp.is_null() {
            return Err(last("uwarpdv_create_qp"));
        }
        // SAFETY: as above.
        let mut attr: ibv_qp_attr = unsafe { mem::zeroed() };
        (attr.port_num, attr.qkey) = (1, QKEY);
        // As often as it takes.
        attr.rnr_retry = 7;
        let ready = match service {
            Service::Unreliable => IBV_QP_SQ_PSN,
            Service::Reliable => IBV_QP_RNR_RETRY,
        };
        let states = [
            (IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY),
            (IBV_QPS_RTR, 0),
            (IBV_QPS_RTS, ready),
        ];
        for (state, mask) in states {
            attr.qp_state = state;
            let mask = (IBV_QP_STATE | mask).cast_signed();
            // SAFETY: the queue pair is new, `attr` outlives the call.
            check("ibv_modify_qp", unsafe { (self.libraries.modify_qp)(qp, &mut attr, mask) })?;
        }
        Ok((qp, init.cap.max_inline_data))
    }

    fn verbs_qp(&self, ex: &mut ibv_qp_init_attr_ex) -> Result<*mut ibv_qp> {
        // SAFETY: null pointers and zeros are values of all fields.
        let mut init: ibv_qp_init_attr = unsafe { mem::zeroed() };
        (init.send_cq, init.recv_cq) = (ex.send_cq, ex.recv_cq);
        (init.qp_type, init.cap) = (ex.qp_type, ex.cap);
        // SAFETY: the domain is that of the connection; `init` outlives the call.
        let qp = unsafe { (self.libraries.create_verbs_qp)(ex.pd, &mut init) };
        ex.cap = init.cap;
        if qp.is_null() { Err(last("ibv_create_qp")) } else { Ok(qp) }
    }

    /// The GID of the address that the connection to the other end has here, with its index. A loopback
    /// address has none: then the first.
    ///
    /// The kernel may report up to a second late that an interface is up, and until then the device shows the
    /// loopback interface. Datagrams with that source go nowhere, and both ends would wait for them.
    fn own_gid(&self, raw: &Raw) -> Result<(u8, [u8; 16])> {
        let own = raw.addresses()?.0;
        let wanted = match own {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        let gid = |index| {
            let mut gid = ibv_gid { raw: [0; 16] };
            // SAFETY: the context is open and `gid` outlives the call.
            let status = unsafe { (self.libraries.query_gid)(self.context(), 1, index, &mut gid) };
            // SAFETY: any bytes are a GID.
            (status == 0).then_some(unsafe { gid.raw })
        };
        let start = Instant::now();
        loop {
            // All that an address handle can name.
            let mut all = (0..=u8::MAX).map_while(|index| Some((index, gid(index.into())?)));
            let found = match own.is_loopback() {
                true => all.next(),
                false => all.find(|(_, gid)| *gid == wanted.octets()),
            };
            match found {
                Some(found) => return Ok(found),
                None if start.elapsed() < GID_PATIENCE => std::thread::sleep(Duration::from_millis(20)),
                None => return Err(Failure(format!("the device has no GID of {own}"))),
            }
        }
    }

    /// The address that datagrams have as their source.
    pub fn datagram_address(&self, raw: &Raw) -> Result<IpAddr> {
        Ok(IpAddr::from(self.own_gid(raw)?.1).to_canonical())
    }

    fn exchange_address(&self, raw: &mut Raw) -> Result<()> {
        let (high, low) = halves(self.own_gid(raw)?.1);
        raw.send_number(high)?;
        raw.send_number(low)
    }

    fn peers_gid(&self, raw: &mut Raw) -> Result<ibv_ah_attr> {
        let (high, low) = (raw.receive_number()?, raw.receive_number()?);
        // SAFETY: zeros are values of all fields.
        let mut attr: ibv_ah_attr = unsafe { mem::zeroed() };
        attr.grh.dgid.raw = (u128::from(high) << 64 | u128::from(low)).to_be_bytes();
        attr.grh.sgid_index = self.own_gid(raw)?.0;
        (attr.is_global, attr.port_num) = (1, 1);
        Ok(attr)
    }

    fn handle(&self, mut attr: ibv_ah_attr) -> Result<*mut ibv_ah> {
        // SAFETY: the domain is alive and `attr` outlives the call.
        let ah = unsafe { (self.libraries.create_ah)((*self.qp).pd, &mut attr) };
        if ah.is_null() { Err(last("ibv_create_ah")) } else { Ok(ah) }
    }

    /// Datagrams of our bytes at [`OUT`], the last of them signalled.
    pub fn datagram_list(&self, count: usize, size: u32) -> List {
        let mut list = self.list(IBV_WR_SEND, &vec![(OUT, 0); count], size);
        self.finish_list(&mut list, false, true);
        list
    }

    /// `ibv_post_recv` of as many receives as were taken, up to [`RECEIVE_LIST`].
    pub fn post_receives(&self, count: usize) -> Result<()> {
        // SAFETY: the region is registered.
        let lkey = unsafe { (*self.mr).lkey };
        let mut element = ibv_sge { addr: self.address(IN), length: LARGEST, lkey };
        let one = ibv_recv_wr { wr_id: 0, next: ptr::null_mut(), sg_list: &mut element, num_sge: 1 };
        let mut requests = [one; RECEIVE_LIST];
        let count = count.min(RECEIVE_LIST);
        let start = requests.as_mut_ptr();
        for index in 1..count {
            // SAFETY: both indices are inside the array.
            unsafe { (*start.add(index - 1)).next = start.add(index) };
        }
        if count == 0 {
            return Ok(());
        }
        let mut bad = ptr::null_mut();
        let Some(post_recv) = self.ops.post_recv else { return Err(absent("post_recv")) };
        // SAFETY: requests and element outlive the call; the memory they name is never freed.
        check("ibv_post_recv", unsafe { post_recv(self.qp, start, &mut bad) })
    }

    /// The active end of one queue pair with many peers: for each an address handle, one datagram there and
    /// one back.
    pub fn visit_peers(&self, raw: &mut Raw, peers: &mut Peers, count: usize) -> Result<()> {
        self.exchange_address(raw)?;
        // SAFETY: the queue pair is alive.
        raw.send_number(unsafe { (*self.qp).qp_num }.into())?;
        let gid = self.peers_gid(raw)?;
        while peers.peers.len() < count {
            let qpn = number(raw)?;
            peers.peers.push(Peer { ah: self.handle(gid)?, qpn });
        }
        // Their receives are posted.
        raw.receive_number()?;
        let mut request = self.datagram_list(1, 64);
        for peer in &peers.peers {
            if let Some(request) = request.requests.first_mut() {
                peer.address(request);
            }
            self.post(&mut request)?;
            while self.reap_sends()? == 0 {}
            while self.reap_receive()?.is_none() {}
            self.post_receive()?;
        }
        Ok(())
    }

    /// The other end: as many queue pairs, each of which answers once.
    pub fn serve_peers(
        &self,
        raw: &mut Raw,
        peers: &mut Peers,
        count: usize,
        service: Service,
    ) -> Result<()> {
        self.exchange_address(raw)?;
        let gid = self.peers_gid(raw)?;
        let asker = Peer { qpn: number(raw)?, ah: self.handle(gid)? };
        while peers.qps.len() < count {
            let (qp, _) = self.datagram_qp(service, 1)?;
            // SAFETY: the queue pair is alive.
            raw.send_number(unsafe { (*qp).qp_num }.into())?;
            let answer = Link { qp, peer: Some(asker), ..*self }.datagram_list(1, 64);
            peers.qps.push(qp);
            peers.requests.push(answer);
        }
        for &qp in &peers.qps {
            Link { qp, ..*self }.post_receive()?;
        }
        raw.send_number(0)?;
        for (&qp, answer) in peers.qps.iter().zip(&mut peers.requests) {
            let one = Link { qp, ..*self };
            while one.reap_receive()?.is_none() {}
            one.post(answer)?;
            while one.reap_sends()? == 0 {}
        }
        Ok(())
    }
}

impl Peers {
    /// With room in the program's own lists, so that they do not grow between two measurements.
    pub fn with_room(count: usize) -> Peers {
        Peers { qps: Vec::new(), peers: Vec::with_capacity(count), requests: Vec::new() }
    }
}

fn halves(gid: [u8; 16]) -> (u64, u64) {
    let gid = u128::from_be_bytes(gid);
    ((gid >> 64) as u64, gid as u64)
}

fn number(raw: &mut Raw) -> Result<u32> {
    u32::try_from(raw.receive_number()?).map_err(Failure::of("a queue pair number"))
}
