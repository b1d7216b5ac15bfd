/* TCP connections that become iWARP's in place, and processes: servers that fork, connections that two processes have,
 * programs that are started with one, and processes that end at once. */
#define _GNU_SOURCE
#include "upgrade.h"

#include <pthread.h>
#include <spawn.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>

/* Each connection in a child of its own, which the parent only accepts and closes. */
static void forked(void)
{
	int l = listener(), c, a, status;
	char to[16];
	pid_t child;
	ino_t before;

	for (int i = 0; i < 8; i++) {
		child = fork();
		MUST(child >= 0);
		if (child == 0) {
			/* A client of its own process, too. */
			close(l);
			c = client();
			before = inode(c);
			MUST(send(c, "hello", 5, 0) == 5);
			for (uint64_t at = 0; at < 400000;) {
				unsigned char block[4000];
				ssize_t n = recv(c, block, sizeof block, 0);

				MUST(n > 0);
				for (ssize_t k = 0; k < n; k++)
					MUST(block[k] == byte_at(7, at + (uint64_t)k));
				at += (uint64_t)n;
				if (at % 3 == 0)
					usleep(100);
			}
			MUST(recv(c, to, 1, 0) == 0);
			_exit(getenv("UPGRADED") && inode(c) == before ? 3 : 0);
		}
		MUST((a = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
		pid_t server = fork();
		MUST(server >= 0);
		if (server == 0) {
			close(l);
			MUST(recv(a, to, 5, MSG_WAITALL) == 5);
			/* As long as it takes to become a stream, and then some. */
			for (uint64_t at = 0; at < 400000; at += 1000) {
				unsigned char block[1000];

				for (int k = 0; k < 1000; k++)
					block[k] = byte_at(7, at + (uint64_t)k);
				MUST(send(a, block, sizeof block, 0) == sizeof block);
				usleep(500);
			}
			exit(0);
		}
		MUST(close(a) == 0);
		MUST(waitpid(server, &status, 0) == server);
		check(status == 0, "a child that serves", "%#x", status);
		MUST(waitpid(child, &status, 0) == child);
		check(status == 0, "its client", "%#x", status);
	}
	MUST(close(l) == 0);
}

/* One direction is the parent's, the other the child's: no process can have the stream. */
static void shared_by_two(void)
{
	int l = listener(), c, a, status, used[2];
	char block[1000], to[1000];
	pid_t child;

	MUST(pipe(used) == 0);
	for (int i = 0; i < 10; i++) {
		c = client();
		MUST((a = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
		memset(block, 'a' + i, sizeof block);
		MUST((child = fork()) >= 0);
		if (child == 0) {
			/* It sends what the parent reads at the other end. */
			MUST(recv(c, to, 1, MSG_DONTWAIT) == -1 && write(used[1], "", 1) == 1);
			for (int k = 0; k < 200; k++) {
				MUST(send(c, block, sizeof block, 0) == sizeof block);
				usleep(50);
			}
			_exit(0);
		}
		/* Both have used their end before the other end says anything. */
		MUST(read(used[0], to, 1) == 1 && recv(c, to, 1, MSG_DONTWAIT) == -1);
		for (int k = 0; k < 200; k++) {
			MUST(send(a, "answer", 6, 0) == 6);
			MUST(recv(c, to, 6, MSG_WAITALL) == 6 && memcmp(to, "answer", 6) == 0);
			MUST(recv(a, to, sizeof to, MSG_WAITALL) == sizeof to && memcmp(to, block, sizeof to) == 0);
		}
		MUST(waitpid(child, &status, 0) == child);
		check(status == 0, "a connection of two processes stays whole", "%#x", status);
		MUST(close(a) == 0 && close(c) == 0);
	}
	MUST(close(l) == 0);
}

/* Starts a program with the connection as its standard output, and waits for its end. */
static void start_with(int a, int way, char *const argv[])
{
	posix_spawn_file_actions_t actions;
	int status, saved;
	pid_t child;
	FILE *f;

	if (way == 2 || way == 3) {
		MUST(posix_spawn_file_actions_init(&actions) == 0);
		MUST(posix_spawn_file_actions_adddup2(&actions, a, STDOUT_FILENO) == 0);
		MUST((way == 2 ? posix_spawn : posix_spawnp)(&child, argv[0], &actions, NULL, argv, environ) == 0);
	} else if (way == 4 || way == 5) {
		/* The program's own standard output is the connection. */
		fflush(stdout);
		MUST((saved = dup(STDOUT_FILENO)) >= 0 && dup2(a, STDOUT_FILENO) == STDOUT_FILENO);
		if (way == 4) {
			MUST(system(argv[2]) == 0);
		} else {
			MUST((f = popen(argv[2], "w")) != NULL && pclose(f) == 0);
		}
		MUST(dup2(saved, STDOUT_FILENO) == STDOUT_FILENO && close(saved) == 0);
		return;
	} else {
		MUST((child = way ? vfork() : fork()) >= 0);
		if (child == 0) {
			if (dup2(a, STDOUT_FILENO) == STDOUT_FILENO)
				execv(argv[0], argv);
			_exit(9);
		}
	}
	MUST(waitpid(child, &status, 0) == child && status == 0);
}

/* A server that hands the connection to another program while it still has it itself; it has read a request before, or
 * looks whether there is one. */
static void handed_on(void)
{
	static const char *names[] = { "fork and exec", "vfork and exec", "posix_spawn", "posix_spawnp", "system", "popen" };
	char *const argv[] = { "/bin/sh", "-c", "sleep 0.05; echo first; sleep 0.05; echo second", NULL };
	int a, status;
	char to[64];
	pid_t server, program;

	for (int i = 0; i < 24; i++) {
		bool early = i / 6 % 2;

		MUST((server = fork()) >= 0);
		if (server == 0) {
			/* Of its own: a process that has a device is another matter. */
			int l = listener();

			MUST((program = fork()) >= 0);
			if (program == 0) {
				int c = client();

				MUST(send(c, "do it", 5, 0) == 5);
				ssize_t n = recv(c, to, sizeof to, MSG_WAITALL);
				_exit(n == 13 && memcmp(to, "first\nsecond\n", 13) == 0 ? 0 : 1);
			}
			/* No SOCK_CLOEXEC: a program that is started has it. */
			MUST((a = accept(l, NULL, NULL)) >= 0);
			MUST(early || recv(a, to, 5, MSG_WAITALL) == 5);
			start_with(a, i % 6, argv);
			MUST(!early || recv(a, to, 5, MSG_WAITALL) == 5);
			MUST(close(a) == 0);
			MUST(waitpid(program, &status, 0) == program);
			_exit(WEXITSTATUS(status));
		}
		MUST(waitpid(server, &status, 0) == server);
		if (status)
			check(false, names[i % 6], "%#x, %s", status, early ? "not read before" : "in use");
	}
	check(failures == 0, "a connection that is handed on while it is asked about", "%d times", failures);
}

#define BODY 300000
#define ANSWER (1 << 20)

/* What the client of a server that shares its stream does. 0: all as it must be. */
static int client_of_carried(int way)
{
	static char block[ANSWER + 100];
	struct timeval limit = { .tv_sec = 20 };
	size_t want = way == 2 || way == 3 ? 7 : way == 4 ? 0 : way == 5 ? 6 + 7 + 4 : ANSWER;
	int c = client();
	ssize_t n;

	MUST(setsockopt(c, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
	MUST(send(c, "r", 1, 0) == 1 && recv(c, block, 6, MSG_WAITALL) == 6 && send(c, "r", 1, 0) == 1);
	if (way == 2 || way == 3) {
		memset(block, 'b', BODY);
		MUST(send(c, block, BODY, 0) == BODY);
		MUST(way == 3 || shutdown(c, SHUT_WR) == 0);
	}
	memset(block, 0, sizeof block);
	n = recv(c, block, want + 1, MSG_WAITALL);
	if (way == 6)		/* The server is killed: any end. */
		return n >= 0 || errno == ECONNRESET ? 0 : 1;
	if (n != (ssize_t)want)
		return printf("way %d: %zd bytes, errno %d\n", way, n, errno), 2;
	if (want == 7)
		return memcmp(block, "300000\n", 7) ? 3 : 0;
	if (want == 17)
		return memcmp(block, "first answer\nlast", 17) ? printf("%s\n", block), 4 : 0;
	for (size_t i = 0; i < want; i++)
		if (block[i] != 'x')
			return 5;
	return 0;
}

/* A child without exec. */
static void serve_as_child(int a, int way)
{
	static char block[ANSWER];
	size_t got = 0;
	ssize_t n;

	memset(block, 'x', sizeof block);
	if (way == 2 || way == 3) {
		while (got < BODY && (n = recv(a, block, sizeof block, 0)) > 0)
			got += (size_t)n;
		MUST(dprintf(a, "%zu\n", got) == 7);
	} else if (way == 5) {
		MUST(send(a, "answer\n", 7, 0) == 7);
	} else if (way != 4) {
		MUST(send(a, block, sizeof block, MSG_NOSIGNAL) == sizeof block || way == 6);
	}
	_exit(0);
}

static pid_t start_on(int a, int how, int way)
{
	static char *const says[] = {
		"head -c 1048576 /dev/zero | tr '\\0' x", "head -c 1048576 /dev/zero | tr '\\0' x", "wc -c", "head -c 300000 | wc -c",
		"sleep 0.1", "echo answer", "sleep 0.2; yes | head -c 1000000",
	};
	char *const argv[] = { "/bin/sh", "-c", says[way], NULL };
	posix_spawn_file_actions_t actions;
	pid_t child;

	if (how == 1) {
		MUST(posix_spawn_file_actions_init(&actions) == 0);
		MUST(posix_spawn_file_actions_adddup2(&actions, a, STDIN_FILENO) == 0);
		MUST(posix_spawn_file_actions_adddup2(&actions, a, STDOUT_FILENO) == 0);
		MUST(posix_spawn(&child, argv[0], &actions, NULL, argv, environ) == 0);
		return child;
	}
	MUST((child = how == 2 ? vfork() : fork()) >= 0);
	if (child == 0) {
		if (how == 3)
			serve_as_child(a, way);
		if (dup2(a, STDIN_FILENO) == STDIN_FILENO && dup2(a, STDOUT_FILENO) == STDOUT_FILENO)
			execv(argv[0], argv);
		_exit(9);
	}
	return child;
}

/* A connection that is a stream already, and then also a child's. */
static void shared_with_a_child(void)
{
	static const char *names[] = { "a child's bytes, its parent closes behind it", "its parent closes before",
				       "a child reads up to the end", "a child reads and answers", "no bytes of a child",
				       "bytes of the parent before and after", "the parent is killed" };
	static const char *kinds[] = { "fork and exec", "posix_spawn", "vfork and exec", "fork" };

	for (int i = 0; i < 28; i++) {
		int how = i % 4, way = i / 4, a, status, ended;
		pid_t server, program, child;
		char byte;

		MUST((program = fork()) >= 0);
		if (program == 0) {
			int l = listener();
			ino_t before;

			MUST((server = fork()) >= 0);
			if (server) {
				int result = client_of_carried(way);

				MUST(waitpid(server, &status, 0) == server);
				_exit(result ? result : way != 6 && status ? 9 : 0);
			}
			MUST((a = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
			before = inode(a);
			MUST(recv(a, &byte, 1, 0) == 1 && becomes(a, before, LIMIT_MS));
			MUST(send(a, "first ", 6, 0) == 6 && recv(a, &byte, 1, 0) == 1);
			if (way == 5)
				MUST(send(a, "first ", 6, 0) == 6);
			child = start_on(a, how, way);
			if (way == 1 || way == 2)
				MUST(close(a) == 0);
			if (way == 6) {
				usleep(50000);
				kill(getpid(), SIGKILL);
			}
			MUST(waitpid(child, &ended, 0) == child && ended == 0);
			if (way == 5)
				MUST(send(a, "last", 4, 0) == 4);
			if (way != 1 && way != 2)
				MUST(close(a) == 0);
			exit(0);
		}
		MUST(waitpid(program, &status, 0) == program);
		check(status == 0, names[way], "%s: %#x", kinds[how], status);
	}
}

static int client_of_who_blocks(void)
{
	static char block[BODY];
	int c = client();
	char to[16];

	MUST(send(c, "r", 1, 0) == 1 && recv(c, to, 1, 0) == 1);
	for (int i = 0; i < 3; i++) {
		usleep(150000);
		MUST(send(c, block, sizeof block, 0) == sizeof block);
	}
	MUST(shutdown(c, SHUT_WR) == 0);
	return recv(c, to, 8, MSG_WAITALL) == 7 && !memcmp(to, "900000\n", 7) ? 0 : 1;
}

/* A server that waits in its calls alone, and in no poll: a child that it forks reads what comes late, and answers. */
static void forked_by_one_that_blocks(void)
{
	static char block[BODY];

	for (int way = 0; way < 4; way++) {
		pid_t server, program, child;
		int status;

		MUST((program = fork()) >= 0);
		if (program == 0) {
			int l = listener(), a, got = 0;
			ssize_t n;
			ino_t before;

			MUST((server = fork()) >= 0);
			if (server) {
				int result = client_of_who_blocks();

				MUST(waitpid(server, &status, 0) == server);
				_exit(result ? result : status ? 9 : 0);
			}
			MUST((a = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
			before = inode(a);
			MUST(recv(a, block, 1, 0) == 1);
			for (uint64_t end = now_ms() + LIMIT_MS; inode(a) == before; usleep(500))
				MUST(now_ms() < end);
			MUST(send(a, "s", 1, 0) == 1);
			/* Markers are on their way, or it is a stream. */
			if (way & 1)
				usleep(100000);
			MUST((child = fork()) >= 0);
			if (child == 0) {
				while ((n = recv(a, block, sizeof block, 0)) > 0)
					got += (int)n;
				_exit(dprintf(a, "%d\n", got) == 7 ? 0 : 1);
			}
			if (way & 2)
				MUST(close(a) == 0);
			MUST(waitpid(child, &status, 0) == child && status == 0);
			exit(0);
		}
		MUST(waitpid(program, &status, 0) == program);
		check(status == 0, "a child of a server that only blocks reads all, and answers", "way %d: %#x", way, status);
	}
}

#define ASKED 150

/* A parent closes its descriptor at the very moment in which a forked child first uses it: the connection is the child's,
 * and is not ended under it. */
static void closed_while_a_child_asks(void)
{
	static char block[BODY];
	int l = listener(), a, status, bad = 0, upgraded = 0;
	struct timeval limit = { .tv_sec = LIMIT_MS / 1000 };
	pid_t program, child;
	char to[16];
	ino_t before;

	MUST((program = fork()) >= 0);
	if (program == 0) {
		for (int i = 0; i < ASKED; i++) {
			int c = client();

			MUST(setsockopt(c, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
			MUST(send(c, "r", 1, 0) == 1 && recv(c, to, 1, 0) == 1);
			MUST(send(c, block, sizeof block, 0) == sizeof block && shutdown(c, SHUT_WR) == 0);
			bad += recv(c, to, 8, MSG_WAITALL) != 7 || memcmp(to, "300000\n", 7);
			MUST(close(c) == 0);
		}
		_exit(bad > 99 ? 99 : bad);
	}
	for (int i = 0; i < ASKED; i++) {
		MUST((a = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
		before = inode(a);
		MUST(recv(a, to, 1, 0) == 1);
		upgraded += becomes(a, before, LIMIT_MS);
		MUST(send(a, "s", 1, 0) == 1 && (child = fork()) >= 0);
		if (child == 0) {
			int got = 0;
			ssize_t n;

			while ((n = recv(a, block, sizeof block, 0)) > 0)
				got += (int)n;
			_exit(dprintf(a, "%d\n", got) == 7 ? 0 : 1);
		}
		usleep((unsigned)(i * 37 % 1000));
		MUST(close(a) == 0 && waitpid(child, &status, 0) == child);
	}
	MUST(waitpid(program, &status, 0) == program && WIFEXITED(status));
	check(WEXITSTATUS(status) == 0, "a connection whose parent closes it as its child asks for it", "%d of %d not whole",
	      WEXITSTATUS(status), ASKED);
	check(upgraded > ASKED / 2, "connections became streams", "%d of %d", upgraded, ASKED);
	MUST(close(l) == 0);
}

/* Programs that end at once: what was sent arrives, and then the end. */
static void brief(void)
{
	int l = listener(), a, status, bad = 0;
	char block[3000], to[3001];
	pid_t child;

	memset(block, 'b', sizeof block);
	for (int i = 0; i < 60; i++) {
		MUST((child = fork()) >= 0);
		if (child == 0) {
			int c = client();

			MUST(send(c, block, sizeof block, 0) == sizeof block);
			if (i % 3)
				usleep((unsigned)(i * 700));
			if (i % 2)
				MUST(close(c) == 0);
			exit(0);
		}
		MUST((a = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
		if (i % 5 == 4)
			usleep(20000);
		ssize_t n = recv(a, to, sizeof to, MSG_WAITALL);
		if (n != sizeof block) {
			printf("%d: %zd, errno %d\n", i, n, errno);
			bad++;
		}
		MUST(close(a) == 0);
		MUST(waitpid(child, &status, 0) == child && status == 0);
	}
	check(bad == 0, "what a process sends before it ends arrives, and its end", "%d times not", bad);
	MUST(close(l) == 0);
}

/* Ways in which a process ends without exit. */
static void leave_by_handler(int signal)
{
	(void)signal;
	_exit(0);
}

static void *leave_by_thread(void *arg)
{
	(void)arg;
	_exit(0);
}

static void leave(int way)
{
	pthread_t thread;

	switch (way) {
	case 0:
		_exit(0);
	case 1:
		_Exit(0);
	case 2:
		quick_exit(0);
	case 3:
		signal(SIGUSR1, leave_by_handler);
		raise(SIGUSR1);
		break;
	case 5:
		exit(0);
	case 4:
		MUST(pthread_create(&thread, NULL, leave_by_thread, NULL) == 0);
		pause();
		break;
	}
}

/* A client that sends all that there is room for and ends so, and its server. */
static void serve_one_that_leaves(int i, const char *name)
{
	static char block[3000000], to[sizeof block];
	int l = listener(), a, c, status, took[2];
	ssize_t sent = 0, got, n;
	pid_t child;
	ino_t before;
	bool upgraded = false;

	memset(block, 'b', sizeof block);
	MUST(pipe(took) == 0 && (child = fork()) >= 0);
	if (child == 0) {
		c = client();
		before = inode(c);
		MUST(send(c, block, 1, 0) == 1);
		if (i / 6 % 2)
			upgraded = becomes(c, before, getenv("UPGRADED") ? 2000 : 50);
		else
			usleep((unsigned)(i % 9 * 300));
		MUST((sent = send(c, block, sizeof block, MSG_DONTWAIT)) >= 0 || errno == EAGAIN);
		sent = sent < 0 ? 1 : sent + 1;
		MUST(write(took[1], &sent, sizeof sent) == sizeof sent && write(took[1], &upgraded, 1) == 1);
		leave(i % 6);
		abort();
	}
	MUST((a = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
	MUST(recv(a, to, 1, 0) == 1);
	/* The client is gone by then. */
	if (i / 12 % 2)
		usleep(50000);
	for (got = 1; (n = recv(a, to, sizeof to, 0)) > 0; got += n)
		;
	MUST(read(took[0], &sent, sizeof sent) == sizeof sent && read(took[0], &upgraded, 1) == 1);
	bool whole = got == sent && n == 0;

	if (!whole)
		check(false, name, "%zd of %zd bytes, then %zd, errno %d, %d, %d", got, sent, n, errno, i, upgraded);
	MUST(waitpid(child, &status, 0) == child && status == 0);
	_exit(whole ? upgraded : 2);
}

/* Processes that end without exit, before their connection is a stream and after that: what send has taken reaches the
 * peer, and then the end, as of TCP. */
static void without_exit(void)
{
	static const char *names[] = { "_exit", "_Exit", "quick_exit", "_exit in a handler", "_exit in another thread",
				       "exit" };
	int status, upgraded = 0;
	pid_t server;

	for (int i = 0; i < 48; i++) {
		/* Of its own: a process that has a device gives its children none. */
		MUST((server = fork()) >= 0);
		if (server == 0)
			serve_one_that_leaves(i, names[i % 6]);
		MUST(waitpid(server, &status, 0) == server && WIFEXITED(status));
		failures += WEXITSTATUS(status) > 1;
		upgraded += WEXITSTATUS(status) == 1;
	}
	check(failures == 0, "what a process sends before it ends without exit arrives", "%d times not", failures);
	check(!getenv("UPGRADED") || upgraded > 5, "connections became streams", "%d", upgraded);
}

/* Children that end by _exit, of a process that has a stream, end at once and leave the stream alone. */
static void children_without_exit(void)
{
	int l = listener(), c, a, status;
	char byte;
	ino_t before;
	pid_t child;
	uint64_t began;

	c = client();
	before = inode(c);
	MUST((a = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
	MUST(send(a, "x", 1, 0) == 1 && recv(c, &byte, 1, 0) == 1);
	MUST(becomes(c, before, LIMIT_MS));
	began = now_ms();
	for (int i = 0; i < 30; i++) {
		MUST((child = i % 3 ? fork() : vfork()) >= 0);
		if (child == 0)
			_exit(7);
		MUST(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 7);
		MUST(send(a, "y", 1, 0) == 1 && recv(c, &byte, 1, 0) == 1 && byte == 'y');
		MUST(send(c, "z", 1, 0) == 1 && recv(a, &byte, 1, 0) == 1 && byte == 'z');
	}
	printf("30 children in %lu ms\n", (unsigned long)(now_ms() - began));
	check(true, "children that end by _exit leave their parent's stream alone", "?");
	MUST(close(a) == 0 && close(c) == 0 && close(l) == 0);
}

static int ended;
static _Atomic bool leaves;

/* Waits until the first thread has begun to end the process, and sleeps in that. By time alone, it may not even have begun
 * on a busy machine. */
static void await_its_end(void)
{
	char path[64], stat[256], *state;

	while (!leaves)
		usleep(1000);
	snprintf(path, sizeof path, "/proc/self/task/%d/stat", (int)getpid());
	for (int i = 0; i < LIMIT_MS; i++, usleep(1000)) {
		FILE *file = fopen(path, "r");

		MUST(file && fgets(stat, sizeof stat, file) && fclose(file) == 0);
		state = strrchr(stat, ')');
		if (state && state[2] == 'S')
			return;
	}
}

/* Calls again and again on a connection until one says that it has ended, or failed. Then the thread ends the process. */
static void *until_it_ends(void *arg)
{
	static char block[100000];
	struct pollfd p = { .fd = ended };
	int way = *(int *)arg, set;
	struct epoll_event e = { .events = EPOLLIN | EPOLLRDHUP };
	fd_set readable;

	switch (way) {
	case 0:
		while (recv(ended, block, 1, 0) > 0)
			;
		break;
	case 1:
		while (send(ended, block, sizeof block, MSG_NOSIGNAL) >= 0)
			;
		break;
	case 2:
		p.events = POLLIN | POLLRDHUP;
		poll(&p, 1, -1);
		break;
	case 3:
		FD_ZERO(&readable);
		FD_SET(ended, &readable);
		select(ended + 1, &readable, NULL, NULL, NULL);
		break;
	case 4:
		MUST((set = epoll_create1(EPOLL_CLOEXEC)) >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, ended, &e) == 0);
		while (epoll_wait(set, &e, 1, -1) == 0)
			;
		break;
	case 5:
		await_its_end();
		_exit(6);
	case 6:
		await_its_end();
		exit(6);
	case 7:
		while (ioctl(ended, FIONREAD, &way) == 0 && recv(ended, block, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN)
			;
		break;
	}
	_exit(6);
}

/* Ends the process in a handler, whatever its thread is doing. */
static void end_here(int signal)
{
	_exit(signal == SIGALRM ? 5 : 6);
}

/* Sends and receives until the process ends. */
static void use_until_it_ends(unsigned after)
{
	const struct itimerval soon = { .it_value = { .tv_usec = after } };
	static char block[20000];

	MUST(signal(SIGALRM, end_here) != SIG_ERR && setitimer(ITIMER_REAL, &soon, NULL) == 0);
	for (;;) {
		send(ended, block, sizeof block, MSG_DONTWAIT | MSG_NOSIGNAL);
		recv(ended, block, sizeof block, MSG_DONTWAIT);
	}
}

/* A process that ends by `_exit` in one thread, while another one uses its connection in this way. */
static int end_beside(int way)
{
	int l = listener(), a, status, took[2];
	ino_t before;
	pid_t child;
	pthread_t thread;
	char byte;

	MUST(pipe(took) == 0 && (child = fork()) >= 0);
	if (child == 0) {
		ended = client();
		before = inode(ended);
		MUST(send(ended, "x", 1, 0) == 1 && becomes(ended, before, LIMIT_MS));
		MUST(recv(ended, &byte, 1, 0) == 1);
		if (way >= 8)
			use_until_it_ends((unsigned)(way - 7) * 3700);
		MUST(pthread_create(&thread, NULL, until_it_ends, &way) == 0);
		usleep(20000);
		/* The peer takes nothing any more, so it is not over at once. */
		if (way == 5 || way == 6)
			MUST(kill(getppid(), SIGSTOP) == 0);
		leaves = true;
		_exit(5);
	}
	MUST((a = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
	MUST(recv(a, &byte, 1, 0) == 1 && send(a, "y", 1, 0) == 1);
	MUST(waitpid(child, &status, 0) == child && close(a) == 0 && close(l) == 0);
	return status;
}

/* `_exit` ends all threads: none sees its connection end first, and the first status counts. */
static void exit_beside_threads(void)
{
	static const char *names[] = { "recv", "send", "poll", "select", "epoll_wait", "a second _exit", "exit", "ioctl" };
	int status;
	pid_t server;

	for (int way = 0; way < 20; way++) {
		/* Of its own: a process that has a device gives its children none. */
		MUST((server = fork()) >= 0);
		if (server == 0) {
			alarm(30);
			status = end_beside(way);
			_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 99);
		}
		MUST(waitpid(server, &status, WUNTRACED) == server);
		if (WIFSTOPPED(status)) {
			usleep(1200000);
			MUST(kill(server, SIGCONT) == 0 && waitpid(server, &status, 0) == server);
		}
		check(WIFEXITED(status) && WEXITSTATUS(status) == 5, "_exit ends a process with its status", "%#x beside %s",
		      status, way < 8 ? names[way] : "a handler");
	}
}

static const struct group groups[] = {
	{ "forked", forked },
	{ "shared_by_two", shared_by_two },
	{ "handed_on", handed_on },
	{ "shared_with_a_child", shared_with_a_child },
	{ "forked_by_one_that_blocks", forked_by_one_that_blocks },
	{ "closed_while_a_child_asks", closed_while_a_child_asks },
	{ "brief", brief },
	{ "without_exit", without_exit },
	{ "children_without_exit", children_without_exit },
	{ "exit_beside_threads", exit_beside_threads },
};

int main(int argc, char **argv)
{
	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
