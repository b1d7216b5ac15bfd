//! Programs of sockets that copy files.

use std::fs;

use uwarp_conformance::pair;
use uwarp_conformance::process::Cmd;
use uwarp_conformance::{Context, Outcome, require};

use super::sockets::Setting;

const MEDIUM: usize = 20_000_000;
const LARGE: usize = 100_000_000;
const GIB: usize = 1 << 30;

fn http_server(setting: &Setting<'_>) -> String {
    let (port, address) = (setting.port, setting.place.address);
    format!("/usr/bin/python3 -m http.server {port} --bind {address} --directory {}", setting.dir().display())
}

pub fn http(setting: &Setting<'_>) -> Outcome {
    setting.file("from", LARGE)?;
    setting.serve(&http_server(setting), |server| {
        let (to, host, port) = (setting.dir().join("to"), setting.host(), setting.port);
        let line = format!("curl -sS -o {} http://{host}:{port}/from", to.display());
        setting.is_copied("from", "to", &setting.client(&line)?.run()?)?;
        setting.carried(server, LARGE)
    })
}

pub fn wget(setting: &Setting<'_>) -> Outcome {
    setting.serve(&http_server(setting), |server| {
        let (to, host, port) = (setting.dir().join("to"), setting.host(), setting.port);
        let line = format!("wget -q -O {} http://{host}:{port}/from", to.display());
        setting.with_enough(|times| {
            setting.file("from", times * MEDIUM)?;
            let client = setting.client(&line)?.env("UWARP_LOG", "info").run()?;
            setting.is_copied("from", "to", &client)?;
            setting.carried(server, times * MEDIUM)?;
            setting.is_said(&client)
        })
    })
}

/// Writes nginx' settings, and returns its command.
fn nginx_server(setting: &Setting<'_>, tls: bool) -> Outcome<String> {
    let at = setting.dir().display();
    // With rsockets, workers would be children that have no device. With upgrades, each opens its own.
    let processes = if setting.rules.are_upgrades() { "worker_processes 2;" } else { "master_process off;" };
    let mut listen = format!("listen {}:{}", setting.host(), setting.port);
    if tls {
        Cmd::line(&format!(
            "openssl req -x509 -newkey rsa:2048 -nodes -keyout {at}/key.pem -out {at}/cert.pem -days 2 \
             -subj /CN=localhost -addext subjectAltName=IP:{}",
            setting.place.address
        ))
        .run_ok()?;
        listen += &format!(" ssl; ssl_certificate {at}/cert.pem; ssl_certificate_key {at}/key.pem");
    }
    let settings = format!(
        "daemon off; {processes} pid {at}/pid; error_log stderr; user root;\n\
         events {{ }}\n\
         http {{ access_log off; client_body_temp_path {at}; proxy_temp_path {at}; fastcgi_temp_path {at};\n\
         uwsgi_temp_path {at}; scgi_temp_path {at};\n\
         server {{ {listen}; root {at}; sendfile on; }} }}\n"
    );
    fs::write(setting.dir().join("nginx.conf"), settings).context(at.to_string())?;
    Ok(format!("/usr/sbin/nginx -p {at} -c {at}/nginx.conf"))
}

/// Two files by one connection of curl's.
fn keep_alive(setting: &Setting<'_>, large: usize, tls: bool) -> Outcome {
    setting.file("small", 1_000_000)?;
    setting.file("from", large)?;
    setting.serve(&nginx_server(setting, tls)?, |server| {
        let (at, host, port) = (setting.dir().display(), setting.host(), setting.port);
        let scheme = if tls { format!("--cacert {at}/cert.pem https") } else { "http".to_owned() };
        let (options, scheme) = scheme.rsplit_once(' ').unwrap_or(("", &scheme));
        let url = format!("{scheme}://{host}:{port}");
        let line = format!(
            "curl -sS {options} -w %{{num_connects}}, -o {at}/first {url}/small -o {at}/to {url}/from"
        );
        let client = setting.client(&line)?.run()?;
        setting.is_copied("small", "first", &client)?;
        setting.is_copied("from", "to", &client)?;
        require!(client.stdout == "1,0,", "more than one connection\n{}", client.text());
        setting.carried(server, large)
    })
}

pub fn nginx(setting: &Setting<'_>) -> Outcome {
    keep_alive(setting, GIB, false)
}

pub fn tls(setting: &Setting<'_>) -> Outcome {
    keep_alive(setting, 256 << 20, true)
}

pub fn nginx_wget(setting: &Setting<'_>) -> Outcome {
    setting.file("small", 1_000_000)?;
    setting.file("from", GIB)?;
    setting.serve(&nginx_server(setting, false)?, |server| {
        let (at, host, port) = (setting.dir().display(), setting.host(), setting.port);
        let url = format!("http://{host}:{port}");
        fs::create_dir(setting.dir().join("copies")).context(at.to_string())?;
        let line = format!("wget -nv -P {at}/copies {url}/small {url}/from");
        let client = setting.client(&line)?.env("LC_ALL", "C").run()?;
        setting.is_copied("small", "copies/small", &client)?;
        setting.is_copied("from", "copies/from", &client)?;
        setting.carried(server, GIB)
    })
}

const SERVER_JS: &str = r#"const http = require("http"), fs = require("fs"), crypto = require("crypto");
http.createServer((request, response) => {
  if (request.method === "GET") return fs.createReadStream(process.argv[3]).pipe(response);
  const hash = crypto.createHash("sha256");
  request.on("data", (data) => hash.update(data));
  request.on("end", () => response.end(hash.digest("hex")));
}).listen(Number(process.argv[2]), "127.0.0.1");
"#;

pub fn node(setting: &Setting<'_>) -> Outcome {
    let (at, port) = (setting.dir().display(), setting.port);
    fs::write(setting.dir().join("server.js"), SERVER_JS).context(at.to_string())?;
    setting.serve(&format!("node {at}/server.js {port} {at}/from"), |server| {
        let url = format!("http://{}:{port}/", setting.host());
        setting.with_enough(|times| {
            setting.file("from", times * MEDIUM)?;
            let sum = Cmd::line(&format!("sha256sum {at}/from")).run_ok()?;
            let sum = sum.stdout.split_whitespace().next().unwrap_or_default();
            let got = setting.client(&format!("curl -sS -o {at}/to {url}"))?.run()?;
            setting.is_copied("from", "to", &got)?;
            let posted = setting.client(&format!("curl -sS --data-binary @{at}/from {url}"))?.run()?;
            require!(posted.stdout == sum, "another sum than {sum}\n--- client\n{}", posted.text());
            setting.carried(server, 2 * times * MEDIUM)
        })
    })
}

/// From one to the other; both end when they have ended.
pub fn netcat(setting: &Setting<'_>) -> Outcome {
    setting.file("from", 4 * LARGE)?;
    let (at, address, port) = (setting.dir().display(), setting.place.address, setting.port);
    let server = setting.server("sh -c")?.arg(format!("exec nc -l -d {address} {port} > {at}/to"));
    let server = pair::serve(&server, port)?;
    fs::write(setting.dir().join("client"), format!("exec nc -N {address} {port} < {at}/from"))
        .context(at.to_string())?;
    let client = setting.run_watched(&server, &format!("sh {at}/client"), LARGE)?;
    server.wait()?.exited_ok()?;
    setting.is_copied("from", "to", &client)
}

/// sshd serves in children that have begun anew by `exec`, and changes its user. It speaks first, also to a
/// client that has sent a request of MPA.
pub fn ssh(setting: &Setting<'_>) -> Outcome {
    setting.file("from", GIB)?;
    let (at, port) = (setting.dir().display(), setting.port);
    Cmd::line(&format!("ssh-keygen -q -t ed25519 -f {at}/key -P")).arg("").run_ok()?;
    fs::copy(setting.dir().join("key.pub"), setting.dir().join("authorized")).context(at.to_string())?;
    // sshd wants it, and its service makes it.
    fs::create_dir_all("/run/sshd").context("/run/sshd")?;
    let settings = format!(
        "ListenAddress {}\nStrictModes no\nAuthorizedKeysFile {at}/authorized\nPidFile none\nUsePAM no\n\
         PermitRootLogin yes\nSubsystem sftp internal-sftp\n",
        setting.place.address
    );
    fs::write(setting.dir().join("sshd_config"), settings).context(at.to_string())?;
    let server = format!("/usr/sbin/sshd -D -e -f {at}/sshd_config -p {port} -h {at}/key");
    setting.serve(&server, |server| {
        let line = format!(
            "scp -q -P {port} -i {at}/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \
             -o BatchMode=yes root@{}:{at}/from {at}/to",
            setting.host()
        );
        setting.is_copied("from", "to", &setting.run_watched(server, &line, GIB)?)
    })
}

/// Its daemon starts a program for each connection.
pub fn git(setting: &Setting<'_>) -> Outcome {
    let (at, address, port) = (setting.dir().display(), setting.place.address, setting.port);
    let work = format!("/usr/bin/git -C {at}/work -c user.name=a -c user.email=a@b");
    fs::create_dir(setting.dir().join("work")).context(at.to_string())?;
    setting.file("work/from", MEDIUM)?;
    for line in [format!("{work} init -q"), format!("{work} add from"), format!("{work} commit -q -m file")] {
        Cmd::line(&line).run_ok()?;
    }
    let server =
        format!("/usr/bin/git daemon --listen={address} --port={port} --base-path={at} --export-all");
    setting.serve(&server, |server| {
        let line = format!("/usr/bin/git clone -q git://{}:{port}/work {at}/clone", setting.host());
        let client = setting.run_watched(server, &line, MEDIUM)?;
        setting.is_copied("work/from", "clone/from", &client)
    })
}
