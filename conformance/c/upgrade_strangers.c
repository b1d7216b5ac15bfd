/* TCP connections that may become iWARP's in place, and strangers: another user of the host claims to be the other end,
 * and has the server send what it has learned (a line of a chat, a page from a cache). */
#define _GNU_SOURCE
#include "upgrade_by_hand.h"

#include <linux/ptrace.h>
#include <sched.h>
#include <sys/fsuid.h>
#include <sys/syscall.h>

/* <sys/ptrace.h> has another `ptrace_syscall_info`. */
#define TRACE(request, pid, at, data) syscall(SYS_ptrace, request, pid, at, data)

/* <grp.h> has another `struct group`. */
extern int setgroups(size_t count, const gid_t *groups);

#define STRANGER 65534
#define ENOUGH 40

static struct sockaddr_in own_name, peers_name;	/* of the connection's end that connected */
static int accepted_path = -1;	/* of the other end, which no stranger should have */

static void become_a_stranger(void)
{
	MUST(setgroups(0, NULL) == 0 && setresgid(STRANGER, STRANGER, STRANGER) == 0 &&
	     setresuid(STRANGER, STRANGER, STRANGER) == 0);
}

/* By UDP, as the first versions did, and as ends on different hosts do: whoever is answered knows the nonce. */
static void learn_by_udp(unsigned char learned[16])
{
	unsigned char d[DATAGRAM], ends[40], zero[16] = { 0 }, own[16] = "a stranger";
	int udp;

	put_ends(ends, &own_name, &peers_name);
	MUST((udp = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)) >= 0);
	MUST(connect(udp, (void *)&own_name, sizeof own_name) == 0);
	for (int version = 1; version <= 2; version++) {
		put_datagram(d, HELLO, own, zero, ends);
		d[8] = (unsigned char)version;
		for (int again = 0; again < 4; again++) {
			(void)!send(udp, d, version == 1 ? 88 : DATAGRAM, 0);
			if (!readable(udp, 50) || recv(udp, d, sizeof d, 0) < 88)
				continue;
			/* A QUESTION has to be answered with the nonce. */
			memcpy(learned, d + 32, 16);
			put_datagram(d, HELLO, own, learned, ends);
			d[8] = (unsigned char)version;
		}
	}
}

static int link_to(void)
{
	struct sockaddr_un un;
	socklen_t len = put_name(&un, &own_name, &peers_name);
	int link;

	MUST((link = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) >= 0);
	if (connect(link, (void *)&un, len) == 0)
		return link;
	close(link);
	return -1;
}

/* A TCP connection of the stranger's own, which nobody receives from, and whose last close waits for that. */
static int lingering(void)
{
	static char much[1 << 22];
	int fd;

	MUST((fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0)) >= 0);
	MUST(connect(fd, (void *)&peers_name, sizeof peers_name) == 0 || errno == EINPROGRESS);
	while (send(fd, much, sizeof much, MSG_NOSIGNAL) > 0)
		;
	MUST(fcntl(fd, F_SETFL, 0) == 0);
	MUST(setsockopt(fd, SOL_SOCKET, SO_LINGER, &(struct linger){ 1, 60 }, sizeof(struct linger)) == 0);
	return fd;
}

static void claim(int way, unsigned char learned[16])
{
	unsigned char d[DATAGRAM], ends[40], zero[16] = { 0 }, own[16] = "a stranger";
	int link = link_to(), fds[3], count = 0, shown;

	put_ends(ends, &own_name, &peers_name);
	put_datagram(d, HELLO, own, zero, ends);
	switch (way) {
	case 2:		/* another connection of the same server */
		fds[count++] = path_of(lingering());
		break;
	case 3:		/* a socket, not by O_PATH: to close it takes a minute */
	case 4:		/* and more than one */
		for (int i = 0; i < (way == 3 ? 1 : 3); i++)
			fds[count++] = lingering();
		break;
	case 5:		/* a file */
		MUST((fds[count++] = open("/dev/null", O_PATH)) >= 0);
		break;
	case 8:
		fds[count++] = accepted_path;
		break;
	}
	for (int again = 0; again < 3; again++) {
		send_shown(link, d, way == 6 ? 50 : sizeof d, fds, count);
		if (readable(link, 50) && receive_shown(link, d, sizeof d, &shown) == DATAGRAM)
			memcpy(learned, d + 32, 16);
	}
}

static const char *const ways[] = { "a HELLO by UDP", "no descriptor", "an end of another connection", "a socket that lingers",
				    "three of them", "a file", "half a message", "links that say nothing",
				    "the true end" };

/* What the stranger has learned comes by the pipe, and then it stays as it is until the pipe is closed. */
static pid_t stranger(int way, int pipes[2])
{
	unsigned char learned[16] = { 0 };
	char byte;
	pid_t child;

	MUST((child = fork()) >= 0);
	if (child)
		return child;
	alarm(100);
	become_a_stranger();
	MUST(read(pipes[0], &byte, 1) == 1);
	if (way == 0) {
		learn_by_udp(learned);
	} else if (way == 3 || way == 4) {
		/* A process that ends does not linger: the last descriptors are in the messages, and the victim closes them. */
		MUST((child = fork()) >= 0);
		if (child == 0) {
			claim(way, learned);
			_exit(0);
		}
		MUST(waitpid(child, NULL, 0) == child);
	} else if (way != 7)
		claim(way, learned);
	else {
		for (int i = 0; i < ENOUGH; i++)
			link_to();
	}
	MUST(write(pipes[1], learned, 16) == 16);
	(void)!read(pipes[0], &byte, 1);
	_exit(0);
}

static void raw_send(int fd, const void *bytes, size_t len)
{
	MUST(syscall(SYS_sendto, fd, bytes, len, 0, NULL, 0) == (ssize_t)len);
}

/* The server sends a line that the stranger gave it; nothing of it is a marker to the client. Then both ends speak, and
 * the stranger's attempts have neither kept nor delayed them. */
static void claims_of_another_user(void)
{
	unsigned char marker[48], got[64], learned[16], own[16] = "a stranger";
	struct timeval limit = { .tv_sec = LIMIT_MS / 1000 };
	socklen_t len = sizeof own_name;
	char byte;

	for (int i = 0; i < 18; i++) {
		int way = i / 2, used = i % 2;
		int l = listener(), c = client(), a, to_child[2], from_child[2], status;
		ino_t before[2];
		pid_t child;

		MUST((a = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
		before[0] = inode(c);
		before[1] = inode(a);
		accepted_path = path_of(a);
		MUST(getsockname(c, (void *)&own_name, &len) == 0 && getpeername(c, (void *)&peers_name, &len) == 0);
		MUST(pipe2(to_child, O_CLOEXEC) == 0 && pipe2(from_child, O_CLOEXEC) == 0);
		/* Before the client uses its connection, what strangers send waits for it. A fork after that would be another
		 * matter. */
		child = stranger(way, (int[2]){ to_child[0], from_child[1] });
		if (used)
			MUST(recv(c, &byte, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
		MUST(write(to_child[1], "", 1) == 1 && read(from_child[0], learned, 16) == 16);
		if (!used)
			MUST(recv(c, &byte, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
		usleep(used ? 0 : 20000);
		check(inode(c) == before[0], "a claim without proof leaves the connection alone", "%s", ways[way]);
		put_marker(marker, own, learned, MARK);
		raw_send(a, marker, sizeof marker);
		raw_send(a, "end", 3);
		memset(got, 0, sizeof got);
		MUST(setsockopt(c, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
		check(recv(c, got, 51, MSG_WAITALL) == 51 && !memcmp(got, marker, 48) && !memcmp(got + 48, "end", 3),
		      "what looks like a marker is the program's", "%s, errno %d", ways[way], errno);
		check(inode(c) == before[0], "and is no answer", "%s", ways[way]);
		MUST(send(c, "x", 1, 0) == 1 && recv(a, &byte, 1, 0) == 1 && byte == 'x');
		check(becomes(a, before[1], LIMIT_MS) && becomes(c, before[0], LIMIT_MS), "the peer is believed all the same",
		      "%s", ways[way]);
		MUST(send(a, "back", 4, 0) == 4 && recv(c, got, 4, MSG_WAITALL) == 4 && !memcmp(got, "back", 4));
		MUST(close(to_child[1]) == 0 && close(to_child[0]) == 0 && kill(child, SIGKILL) == 0 &&
		     waitpid(child, &status, 0) == child);
		MUST(close(from_child[0]) == 0 && close(from_child[1]) == 0 && close(a) == 0 && close(c) == 0 && close(l) == 0);
		MUST(close(accepted_path) == 0);
	}
}

/* Another user has the name of a connection before its own end: it learns nothing by which it could do anything. */
static void another_user_has_the_name(void)
{
	unsigned char d[DATAGRAM], marker[48], got[64];
	struct timeval limit = { .tv_sec = LIMIT_MS / 1000 };
	socklen_t len = sizeof own_name;
	int l = listener(), c, a, ready[2], status;
	ino_t before;
	pid_t child;
	char byte;

	MUST((c = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) >= 0);
	MUST(bind(c, (void *)&(struct sockaddr_in){ .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) },
		  sizeof own_name) == 0);
	MUST(getsockname(c, (void *)&own_name, &len) == 0);
	memcpy(&peers_name, sa(), sizeof peers_name);
	MUST(pipe2(ready, O_CLOEXEC) == 0 && (child = fork()) >= 0);
	if (child == 0) {
		int name, link, shown;
		struct sockaddr_un un;
		socklen_t un_len = put_name(&un, &own_name, &peers_name);

		alarm(100);
		become_a_stranger();
		MUST((name = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) >= 0);
		MUST(bind(name, (void *)&un, un_len) == 0 && listen(name, 4) == 0 && write(ready[1], "", 1) == 1);
		MUST((link = accept(name, NULL, NULL)) >= 0 && readable(link, LIMIT_MS));
		/* Somebody who is shown an end could carry it to the other one. */
		_exit(receive_shown(link, d, sizeof d, &shown) > 0 || shown >= 0);
	}
	MUST(read(ready[0], &byte, 1) == 1 && connect(c, sa(), listening_len) == 0);
	MUST((a = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
	before = inode(a);
	MUST(send(c, "x", 1, 0) == 1 && recv(a, &byte, 1, 0) == 1);
	MUST(waitpid(child, &status, 0) == child);
	check(status == 0, "another user who has the name is shown nothing", "%#x", status);
	check(!becomes(a, before, QUIET_MS * 3), "and nobody is believed", "?");
	memset(marker, 'm', sizeof marker);
	MUST(send(a, marker, 48, 0) == 48 && setsockopt(c, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
	check(recv(c, got, 48, MSG_WAITALL) == 48 && !memcmp(got, marker, 48), "the connection is TCP, with its bytes only",
	      "errno %d", errno);
	MUST(close(a) == 0 && close(c) == 0 && close(l) == 0);
}

/* Has the name until an end has connected to it, and has spoken or gone. If it has spoken, this carries to the other
 * end and back what they say and what they show. */
static void carry(int ready, int said)
{
	unsigned char d[DATAGRAM];
	struct sockaddr_un un;
	socklen_t len = put_name(&un, &own_name, &peers_name);
	int name, link[2], shown;
	ssize_t got;

	MUST((name = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) >= 0);
	MUST(bind(name, (void *)&un, len) == 0 && listen(name, 4) == 0 && write(ready, "", 1) == 1);
	MUST((link[0] = accept(name, NULL, NULL)) >= 0 && readable(link[0], LIMIT_MS));
	got = receive_shown(link[0], d, sizeof d, &shown);
	MUST(close(name) == 0 && write(said, got > 0 || shown >= 0 ? "1" : "0", 1) == 1);
	if (got <= 0)
		_exit(0);
	for (link[1] = -1; link[1] < 0; usleep(500))
		link[1] = link_to();
	for (int to = 1;; to = !to) {
		if (got > 0)
			send_shown(link[to], d, (size_t)got, &shown, shown >= 0);
		if (shown >= 0)
			close(shown);
		got = receive_shown(link[to], d, sizeof d, &shown);
		if (got == 0)
			_exit(0);
		usleep(100);
	}
}

/* Lets a process that waits for this run until its call connect(fd) has returned. */
static void run_until_connected(pid_t pid, int fd)
{
	struct ptrace_syscall_info info;
	bool within = false;
	int status;

	MUST(waitpid(pid, &status, 0) == pid && WIFSTOPPED(status));
	MUST(TRACE(PTRACE_SETOPTIONS, pid, 0, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL) == 0);
	for (;;) {
		MUST(TRACE(PTRACE_SYSCALL, pid, 0, 0) == 0 && waitpid(pid, &status, 0) == pid && WIFSTOPPED(status));
		if (WSTOPSIG(status) != (SIGTRAP | 0x80))
			continue;
		MUST(TRACE(PTRACE_GET_SYSCALL_INFO, pid, sizeof info, &info) > 0);
		if (within) {
			MUST(info.op == PTRACE_SYSCALL_INFO_EXIT && info.exit.rval == 0);
			return;
		}
		within = info.op == PTRACE_SYSCALL_INFO_ENTRY && info.entry.nr == SYS_connect &&
			 info.entry.args[0] == (uint64_t)fd;
	}
}

/* Another user has the name while the end that accepted looks for its peer, and lets go of it before the end that
 * connected takes it. Then it carries between the two whatever they show. */
static void another_user_carries_descriptors(void)
{
	int l = listener(), a, told[2], ready[2], said[2], status, of_child[3] = { 0 };
	pid_t end, carrier;
	ino_t before;
	char byte;

	MUST(pipe2(told, O_CLOEXEC) == 0 && pipe2(ready, O_CLOEXEC) == 0 && pipe2(said, O_CLOEXEC) == 0);
	MUST((end = fork()) >= 0);
	if (end == 0) {
		socklen_t len = sizeof own_name;
		int c;

		alarm(100);
		MUST((c = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) >= 0);
		MUST(bind(c, (void *)&(struct sockaddr_in){ .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) },
			  sizeof own_name) == 0);
		MUST(getsockname(c, (void *)&own_name, &len) == 0);
		MUST(write(told[1], (int[3]){ c, ntohs(own_name.sin_port), 0 }, sizeof of_child) == sizeof of_child);
		MUST(TRACE(PTRACE_TRACEME, 0, 0, 0) == 0 && raise(SIGSTOP) == 0);
		MUST(connect(c, sa(), listening_len) == 0);
		before = inode(c);
		MUST(recv(c, &byte, 1, 0) == 1 && byte == 's' && becomes(c, before, LIMIT_MS));
		MUST(send(c, "c", 1, 0) == 1 && recv(c, &byte, 1, 0) == 1 && byte == 'e');
		_exit(0);
	}
	MUST(read(told[0], of_child, sizeof of_child) == sizeof of_child);
	own_name = (struct sockaddr_in){ .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
					 .sin_port = htons((uint16_t)of_child[1]) };
	memcpy(&peers_name, sa(), sizeof peers_name);
	MUST((carrier = fork()) >= 0);
	if (carrier == 0) {
		alarm(100);
		become_a_stranger();
		carry(ready[1], said[1]);
	}
	MUST(read(ready[0], &byte, 1) == 1);
	run_until_connected(end, of_child[0]);
	MUST((a = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
	before = inode(a);
	MUST(send(a, "s", 1, 0) == 1 && read(said[0], &byte, 1) == 1);
	check(byte == '0', "who has the name, and is another user, is shown nothing that he could carry", "?");
	MUST(TRACE(PTRACE_DETACH, end, 0, 0) == 0);
	check(becomes(a, before, LIMIT_MS), "when he lets go of it, the two ends find each other", "?");
	MUST(recv(a, &byte, 1, 0) == 1 && byte == 'c' && send(a, "e", 1, 0) == 1);
	MUST(waitpid(end, &status, 0) == end);
	check(status == 0, "and the end that connected was upgraded, too", "%#x", status);
	kill(carrier, SIGKILL);
	MUST(waitpid(carrier, NULL, 0) == carrier && close(a) == 0 && close(l) == 0);
}

/* The peer's link waits, with all its HELLOs in it, and behind it wait those of another user, who opens one after the
 * other from then on. If the peer's had to make room, this connection would stay TCP. */
static void links_of_another_user(void)
{
	int l = listener(), c = client(), a, to_child[2], from_child[2];
	socklen_t len = sizeof own_name;
	ino_t before[2];
	pid_t child;
	char byte;

	MUST((a = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
	before[0] = inode(c);
	before[1] = inode(a);
	MUST(getsockname(c, (void *)&own_name, &len) == 0 && getpeername(c, (void *)&peers_name, &len) == 0);
	MUST(pipe2(to_child, O_CLOEXEC) == 0 && pipe2(from_child, O_CLOEXEC) == 0 && (child = fork()) >= 0);
	if (child == 0) {
		int links[2 * ENOUGH];

		alarm(100);
		become_a_stranger();
		MUST(read(to_child[0], &byte, 1) == 1);
		for (int i = 0; i < ENOUGH; i++)
			links[i] = link_to();
		MUST(write(from_child[1], "", 1) == 1);
		for (int i = ENOUGH;; i = (i + 1) % (2 * ENOUGH)) {
			if (links[(i + ENOUGH) % (2 * ENOUGH)] >= 0)
				close(links[(i + ENOUGH) % (2 * ENOUGH)]);
			links[i] = link_to();
			usleep(100);
		}
	}
	MUST(send(a, "x", 1, 0) == 1 && write(to_child[1], "", 1) == 1 && read(from_child[0], &byte, 1) == 1);
	usleep(4300000);
	MUST(recv(c, &byte, 1, 0) == 1 && byte == 'x');
	check(becomes(a, before[1], LIMIT_MS) && becomes(c, before[0], LIMIT_MS), "links of others take nobody's place",
	      "?");
	MUST(send(c, "y", 1, 0) == 1 && recv(a, &byte, 1, 0) == 1 && byte == 'y');
	MUST(kill(child, SIGKILL) == 0 && waitpid(child, NULL, 0) == child);
	MUST(close(a) == 0 && close(c) == 0 && close(l) == 0);
}

/* In a user namespace all users that it does not map have one number: the peer and the stranger look alike. */
static void users_without_a_number(void)
{
	int l = listener(), a, told[2], go[2], status;
	unsigned char learned[16] = { 0 }, zero[16] = { 0 };
	pid_t end, child;
	char byte;

	MUST(pipe2(told, O_CLOEXEC) == 0 && pipe2(go, O_CLOEXEC) == 0 && (end = fork()) >= 0);
	if (end == 0) {
		socklen_t len = sizeof own_name;
		ino_t before;
		int c, map;

		alarm(100);
		if (unshare(CLONE_NEWUSER) != 0)
			_exit(77);
		MUST((map = open("/proc/self/uid_map", O_WRONLY | O_CLOEXEC)) >= 0 && write(map, "0 0 1", 5) == 5);
		c = client();
		before = inode(c);
		MUST(getsockname(c, (void *)&own_name, &len) == 0);
		MUST(recv(c, &byte, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
		MUST(write(told[1], &own_name, sizeof own_name) == sizeof own_name && read(go[0], &byte, 1) == 1);
		_exit(inode(c) != before);
	}
	MUST(close(told[1]) == 0);
	if (read(told[0], &own_name, sizeof own_name) == sizeof own_name) {
		memcpy(&peers_name, sa(), sizeof peers_name);
		setfsuid(1234);
		MUST((a = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
		setfsuid(0);
		accepted_path = path_of(a);
		MUST((child = fork()) >= 0);
		if (child == 0) {
			alarm(100);
			become_a_stranger();
			claim(8, learned);
			_exit(memcmp(learned, zero, 16) != 0);
		}
		MUST(waitpid(child, &status, 0) == child);
		check(status == 0, "a stranger whose user has no number here is told nothing", "%#x", status);
		MUST(write(go[1], "", 1) == 1 && close(a) == 0 && close(accepted_path) == 0);
	}
	MUST(waitpid(end, &status, 0) == end && close(l) == 0);
	if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
		printf("skipped: this process can make no user namespace\n");
	else
		check(status == 0, "nor believed", "%#x", status);
}

/* A program carries bytes between the two: neither takes the other for its peer, however like one it speaks. */
static void a_program_that_relays(void)
{
	int l = listener(), l2, c, m1, m2, a;
	struct sockaddr_in to;
	socklen_t len = sizeof to;
	unsigned char marker[48], got[48], nonce[16] = { 1 };
	ino_t before[2];
	char byte;

	MUST((l2 = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) >= 0 && listen(l2, 4) == 0);
	MUST(getsockname(l2, (void *)&to, &len) == 0);
	c = client();
	MUST((m1 = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
	MUST((m2 = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) >= 0);
	to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	MUST(connect(m2, (void *)&to, sizeof to) == 0 && (a = accept4(l2, NULL, NULL, SOCK_CLOEXEC)) >= 0);
	before[0] = inode(c);
	before[1] = inode(a);
	put_marker(marker, nonce, nonce, MARK);
	for (int i = 0; i < 20; i++) {
		/* Both ends use their connection; what is between them is not under a rule: it calls the kernel. */
		MUST(send(c, "x", 1, 0) == 1 && syscall(SYS_recvfrom, m1, &byte, 1, 0, NULL, NULL) == 1);
		raw_send(m2, &byte, 1);
		MUST(recv(a, &byte, 1, 0) == 1 && send(a, marker, 48, 0) == 48);
		MUST(syscall(SYS_recvfrom, m2, got, 48, MSG_WAITALL, NULL, NULL) == 48);
		raw_send(m1, got, 48);
		memset(got, 0, 48);
		if (recv(c, got, 48, MSG_WAITALL) != 48 || memcmp(got, marker, 48))
			check(false, "bytes through a relay", "%d", i);
		usleep(20000);
	}
	check(inode(c) == before[0] && inode(a) == before[1], "ends with a program between them are not each other's peer", "?");
	MUST(close(c) == 0 && close(m1) == 0 && close(m2) == 0 && close(a) == 0 && close(l) == 0 && close(l2) == 0);
}

static const struct group groups[] = {
	{ "claims_of_another_user", claims_of_another_user },
	{ "another_user_has_the_name", another_user_has_the_name },
	{ "another_user_carries_descriptors", another_user_carries_descriptors },
	{ "links_of_another_user", links_of_another_user },
	{ "users_without_a_number", users_without_a_number },
	{ "a_program_that_relays", a_program_that_relays },
};

int main(int argc, char **argv)
{
	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
