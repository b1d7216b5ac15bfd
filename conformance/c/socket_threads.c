/* Sockets in IWARP_MODE, and rsockets, that several threads and processes use at once; threads that are cancelled; what a program
 * does with a socket's queue pair.
 *
 *	socket_threads ADDRESS [GROUP] */
#define _GNU_SOURCE
#include <rdma/rsocket.h>
#include <sys/resource.h>

#include "iwarp_mode.h"

static int pipes[2];

/* Upgrades and closes sockets, so that the library's table changes all the time. */
static volatile bool enough;

static void *come_and_go(void *arg)
{
	int fds[2];

	(void)arg;
	while (!enough) {
		pair(fds);
		close_both(fds);
	}
	return NULL;
}

/* A child of this process, which does not end: killed, and a failure. */
static bool ends(pid_t child)
{
	int status;

	for (uint64_t end = now_ms() + LIMIT_MS; now_ms() < end; usleep(1000)) {
		pid_t got = waitpid(child, &status, WNOHANG);

		MUST(got >= 0);
		if (got == child)
			return WIFEXITED(status) && WEXITSTATUS(status) == 0;
	}
	MUST(kill(child, SIGKILL) == 0 && waitpid(child, &status, 0) == child);
	return false;
}

static volatile sig_atomic_t handled;

static void in_handler(int number)
{
	struct pollfd set = { .fd = pipes[0], .events = POLLIN };
	int before = errno;
	char byte;

	(void)number;
	if (CALL(write, pipes[1], "h", 1) == 1 && CALL(poll, &set, 1, 0) == 1 && CALL(read, pipes[0], &byte, 1) == 1)
		handled++;
	errno = before;
}

/* Other descriptors than sockets in IWARP_MODE take no lock: not in a child that is forked while another thread holds it, and not
 * in a signal's handler. */
static void locked(void)
{
	struct sigaction action = { .sa_handler = in_handler, .sa_flags = SA_RESTART };
	pthread_t threads[2];
	int forks = 0, signals = 0, fds[2];

	MUST(pipe(pipes) == 0);
	/* Found before the first fork: dlopen takes locks. */
	pair(fds);
	close_both(fds);
	MUST(CALL(write, pipes[1], "x", 1) == 1 && CALL(poll, &(struct pollfd){ .fd = pipes[0], .events = POLLIN }, 1, 0) == 1);
	for (int i = 0; i < 2; i++)
		MUST(pthread_create(&threads[i], NULL, come_and_go, NULL) == 0);
	for (int i = 0; i < 150; i++) {
		pid_t child = fork();

		MUST(child >= 0);
		if (child == 0) {
			char buf[4];
			struct pollfd set = { .fd = pipes[0], .events = POLLIN };
			int flag = 0;
			socklen_t len = sizeof flag;
			bool good = CALL(poll, &set, 1, 0) == 1 && CALL(recv, pipes[0], buf, 1, 0) < 0 && errno == ENOTSOCK;

			good = good && CALL(getsockopt, pipes[0], SOL_SOCKET, SO_TYPE, &flag, &len) < 0 && errno == ENOTSOCK;
			good = good && CALL(write, pipes[1], "x", 0) == 0 && CALL(close, pipes[1]) == 0;
			_exit(good ? 0 : 1);
		}
		if (!ends(child))
			break;
		forks++;
	}
	check(forks == 150, "children that are forked at any time use other descriptors", "%d of 150", forks);
	MUST(sigaction(SIGUSR1, &action, NULL) == 0);
	for (int i = 0; i < 300; i++) {
		MUST(pthread_kill(threads[i & 1], SIGUSR1) == 0);
		for (uint64_t end = now_ms() + LIMIT_MS; handled <= i && now_ms() < end;)
			sched_yield();
		if (handled <= i)
			break;
		signals++;
	}
	check(signals == 300, "and the handlers of signals", "%d of 300", signals);
	enough = true;
	for (int i = 0; i < 2; i++)
		MUST(pthread_join(threads[i], NULL) == 0);
	close_both(pipes);
}

/* A child's copies of descriptors, and numbers that it uses again. */
static void copies(void)
{
	char buf[8] = "";
	int fds[2], file;
	pid_t child;

	pair(fds);
	MUST((child = fork()) >= 0);
	if (child == 0) {
		bool good = CALL(read, fds[1], buf, 1) < 0 && errno == ENODEV && CALL(close, fds[1]) == 0;

		good = good && (file = open("/dev/zero", O_RDONLY)) >= 0 && (file == fds[1] || dup2(file, fds[1]) == fds[1]);
		good = good && CALL(read, fds[1], buf, 8) == 8 && buf[0] == 0;
		_exit(good ? 0 : 1);
	}
	check(ends(child), "a child that closes its copy uses the number again", "not");
	/* In the memory of its parent. */
	MUST((child = vfork()) >= 0);
	if (child == 0)
		_exit(CALL(close, fds[0]) == 0 ? 0 : 1);
	check(ends(child), "a child of vfork closes its copy, too", "not");
	check(CALL(write, fds[0], "still", 5) == 5 && CALL(read, fds[1], buf, 8) == 5, "and the parent goes on", "errno %d", errno);
	close_both(fds);
}

struct setter {
	int fd, result;
	pthread_barrier_t *at_once;
};

static void *set_at_once(void *arg)
{
	struct setter *s = arg;

	pthread_barrier_wait(s->at_once);
	s->result = set_role(s->fd, UWARP_INITIATOR) ? errno : 0;
	return NULL;
}

/* Two threads set the mode of one socket at the same time, by one descriptor or by two. */
static void at_once(void)
{
	pthread_barrier_t barrier;
	int good[2] = { 0, 0 }, rounds = 60;

	MUST(pthread_barrier_init(&barrier, NULL, 3) == 0);
	for (int i = 0; i < 2 * rounds; i++) {
		struct setter s[2];
		pthread_t threads[2];
		char buf[8];
		int fds[2], copy = -1, ok, refused, used;

		tcp(fds);
		set_nonblocking(fds[0], true);
		MUST((copy = dup(fds[0])) >= 0);
		for (int t = 0; t < 2; t++) {
			s[t] = (struct setter){ .fd = t == 1 && i % 2 ? copy : fds[0], .at_once = &barrier };
			MUST(pthread_create(&threads[t], NULL, set_at_once, &s[t]) == 0);
		}
		begin(fds[1], UWARP_RESPONDER);
		pthread_barrier_wait(&barrier);
		for (int t = 0; t < 2; t++)
			MUST(pthread_join(threads[t], NULL) == 0);
		ok = (s[0].result == 0 || s[0].result == EINPROGRESS) + (s[1].result == 0 || s[1].result == EINPROGRESS);
		refused = (s[0].result == EALREADY) + (s[1].result == EALREADY);
		if (ok != 1 || refused != 1) {
			printf("round %d: %d and %d\n", i, s[0].result, s[1].result);
			_exit(1);
		}
		used = s[0].result == EALREADY ? s[1].fd : s[0].fd;
		end(used);
		end(fds[1]);
		good[i % 2] += CALL(write, used, "good", 4) == 4 && CALL(read, fds[1], buf, 8) == 4 && !memcmp(buf, "good", 4);
		MUST(CALL(close, used) == 0 && CALL(close, used == copy ? fds[0] : copy) == 0 && CALL(close, fds[1]) == 0);
	}
	check(good[0] == rounds, "one of two threads sets the mode", "%d of %d", good[0], rounds);
	check(good[1] == rounds, "also by two descriptors of the socket", "%d of %d", good[1], rounds);
	MUST(pthread_barrier_destroy(&barrier) == 0);
}

static void errors(void)
{
	struct linger none = { .l_onoff = 1 };
	struct pollfd set;
	char buf[4];
	int fds[2];

	pair(fds);
	MUST(setsockopt(fds[0], SOL_SOCKET, SO_LINGER, &none, sizeof none) == 0 && CALL(close, fds[0]) == 0);
	/* Nothing but SO_ERROR looks at the socket. The library's own thread must have seen the reset. */
	for (uint64_t end = now_ms() + LIMIT_MS; now_ms() < end; usleep(1000)) {
		int error = error_of(fds[1]);

		if (error) {
			check_errno(error, ECONNRESET, "SO_ERROR says that the peer has reset the connection");
			break;
		}
	}
	check(error_of(fds[1]) == 0, "once", "again");
	check(CALL(read, fds[1], buf, 1) == 0, "and then the stream is at its end", "errno %d", errno);
	set = (struct pollfd){ .fd = fds[1], .events = POLLIN };
	check(CALL(poll, &set, 1, 0) == 1 && !(set.revents & POLLERR), "without an error", "%#x", set.revents);
	MUST(CALL(close, fds[1]) == 0);
}

/* What the program posts to a socket's queue pair. */
static void own_work(void)
{
	static char ours[64], theirs[64];
	struct ibv_mr *local, *remote;
	struct ibv_send_wr wr[70], *bad;
	struct ibv_recv_wr receive = { .wr_id = 1 }, *bad_receive = NULL;
	struct uwarp_completion done[80];
	struct ibv_sge sge;
	struct ibv_qp *qp;
	int fds[2], n, got = 0, good = 0;
	char byte;

	pair(fds);
	local = registered(fds[0], ours, sizeof ours, IBV_ACCESS_LOCAL_WRITE);
	remote = registered(fds[1], theirs, sizeof theirs, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	MUST(qp = CALL(socket_qp, fds[0]));
	sge = (struct ibv_sge){ (uintptr_t)ours, 1, local->lkey };
	for (int i = 0; i < 70; i++) {
		wr[i] = (struct ibv_send_wr){ .wr_id = i, .opcode = IBV_WR_RDMA_WRITE, .num_sge = 1, .sg_list = &sge };
		wr[i].wr.rdma.remote_addr = (uintptr_t)theirs;
		wr[i].wr.rdma.rkey = remote->rkey;
		wr[i].next = i < 69 ? &wr[i + 1] : NULL;
	}
	bad = NULL;
	check_errno(ibv_post_send(qp, wr, &bad), ENOMEM, "more than 64 work requests of the program's own");
	check(bad == &wr[64], "the first one that does not fit", "%ld", (long)(bad - wr));
	check(CALL(write, fds[0], "x", 1) == 1 && CALL(read, fds[1], &byte, 1) == 1, "the stream goes on beside them", "errno %d", errno);
	while (got < 64) {
		MUST((n = CALL(get_completions, fds[0], done, got < 60 ? 10 : 64 - got)) >= 0);
		for (int i = 0; i < n; i++)
			good += done[i].op == UWARP_WORK_REQUEST && done[i].id == (uint64_t)(got + i) && !done[i].error;
		got += n;
		if (n == 0)
			MUST(events(fds[0], POLLPRI, LIMIT_MS) == POLLPRI);
		else if (got == 10) {
			wr[9].next = NULL;
			check_errno(ibv_post_send(qp, wr, &bad), 0, "completions that were taken make room");
			wr[0].next = NULL;
			check_errno(ibv_post_send(qp, wr, &bad), ENOMEM, "for as many");
		}
	}
	check(good == 64, "and complete", "%d", good);
	for (got = 0; got < 10; got += n) {
		MUST((n = CALL(get_completions, fds[0], done, 10)) >= 0);
		if (n == 0)
			MUST(events(fds[0], POLLPRI, LIMIT_MS) == POLLPRI);
	}
	wr[0].next = NULL;
	wr[0].wr_id = 1ull << 63;
	check_errno(ibv_post_send(qp, wr, &bad), EINVAL, "a number that is the stream's");
	wr[0].wr_id = 5;
	wr[0].opcode = IBV_WR_SEND;
	check_errno(ibv_post_send(qp, wr, &bad), EINVAL, "a Send, which would take a receive of the peer's stream");
	wr[0].opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
	check_errno(ibv_post_send(qp, wr, &bad), EINVAL, "or a Write with immediate data");
	check_errno(ibv_post_recv(qp, &receive, &bad_receive), EINVAL, "a receive, which would take a message of the stream");
	check(bad_receive == &receive, "it is named", "%p", (void *)bad_receive);
	for (int i = 0; i < 1000; i++) {
		MUST(CALL(write, fds[0], "y", 1) == 1 && CALL(read, fds[1], &byte, 1) == 1);
		MUST(CALL(write, fds[1], "z", 1) == 1 && CALL(read, fds[0], &byte, 1) == 1);
	}
	check(CALL(get_completions, fds[0], done, 80) == 0, "nothing was posted, and the stream is whole", "something");
	MUST(ibv_dereg_mr(local) == 0 && ibv_dereg_mr(remote) == 0);
	close_both(fds);
}

static void *ask_for_qp(void *arg)
{
	struct setter *s = arg;
	void *qp;

	pthread_barrier_wait(s->at_once);
	qp = CALL(socket_qp, s->fd);
	s->result = qp ? 0 : errno;
	return NULL;
}

/* Its queue pair is asked for while another thread closes the socket. The view must not outlive it: memcheck sees it then. */
static void closing(void)
{
	pthread_barrier_t barrier;
	int good = 0, rounds = 200;

	MUST(pthread_barrier_init(&barrier, NULL, 2) == 0);
	for (int i = 0; i < rounds; i++) {
		struct setter s;
		pthread_t thread;
		int fds[2];

		pair(fds);
		s = (struct setter){ .fd = fds[0], .at_once = &barrier };
		MUST(pthread_create(&thread, NULL, ask_for_qp, &s) == 0);
		pthread_barrier_wait(&barrier);
		for (int spin = i * 40; spin > 0; spin--)
			__asm__ volatile("");
		MUST(CALL(close, fds[0]) == 0);
		MUST(pthread_join(thread, NULL) == 0);
		good += s.result == 0 || s.result == EBADF || s.result == EOPNOTSUPP;
		if (s.result != 0 && s.result != EBADF && s.result != EOPNOTSUPP)
			printf("errno %d\n", s.result);
		MUST(CALL(close, fds[1]) == 0);
	}
	check(good == rounds, "its queue pair while it is closed", "%d of %d", good, rounds);
	MUST(pthread_barrier_destroy(&barrier) == 0);
}

static void *closes(void *arg)
{
	struct setter *s = arg;

	s->result = CALL(close, s->fd) ? errno : 0;
	return NULL;
}

/* The peer of a socket, in a process that stops once its end is in IWARP_MODE. Says how many bytes came before the end. */
static pid_t stopping_peer(int fds[2], int report)
{
	static char buf[65536];
	pid_t child = fork();
	uint64_t got = 0;
	ssize_t n;

	MUST(child >= 0);
	if (child > 0)
		return child;
	close(fds[0]);
	MUST(set_role(fds[1], UWARP_RESPONDER) == 0);
	raise(SIGSTOP);
	while ((n = CALL(read, fds[1], buf, sizeof buf)) > 0)
		got += (uint64_t)n;
	MUST(n == 0 && write(report, &got, sizeof got) == sizeof got);
	_exit(0);
}

/* A close that waits (SO_LINGER), and one whose stream goes on in the background: nothing of other calls gets between its bytes. */
static void lingering(void)
{
	struct linger linger = { .l_onoff = 1, .l_linger = 2 };
	int fds[2][2], report[2];
	pid_t peers[2];

	MUST(pipe(report) == 0);
	for (int i = 0; i < 2; i++) {
		tcp(fds[i]);
		peers[i] = stopping_peer(fds[i], report[1]);
		close(fds[i][1]);
	}
	for (int i = 0; i < 2; i++) {
		static char buf[65536];
		uint64_t sent = 0, got = 0;
		int fd = fds[i][0], copy, status;
		struct setter s = { .fd = fd };
		pthread_t thread;
		ssize_t n;

		MUST(set_role(fd, UWARP_INITIATOR) == 0);
		MUST(waitpid(peers[i], &status, WUNTRACED) == peers[i] && WIFSTOPPED(status));
		MUST((copy = dup(fd)) >= 0);
		MUST(fcntl(fd, F_SETFL, O_NONBLOCK) == 0);
		while ((n = CALL(write, fd, buf, sizeof buf)) > 0)
			sent += (uint64_t)n;
		MUST(n < 0 && errno == EAGAIN);
		if (i == 0)
			MUST(setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0);
		MUST(pthread_create(&thread, NULL, closes, &s) == 0);
		usleep(500000);
		n = CALL(write, fd, "raw", 3);
		status = errno;
		check(n < 0 && status == EBADF, "a write to a socket that is closed", "%zd, errno %d", n, status);
		n = set_role(copy, UWARP_INITIATOR);
		status = errno;
		check(n < 0 && status == EALREADY, "a second stream on its connection", "%zd, errno %d", n, status);
		MUST(pthread_join(thread, NULL) == 0);
		check(s.result == 0, "the close", "errno %d", s.result);
		MUST(kill(peers[i], SIGCONT) == 0);
		check(ends(peers[i]) && read(report[0], &got, sizeof got) == sizeof got && got == sent,
		      "all that was sent arrives, and the end", "%llu of %llu", (unsigned long long)got, (unsigned long long)sent);
		MUST(close(copy) == 0);
	}
	MUST(close(report[0]) == 0 && close(report[1]) == 0);
}

/* No descriptor is left when the mode is set: the socket stays TCP's, and loses nothing. */
static void exhausted(void)
{
	struct rlimit before, none;
	char buf[8];
	int fds[2], first[2], file;

	/* The library has what it needs itself. */
	pair(first);
	tcp(fds);
	MUST((file = dup(0)) >= 0 && close(file) == 0);
	MUST(getrlimit(RLIMIT_NOFILE, &before) == 0);
	none = before;
	none.rlim_cur = (rlim_t)file;
	MUST(setrlimit(RLIMIT_NOFILE, &none) == 0);
	set_nonblocking(fds[0], true);
	check_failed(set_role(fds[0], UWARP_INITIATOR) < 0, EMFILE, "the mode without a descriptor");
	check(role_of(fds[0]) == 0, "is not set", "%d", role_of(fds[0]));
	check(CALL(write, fds[0], "plain", 5) == 5 && recv(fds[1], buf, 8, 0) == 5, "it stays a TCP socket", "errno %d", errno);
	check(CALL(write, first[0], "other", 5) == 5 && CALL(read, first[1], buf, 8) == 5, "another one goes on", "errno %d", errno);
	MUST(setrlimit(RLIMIT_NOFILE, &before) == 0);
	upgrade(fds);
	check(CALL(write, fds[0], "later", 5) == 5 && CALL(read, fds[1], buf, 8) == 5, "and it is set when there are some", "errno %d", errno);
	close_both(fds);
	close_both(first);
}

/* Readers of each kind, and what they got. */
struct reader {
	int fd;
	char kind;
	volatile bool begun;
	volatile long result;
};

static void *reads(void *arg)
{
	struct reader *r = arg;
	char buf[8];
	long n;

	r->begun = true;
	n = r->kind == 'r' ? rrecv(r->fd, buf, sizeof buf, 0) : CALL(read, r->fd, buf, sizeof buf);
	r->result = n < 0 ? -errno : n;
	/* A cancellation point of libc. */
	pause();
	return NULL;
}

static void start(pthread_t *thread, struct reader *r, int fd, char kind)
{
	*r = (struct reader){ .fd = fd, .kind = kind, .result = 99 };
	MUST(pthread_create(thread, NULL, reads, r) == 0);
	while (!r->begun)
		usleep(1000);
	/* In the call, most likely. Any order is right. */
	usleep(30000);
}

static void rsocket_pair(int rs[2])
{
	struct sockaddr_storage at = sockaddr_of(address, 0);
	socklen_t len = at.ss_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
	int l;

	MUST((l = rsocket(at.ss_family, SOCK_STREAM, 0)) >= 0);
	MUST(rbind(l, (struct sockaddr *)&at, len) == 0 && rlisten(l, 4) == 0);
	MUST(rgetsockname(l, (struct sockaddr *)&at, &len) == 0);
	MUST((rs[0] = rsocket(at.ss_family, SOCK_STREAM, 0)) >= 0);
	MUST(rconnect(rs[0], (struct sockaddr *)&at, len) == 0);
	MUST((rs[1] = raccept(l, NULL, NULL)) >= 0 && rclose(l) == 0);
}

/* Threads that are cancelled in a call that waits. Of other descriptors it is libc's read; a call for a stream ends first. */
static void cancelled(void)
{
	struct reader r;
	pthread_t thread;
	void *result;
	char buf[8];
	int fds[2], rs[2];

	MUST(pipe(pipes) == 0);
	start(&thread, &r, pipes[0], 'u');
	MUST(pthread_cancel(thread) == 0 && pthread_join(thread, &result) == 0);
	check(result == PTHREAD_CANCELED && r.result == 99, "a thread is cancelled that reads another descriptor", "%ld", r.result);
	check(CALL(write, pipes[1], "left", 4) == 4 && CALL(read, pipes[0], buf, 8) == 4, "which stays as it was", "errno %d", errno);
	close_both(pipes);

	pair(fds);
	start(&thread, &r, fds[1], 'u');
	MUST(pthread_cancel(thread) == 0);
	MUST(CALL(write, fds[0], "data", 4) == 4 && pthread_join(thread, &result) == 0);
	check(result == PTHREAD_CANCELED && r.result == 4, "one that reads in IWARP_MODE gets its data first", "%ld", r.result);
	check(CALL(write, fds[0], "more", 4) == 4 && CALL(read, fds[1], buf, 8) == 4, "and the socket goes on", "errno %d", errno);
	start(&thread, &r, fds[1], 'u');
	MUST(pthread_cancel(thread) == 0 && CALL(close, fds[1]) == 0 && pthread_join(thread, &result) == 0);
	check(result == PTHREAD_CANCELED && r.result == -EBADF, "a close ends its wait", "%ld", r.result);
	MUST(CALL(close, fds[0]) == 0);

	rsocket_pair(rs);
	start(&thread, &r, rs[1], 'r');
	MUST(pthread_cancel(thread) == 0);
	MUST(rsend(rs[0], "data", 4, 0) == 4 && pthread_join(thread, &result) == 0);
	check(result == PTHREAD_CANCELED && r.result == 4, "one that reads an rsocket gets its data first", "%ld", r.result);
	check(rsend(rs[0], "more", 4, 0) == 4 && rrecv(rs[1], buf, 8, 0) == 4, "and the rsocket goes on", "errno %d", errno);
	start(&thread, &r, rs[1], 'r');
	MUST(pthread_cancel(thread) == 0 && rclose(rs[1]) == 0 && pthread_join(thread, &result) == 0);
	check(result == PTHREAD_CANCELED && r.result == -EBADF, "a close ends its wait, too", "%ld", r.result);
	MUST(rclose(rs[0]) == 0);
}

/* libc's calls of these names are no cancellation points. */
static void *asks_cancelled(void *arg)
{
	int *fds = arg, value = 1;
	socklen_t len = sizeof value;

	MUST(pthread_cancel(pthread_self()) == 0);
	fds[2] += CALL(setsockopt, fds[0], SOL_SOCKET, SO_KEEPALIVE, &value, len) == 0;
	fds[2] += CALL(getsockopt, fds[0], SOL_SOCKET, SO_TYPE, &value, &len) == 0;
	fds[2] += CALL(shutdown, fds[0], SHUT_WR) == 0;
	pause();
	return NULL;
}

static void not_cancelled(void)
{
	pthread_t thread;
	void *result;
	int fds[3] = { 0 };

	MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
	MUST(pthread_create(&thread, NULL, asks_cancelled, fds) == 0 && pthread_join(thread, &result) == 0);
	check(result == PTHREAD_CANCELED && fds[2] == 3, "options and shutdown are no cancellation points", "%d of 3", fds[2]);
	close_both(fds);
}

/* IWARP_MODE for an rsocket is refused, and leaves it as it is. */
static void refused(void)
{
	char buf[8];
	int rs[2];

	rsocket_pair(rs);
	check_errno(set_role(rs[0], UWARP_INITIATOR) ? errno : 0, ENOTSOCK, "IWARP_MODE for an rsocket");
	check(rsend(rs[0], "data", 4, 0) == 4 && rrecv(rs[1], buf, 8, 0) == 4, "which goes on", "errno %d", errno);
	MUST(rclose(rs[0]) == 0 && rclose(rs[1]) == 0);
}

static volatile sig_atomic_t got_signal;
static volatile bool waiting;

static void takes_signal(int number)
{
	(void)number;
	got_signal = 1;
}

/* Bytes to and fro, which a thread that waits for another socket may have to serve. */
static void *traffic(void *arg)
{
	int *fds = arg;
	char buf[64] = "";

	while (!enough) {
		write_all(fds[0], buf, sizeof buf);
		read_all(fds[1], buf, sizeof buf);
	}
	return NULL;
}

struct kick {
	pthread_t to;
	pid_t tid;
	long slept;			/* how often, before the call */
	int after_us, again;
};

/* How often a thread of this process has gone to sleep so far. */
static long sleeps(pid_t tid)
{
	char path[64], line[128];
	long n = -1;
	FILE *file;

	snprintf(path, sizeof path, "/proc/self/task/%d/status", tid);
	MUST(file = fopen(path, "r"));
	while (n < 0 && fgets(line, sizeof line, file))
		if (sscanf(line, "voluntary_ctxt_switches: %ld", &n) != 1)
			n = -1;
	fclose(file);
	MUST(n >= 0);
	return n;
}

/* One signal, once the thread has slept in the call, and another one only if that one has not ended the
 * call. */
static void *kicks(void *arg)
{
	struct kick *kick = arg;

	while (!waiting || sleeps(kick->tid) == kick->slept)
		usleep(100);
	usleep((useconds_t)kick->after_us);
	MUST(pthread_kill(kick->to, SIGUSR1) == 0);
	for (int ms = 0; waiting; ms++) {
		usleep(1000);
		if (ms % 500 == 499) {
			kick->again = 1;
			MUST(pthread_kill(kick->to, SIGUSR1) == 0);
		}
	}
	return NULL;
}

static struct ibv_comp_channel *completions;
static struct rdma_event_channel *connections;

static bool ends_poll(int fd)
{
	struct pollfd set = { .fd = fd, .events = POLLIN };

	return CALL(poll, &set, 1, LIMIT_MS) < 0 && errno == EINTR;
}

static bool ends_read(int fd)
{
	char byte;

	return CALL(read, fd, &byte, 1) < 0 && errno == EINTR;
}

static bool ends_get_cq_event(int fd)
{
	struct ibv_cq *cq;
	void *context;

	(void)fd;
	return ibv_get_cq_event(completions, &cq, &context) < 0 && errno == EINTR;
}

static bool ends_get_cm_event(int fd)
{
	struct rdma_cm_event *event;

	(void)fd;
	return rdma_get_cm_event(connections, &event) < 0 && errno == EINTR;
}

/* A hundred single signals to a call that waits. */
static void signals_to(const char *name, bool (*call)(int), int idle, int flags)
{
	struct sigaction action = { .sa_handler = takes_signal, .sa_flags = flags };
	int late = 0, ended = 0;

	MUST(sigaction(SIGUSR1, &action, NULL) == 0);
	for (int i = 0; i < 100; i++) {
		struct kick kick = { .to = pthread_self(), .tid = gettid(), .after_us = 2000 + i * 37 };
		pthread_t kicker;

		got_signal = 0;
		MUST(pthread_create(&kicker, NULL, kicks, &kick) == 0);
		kick.slept = sleeps(kick.tid);
		waiting = true;
		ended += call(idle) && got_signal;
		waiting = false;
		MUST(pthread_join(kicker, NULL) == 0);
		late += kick.again;
	}
	check(ended == 100, name, "signals ended %d of 100", ended);
	check(late <= 10, "also those that come while the thread serves other sockets", "%s: %d of 100 did not", name, late);
}

/* A signal ends a call that waits: uwarp_poll as it ends poll(2), others as it ends read(2). */
static void interrupted(void)
{
	pthread_t busy;
	int idle[2], fds[2];

	pair(idle);
	pair(fds);
	enough = false;
	MUST(completions = ibv_create_comp_channel(CALL(socket_qp, idle[0])->context));
	MUST(connections = rdma_create_event_channel());
	MUST(pthread_create(&busy, NULL, traffic, fds) == 0);
	signals_to("uwarp_poll", ends_poll, idle[1], SA_RESTART);
	signals_to("uwarp_read", ends_read, idle[1], 0);
	signals_to("ibv_get_cq_event", ends_get_cq_event, -1, 0);
	signals_to("rdma_get_cm_event", ends_get_cm_event, -1, 0);
	enough = true;
	MUST(pthread_join(busy, NULL) == 0);
	rdma_destroy_event_channel(connections);
	MUST(ibv_destroy_comp_channel(completions) == 0);
	close_both(idle);
	close_both(fds);
}

static const struct group groups[] = {
	{ "locked", locked },
	{ "copies", copies },
	{ "at_once", at_once },
	{ "errors", errors },
	{ "own_work", own_work },
	{ "closing", closing },
	{ "lingering", lingering },
	{ "exhausted", exhausted },
	{ "cancelled", cancelled },
	{ "not_cancelled", not_cancelled },
	{ "refused", refused },
	{ "interrupted", interrupted },
};

int main(int argc, char **argv)
{
	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
