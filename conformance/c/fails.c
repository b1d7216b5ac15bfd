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
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

/* Length of the address of a Unix socket by which a process is asked for memory. */
#define NAME 46

#define MUST(call) do { if (!(call)) { perror(#call); _exit(99); } } while (0)

/* What must be so beside: descriptors in a message, what an epoll instance is to report, the kind of socket. */
enum also { ANY, RIGHTS, INPUT, SEQPACKET };

static const struct kind {
	const char *name;
	int call;
	int argument;			/* which must be so; -1: none */
	uint64_t mask, value;
	enum also also;
	bool later;			/* only behind the first socket of the set-up: others make such calls before */
} kinds[] = {
	{ "memfd_create", SYS_memfd_create, -1, 0, 0, ANY, false },
	{ "ftruncate", SYS_ftruncate, -1, 0, 0, ANY, false },
	{ "mmap", SYS_mmap, 3, MAP_SHARED | MAP_PRIVATE | MAP_ANONYMOUS, MAP_SHARED, ANY, false },
	{ "madvise", SYS_madvise, 2, ~0u, MADV_DONTFORK, ANY, false },
	{ "seals", SYS_fcntl, 1, ~0u, F_ADD_SEALS, ANY, false },
	{ "seen seals", SYS_fcntl, 1, ~0u, F_GET_SEALS, ANY, false },
	{ "socket", SYS_socket, 1, 0xf, SOCK_SEQPACKET, ANY, false },
	{ "bind", SYS_bind, 2, ~0u, NAME, ANY, false },
	{ "listen", SYS_listen, 1, ~0u, 1024, ANY, false },
	{ "connect", SYS_connect, 2, ~0u, NAME, ANY, false },
	{ "accept", SYS_accept4, 1, UINT64_MAX, 0, ANY, true },
	{ "peer", SYS_getsockopt, 2, ~0u, SO_PEERCRED, SEQPACKET, true },
	{ "eventfd", SYS_eventfd2, 1, ~0u, EFD_CLOEXEC | EFD_NONBLOCK, ANY, true },
	{ "dup", SYS_fcntl, 1, ~0u, F_DUPFD_CLOEXEC, ANY, false },
	{ "sendmsg", SYS_sendmsg, -1, 0, 0, RIGHTS, true },
	{ "recvmsg", SYS_recvmsg, -1, 0, 0, RIGHTS, true },
	{ "epoll_ctl", SYS_epoll_ctl, 1, ~0u, EPOLL_CTL_ADD, INPUT, true },
	{ "late port", SYS_setsockopt, 2, ~0u, IP_BIND_ADDRESS_NO_PORT, ANY, false },
};

static bool read_from(uint32_t pid, uint64_t at, void *here, size_t length)
{
	struct iovec to = { here, length }, from = { (void *)(uintptr_t)at, length };

	return process_vm_readv((pid_t)pid, &to, 1, &from, 1, 0) == (ssize_t)length;
}

/* `uwarp stat` may come at any time, by a socket of another kind. */
static bool is_seqpacket(uint32_t pid, uint64_t descriptor)
{
	char name[64], link[64], line[256];
	unsigned long inode, found;
	unsigned int type;
	bool is = false;
	ssize_t length;
	FILE *all;

	snprintf(name, sizeof name, "/proc/%u/fd/%u", pid, (unsigned)descriptor);
	length = readlink(name, link, sizeof link - 1);
	if (length < 0)
		return false;
	link[length] = 0;
	if (sscanf(link, "socket:[%lu]", &inode) != 1)
		return false;
	all = fopen("/proc/net/unix", "re");
	if (!all)
		return false;
	while (!is && fgets(line, sizeof line, all)) {
		if (sscanf(line, "%*s %*s %*s %*s %x %*s %lu", &type, &found) == 2)
			is = found == inode && type == SOCK_SEQPACKET;
	}
	fclose(all);
	return is;
}

static bool is_meant(const struct kind *kind, const struct seccomp_notif *asked)
{
	const uint64_t *args = (const uint64_t *)asked->data.args;
	struct epoll_event event = { 0 };
	struct msghdr message = { 0 };

	if (asked->data.nr != kind->call)
		return false;
	if (kind->argument >= 0 && (args[kind->argument] & kind->mask) != kind->value)
		return false;
	switch (kind->also) {
	case RIGHTS:
		return read_from(asked->pid, args[1], &message, sizeof message) && message.msg_controllen > 0;
	case INPUT:
		return read_from(asked->pid, args[3], &event, sizeof event) &&
		       event.events == (EPOLLIN | EPOLLRDHUP | EPOLLET);
	case SEQPACKET:
		return is_seqpacket(asked->pid, args[0]);
	case ANY:
		break;
	}
	return true;
}

/* The program's parent: has the filter, and does nothing else. */
static void parent(const struct kind *kind, int tell, int go, char **argv)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)kind->call, 1, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 0, 1),
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
	bool begun = false;
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
		if (asked.data.nr == SYS_socket && (asked.data.args[1] & 0xf) == SOCK_SEQPACKET)
			begun = true;
		if (is_meant(kind, &asked) && (begun || !kind->later) && seen++ == nth) {
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
