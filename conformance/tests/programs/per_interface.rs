//! Rows with a device for each interface (`UWARP_DEVICES=per-interface`), between namespaces that two pairs
//! of veths join.

use uwarp_conformance::check::{self, Expected};
use uwarp_conformance::netns::Veth;
use uwarp_conformance::pair;
use uwarp_conformance::process::Cmd;
use uwarp_conformance::topology::Topology::*;
use uwarp_conformance::topology::{Place, free_port};
use uwarp_conformance::{Outcome, require};

use super::Run::Custom;
use super::{Case, LONG, World, check_rping, field};

const PER_INTERFACE: (&str, &str) = ("UWARP_DEVICES", "per-interface");
/// Both networks, with the device at either end.
const NETWORKS: [(&str, &str); 2] = [("uwarp0", Veth::SERVER4), ("uwarp1", Veth::SECOND_SERVER4)];

/// All rows.
pub fn cases() -> Vec<Case> {
    let case = |program, manner, checked, run| Case {
        program,
        manner,
        checked,
        at: &[Veth1500V4],
        run: Custom(run),
    };
    vec![
        case(
            "ibv_devices",
            "a device for each of two interfaces",
            "uwarp0 and uwarp1, each with a GUID of its own",
            devices,
        ),
        case(
            "ibv_devinfo",
            "-v -d uwarp1, a device for each of two interfaces",
            "that device alone, active, with the GIDs of its interface",
            devinfo,
        ),
        case(
            "rping",
            "to both networks of a server without an address, a device for each of two interfaces",
            "every round's bytes at both ends",
            rping,
        ),
        case(
            "ib_write_bw",
            "-d of either device, by number, a device for each of two interfaces",
            "one result, every iteration counted, the device named at both ends",
            write_bw,
        ),
        case(
            "ucmatose",
            "-c 10, on both networks, a device for each of two interfaces",
            "data transfers complete, return status 0 at both ends",
            ucmatose,
        ),
    ]
}

impl World {
    fn end(&self, line: &str, veth: &Veth, server: bool) -> Outcome<Cmd> {
        let ns = if server { &veth.server } else { &veth.client };
        let (name, value) = PER_INTERFACE;
        Ok(self.over_uwarp(line, Some(ns))?.env(name, value).limit(LONG))
    }
}

fn devices(world: &World, _place: Place<'_>) -> Outcome {
    let veth = Veth::twice(1500)?;
    let out = world.end("ibv_devices", &veth, false)?.run_ok()?;
    check::no_complaints(&out)?;
    let rows: Vec<Vec<&str>> = out.stdout.lines().skip(2).map(|l| l.split_whitespace().collect()).collect();
    match rows.as_slice() {
        [first, second]
            if first.len() == 2
                && second.len() == 2
                && (first[0], second[0]) == ("uwarp0", "uwarp1")
                && first[1] != second[1] =>
        {
            Ok(())
        }
        _ => out.failure("wanted uwarp0 and uwarp1"),
    }
}

fn devinfo(world: &World, _place: Place<'_>) -> Outcome {
    let veth = Veth::twice(1500)?;
    let out = world.end("ibv_devinfo -v -d uwarp1", &veth, true)?.run_ok()?;
    check::no_complaints(&out)?;
    require!(out.stdout.matches("hca_id:").count() == 1, "more than one device\n{}", out.text());
    for (name, value) in [("hca_id", "uwarp1"), ("state", "PORT_ACTIVE (4)")] {
        require!(field(&out, name)? == value, "{name} is not {value}\n{}", out.text());
    }
    check::has(&out, Veth::SECOND_SERVER4)?;
    require!(!out.stdout.contains(Veth::SERVER4), "an address of the other interface\n{}", out.text());
    Ok(())
}

fn rping(world: &World, _place: Place<'_>) -> Outcome {
    let veth = Veth::twice(1500)?;
    for (_, address) in NETWORKS {
        let port = free_port();
        let server = world.end(&format!("rping -s -v -p {port} -S 4096"), &veth, true)?;
        let client = format!("rping -c -v -V -a {address} -p {port} -C 50 -S 4096");
        check_rping(&pair::run(&server, &world.end(&client, &veth, false)?, port)?, 50, 4096)?;
    }
    Ok(())
}

fn write_bw(world: &World, _place: Place<'_>) -> Outcome {
    let veth = Veth::twice(1500)?;
    for (device, address) in NETWORKS {
        let port = free_port();
        let line = format!("ib_write_bw -F -p {port} -d {device} -x 0 -s 65536 -n 200");
        let client = format!("{line} {address}");
        let ends = pair::run(&world.end(&line, &veth, true)?, &world.end(&client, &veth, false)?, port)?;
        for end in [&ends.server, &ends.client] {
            check::no_complaints(end)?;
            check::has(end, &format!("Device         : {device}"))?;
        }
        if let Err(why) = check::perftest(&ends.client, &Expected::one(65536, 200)) {
            return ends.failure(why);
        }
    }
    Ok(())
}

fn ucmatose(world: &World, _place: Place<'_>) -> Outcome {
    let veth = Veth::twice(1500)?;
    for (_, address) in NETWORKS {
        let port = free_port();
        let server = world.end(&format!("ucmatose -b {address} -p {port} -c 10"), &veth, true)?;
        let client = world.end(&format!("ucmatose -s {address} -p {port} -c 10"), &veth, false)?;
        super::cm::whole(&pair::run(&server, &client, port)?)?;
    }
    Ok(())
}
