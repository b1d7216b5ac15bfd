/* Runs a program in which one system call fails once: the Nth (from 0) of a kind.
 *
 *     fails KIND N ERRNO PROGRAM ARGUMENTS...
 *
 * A system call filter asks this process about each call of the kind; all others go through. The program's
 * parent has the same filter, as in a container, so it does not count as a sandbox of the program's own. Says
 * at the end, on standard error, whether there was such a call. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define MUST(call) do { if (!(call)) { perror(#call); _exit(99); } } while (0)

static const struct kind {
	const char *name;
	int call;
	int argument;			/* which must be so; -1: none */
	uint64_t mask, value;
} kinds[] = {
	{ "memfd_create", SYS_memfd_create, -1, 0, 0 },
	{ "ftruncate", SYS_ftruncate, -1, 0, 0 },
	{ "mmap", SYS_mmap, 3, MAP_SHARED | MAP_PRIVATE | MAP_ANONYMOUS, MAP_SHARED },
	{ "madvise", SYS_madvise, 2, ~0u, MADV_DONTFORK },
	{ "seals", SYS_fcntl, 1, ~0u, F_ADD_SEALS },
	{ "socket", SYS_socket, 1, 0xf, SOCK_SEQPACKET },
	{ "listen", SYS_listen, 1, ~0u, 1024 },
	{ "eventfd", SYS_eventfd2, -1, 0, 0 },
	{ "dup", SYS_fcntl, 1, ~0u, F_DUPFD_CLOEXEC },
	{ "rights", SYS_sendmsg, -1, 0, 0 },
	{ "epoll_ctl", SYS_epoll_ctl, -1, 0, 0 },
};

static bool is_meant(const struct kind *kind, const struct seccomp_notif *asked)
{
	if (kind->argument >= 0 && (asked->data.args[kind->argument] & kind->mask) != kind->value)
		return false;
	if (kind->call == SYS_sendmsg) {
		struct msghdr message = { 0 };
		struct iovec to = { &message, sizeof message };
		struct iovec from = { (void *)(uintptr_t)asked->data.args[1], sizeof message };

		return process_vm_readv((pid_t)asked->pid, &to, 1, &from, 1, 0) == sizeof message &&
		       message.msg_controllen > 0;
	}
	return true;
}

/* The program's parent: has the filter, and does nothing else. */
static void parent(const struct kind *kind, int tell, int go, char **argv)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)kind->call, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog filter = { sizeof code / sizeof *code, code };
	int listener, status;
	char byte;
	pid_t pid;

	MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
	listener = (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &filter);
	MUST(listener >= 0);
	MUST(write(tell, &listener, sizeof listener) == sizeof listener);
	MUST(read(go, &byte, 1) == 1);
	close(listener);
	close(tell);
	close(go);
	pid = fork();
	if (pid == 0) {
		signal(SIGTERM, SIG_DFL);
		execvp(argv[0], argv);
		_exit(98);
	}
	MUST(pid > 0 && waitpid(pid, &status, 0) == pid);
	_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
}

int main(int argc, char **argv)
{
	const struct kind *kind = kinds;
	int tell[2], go[2], listener, theirs, status, with, seen = 0, nth;
	struct seccomp_notif asked;
	struct seccomp_notif_resp answer;
	pid_t pid;

	MUST(argc >= 5);
	while (strcmp(kind->name, argv[1]))
		MUST(++kind < kinds + sizeof kinds / sizeof *kinds);
	nth = atoi(argv[2]);
	with = atoi(argv[3]);
	MUST(pipe2(tell, O_CLOEXEC) == 0 && pipe2(go, O_CLOEXEC) == 0);
	signal(SIGTERM, SIG_IGN);
	pid = fork();
	if (pid == 0)
		parent(kind, tell[1], go[0], argv + 4);
	MUST(pid > 0);
	close(tell[1]);
	MUST(read(tell[0], &theirs, sizeof theirs) == sizeof theirs);
	listener = (int)syscall(SYS_pidfd_getfd, (int)syscall(SYS_pidfd_open, pid, 0), theirs, 0);
	MUST(listener >= 0);
	MUST(write(go[1], "", 1) == 1);
	while (waitpid(pid, &status, WNOHANG) == 0) {
		struct pollfd p = { .fd = listener, .events = POLLIN };

		if (poll(&p, 1, 20) <= 0 || !(p.revents & POLLIN))
			continue;
		memset(&asked, 0, sizeof asked);
		if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &asked))
			continue;
		memset(&answer, 0, sizeof answer);
		answer.id = asked.id;
		if (is_meant(kind, &asked) && seen++ == nth) {
			answer.error = -with;
			fprintf(stderr, "fails: %s %d has failed\n", kind->name, nth);
		} else {
			answer.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
		}
		ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &answer);
	}
	fprintf(stderr, "fails: there were %d\n", seen);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
