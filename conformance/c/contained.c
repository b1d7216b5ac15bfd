/* Runs a program as in a container.
 *
 *     contained [-p] [-s SIZE|none] [-u UID | -n | -N] [-f docker|looks|attach] [-i] PROGRAM ARGUMENTS...
 *
 * -p  in a PID namespace of its own, with a /proc of its own
 * -s  with a /dev of its own, and a /dev/shm of this size in it, or none
 * -u  as this user
 * -n  in a user namespace that knows root alone
 * -N  in one that knows nobody
 * -f  below the system calls and rights of a container (contained.h): Docker's by default; all calls, but none that
 *     looks into another process; all calls, but none that attaches to one, as if Yama's scope were 1
 * -i  below a first program, which has the filter, too
 *
 * A process always waits here for the program; what it says at its end is its exit status. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include "contained.h"

#define MUST(call) do { if (!(call)) { fprintf(stderr, "contained: %s: %m\n", #call); _exit(99); } } while (0)
#define COUNT(array) (sizeof(array) / sizeof *(array))
#define LOAD(field) op(BPF_LD | BPF_W | BPF_ABS, (uint32_t)offsetof(struct seccomp_data, field))
#define REFUSE(why) op(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (why))
#define ALLOW() op(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

static struct sock_filter code[2048];
static unsigned short length;

static void op(uint16_t what, uint32_t value)
{
	MUST(length < COUNT(code));
	code[length++] = (struct sock_filter)BPF_STMT(what, value);
}

/* Skips as many as `skip` unless the loaded word is this one (or has one of these bits). */
static void unless(uint16_t test, uint32_t value, uint8_t skip)
{
	MUST(length < COUNT(code));
	code[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | test | BPF_K, value, 0, skip);
}

static void docker(void)
{
	static const uint32_t personalities[] = { 0, 8, 0x20000, 0x20008, 0xffffffff };

	for (size_t i = 0; i < COUNT(allowed); i++) {
		unless(BPF_JEQ, (uint32_t)allowed[i], 1);
		ALLOW();
	}
	unless(BPF_JEQ, SYS_clone3, 1);
	REFUSE(ENOSYS);
	unless(BPF_JEQ, SYS_clone, 4);
	LOAD(args[0]);
	unless(BPF_JSET, NAMESPACES, 1);
	REFUSE(EPERM);
	ALLOW();
	unless(BPF_JEQ, SYS_socket, 4);
	LOAD(args[0]);
	unless(BPF_JEQ, AF_VSOCK, 1);
	REFUSE(EPERM);
	ALLOW();
	unless(BPF_JEQ, SYS_personality, 2 * COUNT(personalities) + 1);
	LOAD(args[0]);
	for (size_t i = 0; i < COUNT(personalities); i++) {
		unless(BPF_JEQ, personalities[i], 1);
		ALLOW();
	}
	REFUSE(EPERM);
}

static void without_looks(void)
{
	for (size_t i = 0; i < COUNT(looks); i++) {
		unless(BPF_JEQ, (uint32_t)looks[i], 1);
		REFUSE(EPERM);
	}
	ALLOW();
}

/* Yama's scope of 1 leaves what a process lets its parents do, and what does not attach. */
static void without_attaching(void)
{
	static const int always[] = { SYS_process_vm_readv, SYS_process_vm_writev, SYS_pidfd_getfd };
	static const uint32_t requests[] = { PTRACE_ATTACH, PTRACE_SEIZE };

	for (size_t i = 0; i < COUNT(always); i++) {
		unless(BPF_JEQ, (uint32_t)always[i], 1);
		REFUSE(EPERM);
	}
	unless(BPF_JEQ, SYS_ptrace, 2 * COUNT(requests) + 1);
	LOAD(args[0]);
	for (size_t i = 0; i < COUNT(requests); i++) {
		unless(BPF_JEQ, requests[i], 1);
		REFUSE(EPERM);
	}
	ALLOW();
}

static void filter(const char *kind)
{
	struct sock_fprog program;

#ifdef __x86_64__
	LOAD(arch);
	unless(BPF_JEQ, AUDIT_ARCH_X86_64, 1);
	op(BPF_JMP | BPF_JA, 1);
	REFUSE(EPERM);
#endif
	LOAD(nr);
	if (!strcmp(kind, "docker"))
		docker();
	else if (!strcmp(kind, "looks"))
		without_looks();
	else
		without_attaching();
	program = (struct sock_fprog){ length, code };
	MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
	MUST(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

/* No more rights than these, also after an exec. */
static void keep(uint64_t rights)
{
	struct __user_cap_header_struct header = { _LINUX_CAPABILITY_VERSION_3, 0 };
	struct __user_cap_data_struct own[2];

	for (int i = 0; i <= CAP_LAST_CAP; i++) {
		if (!(rights >> i & 1) && prctl(PR_CAPBSET_READ, i, 0, 0, 0) > 0 && geteuid() == 0)
			MUST(prctl(PR_CAPBSET_DROP, i, 0, 0, 0) == 0);
	}
	MUST(syscall(SYS_capget, &header, own) == 0);
	for (int i = 0; i < 2; i++) {
		own[i].permitted &= (uint32_t)(rights >> 32 * i);
		own[i].effective &= (uint32_t)(rights >> 32 * i);
		own[i].inheritable = 0;
	}
	MUST(syscall(SYS_capset, &header, own) == 0);
}

/* As a container has it; only the device nodes that every program expects. */
static void own_dev(const char *shm)
{
	static const struct {
		const char *name;
		unsigned int minor;
	} nodes[] = { { "/dev/null", 3 }, { "/dev/zero", 5 }, { "/dev/full", 7 }, { "/dev/random", 8 },
		      { "/dev/urandom", 9 } };
	char options[64];

	MUST(mount("none", "/dev", "tmpfs", MS_NOSUID, "mode=755") == 0);
	for (size_t i = 0; i < COUNT(nodes); i++) {
		MUST(mknod(nodes[i].name, S_IFCHR, makedev(1, nodes[i].minor)) == 0);
		MUST(chmod(nodes[i].name, 0666) == 0);
	}
	if (!strcmp(shm, "none"))
		return;
	snprintf(options, sizeof options, "mode=1777,size=%s", shm);
	MUST(mkdir("/dev/shm", 0777) == 0);
	MUST(mount("none", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options) == 0);
}

static void write_file(const char *name, const char *text)
{
	int fd = open(name, O_WRONLY | O_CLOEXEC);

	MUST(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
	close(fd);
}

/* The child goes on; the parent ends as the child does, of whom it is told whatever happens. */
static void go_on_in_child(void)
{
	int status;
	pid_t pid = fork();

	MUST(pid >= 0);
	if (pid == 0)
		return;
	MUST(waitpid(pid, &status, 0) == pid);
	_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
}

int main(int argc, char **argv)
{
	const char *shm = NULL, *calls = NULL;
	bool pids = false, first = false, knows = false, knows_none = false;
	uid_t user = 0;
	int option;

	while ((option = getopt(argc, argv, "+ps:u:nNf:i")) != -1) {
		switch (option) {
		case 'p': pids = true; break;
		case 's': shm = optarg; break;
		case 'u': user = (uid_t)atoi(optarg); break;
		case 'n': knows = true; break;
		case 'N': knows_none = true; break;
		case 'f': calls = optarg; break;
		case 'i': first = true; break;
		default: _exit(98);
		}
	}
	MUST(optind < argc);
	/* The whole group is told to end: the program does, and then who waits for it. */
	signal(SIGTERM, SIG_IGN);
	if (pids || shm)
		MUST(unshare(CLONE_NEWNS | (pids ? CLONE_NEWPID : 0)) == 0);
	if (pids || shm)
		MUST(mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0);
	if (shm)
		own_dev(shm);
	if (pids) {
		go_on_in_child();
		MUST(mount("none", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) == 0);
	}
	if (knows || knows_none)
		MUST(unshare(CLONE_NEWUSER) == 0);
	if (knows) {
		write_file("/proc/self/setgroups", "deny");
		write_file("/proc/self/uid_map", "0 0 1");
		write_file("/proc/self/gid_map", "0 0 1");
	}
	if (calls)
		keep(!strcmp(calls, "docker") ? docker_rights : ~(1ull << CAP_SYS_PTRACE));
	if (user)
		MUST(setgroups(0, NULL) == 0 && setresgid(user, user, user) == 0 && setresuid(user, user, user) == 0);
	if (calls)
		filter(calls);
	if (first)
		go_on_in_child();
	/* A process whose parent is killed must not stay; a change of users would have undone this. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	signal(SIGTERM, SIG_DFL);
	execvp(argv[optind], argv + optind);
	fprintf(stderr, "contained: %s: %m\n", argv[optind]);
	_exit(98);
}
