/* The system calls of containers. Docker's default profile allows those of `allowed`, and a few more with some
 * arguments; all others fail with EPERM. The table is by what the calls are for, of this architecture, and without
 * those that want a capability which a container does not have. (The profile is of moby; io_uring is not in it any
 * more since version 25.) */
#ifndef CONTAINED_H
#define CONTAINED_H

#include <linux/capability.h>
#include <stdint.h>
#include <sys/syscall.h>

static const int allowed[] = {
	/* files */
	SYS_openat, SYS_openat2, SYS_close, SYS_close_range, SYS_read, SYS_pread64, SYS_readv, SYS_preadv, SYS_preadv2,
	SYS_write, SYS_pwrite64, SYS_writev, SYS_pwritev, SYS_pwritev2, SYS_lseek, SYS_fcntl, SYS_ioctl, SYS_dup, SYS_dup3,
	SYS_fstat, SYS_newfstatat, SYS_statx, SYS_statfs, SYS_fstatfs, SYS_truncate, SYS_ftruncate, SYS_fallocate,
	SYS_fadvise64, SYS_readahead, SYS_flock, SYS_fsync, SYS_fdatasync, SYS_sync, SYS_syncfs, SYS_sync_file_range,
	SYS_sendfile, SYS_copy_file_range, SYS_splice, SYS_tee, SYS_vmsplice, SYS_pipe2, SYS_umask,
	/* names */
	SYS_getcwd, SYS_chdir, SYS_fchdir, SYS_getdents64, SYS_mkdirat, SYS_mknodat, SYS_unlinkat, SYS_renameat2,
	SYS_linkat, SYS_symlinkat, SYS_readlinkat, SYS_faccessat, SYS_faccessat2, SYS_fchmod, SYS_fchmodat, SYS_fchown,
	SYS_fchownat, SYS_utimensat, SYS_name_to_handle_at, SYS_inotify_init1, SYS_inotify_add_watch, SYS_inotify_rm_watch,
	SYS_fanotify_mark,
	SYS_getxattr, SYS_lgetxattr, SYS_fgetxattr, SYS_setxattr, SYS_lsetxattr, SYS_fsetxattr, SYS_listxattr,
	SYS_llistxattr, SYS_flistxattr, SYS_removexattr, SYS_lremovexattr, SYS_fremovexattr,
	/* memory */
	SYS_brk, SYS_mmap, SYS_munmap, SYS_mremap, SYS_mprotect, SYS_madvise, SYS_msync, SYS_mincore, SYS_mlock, SYS_mlock2,
	SYS_mlockall, SYS_munlock, SYS_munlockall, SYS_memfd_create, SYS_remap_file_pages, SYS_pkey_alloc, SYS_pkey_free,
	SYS_pkey_mprotect, SYS_membarrier, SYS_shmget, SYS_shmat, SYS_shmctl, SYS_shmdt, SYS_semget, SYS_semop,
	SYS_semtimedop, SYS_semctl, SYS_msgget, SYS_msgsnd, SYS_msgrcv, SYS_msgctl, SYS_mq_open, SYS_mq_unlink,
	SYS_mq_timedsend, SYS_mq_timedreceive, SYS_mq_notify, SYS_mq_getsetattr,
	/* sockets; `socket` itself is below */
	SYS_socketpair, SYS_bind, SYS_listen, SYS_accept, SYS_accept4, SYS_connect, SYS_shutdown, SYS_getsockname,
	SYS_getpeername, SYS_getsockopt, SYS_setsockopt, SYS_sendto, SYS_sendmsg, SYS_sendmmsg, SYS_recvfrom, SYS_recvmsg,
	SYS_recvmmsg,
	/* waiting */
	SYS_ppoll, SYS_pselect6, SYS_epoll_create1, SYS_epoll_ctl, SYS_epoll_pwait, SYS_eventfd2, SYS_signalfd4,
	SYS_timerfd_create, SYS_timerfd_settime, SYS_timerfd_gettime, SYS_futex, SYS_set_robust_list, SYS_get_robust_list,
	SYS_io_setup, SYS_io_destroy, SYS_io_submit, SYS_io_cancel, SYS_io_getevents, SYS_io_pgetevents,
	/* time */
	SYS_clock_gettime, SYS_clock_getres, SYS_clock_nanosleep, SYS_clock_adjtime, SYS_adjtimex, SYS_nanosleep,
	SYS_gettimeofday, SYS_getitimer, SYS_setitimer, SYS_timer_create, SYS_timer_settime, SYS_timer_gettime,
	SYS_timer_getoverrun, SYS_timer_delete, SYS_times,
	/* processes and threads; `clone` and `personality` are below */
	SYS_execve, SYS_execveat, SYS_exit, SYS_exit_group, SYS_wait4, SYS_waitid, SYS_getpid, SYS_getppid, SYS_gettid,
	SYS_getpgid, SYS_setpgid, SYS_getsid, SYS_setsid, SYS_set_tid_address, SYS_rseq, SYS_prctl, SYS_seccomp,
	SYS_pidfd_open, SYS_pidfd_send_signal, SYS_ptrace, SYS_process_vm_readv, SYS_process_vm_writev, SYS_restart_syscall,
	SYS_kill, SYS_tkill, SYS_tgkill, SYS_rt_sigaction, SYS_rt_sigprocmask, SYS_rt_sigpending, SYS_rt_sigqueueinfo,
	SYS_rt_tgsigqueueinfo, SYS_rt_sigreturn, SYS_rt_sigsuspend, SYS_rt_sigtimedwait, SYS_sigaltstack,
	SYS_sched_yield, SYS_sched_getaffinity, SYS_sched_setaffinity, SYS_sched_getattr, SYS_sched_setattr,
	SYS_sched_getparam, SYS_sched_setparam, SYS_sched_getscheduler, SYS_sched_setscheduler, SYS_sched_get_priority_max,
	SYS_sched_get_priority_min, SYS_sched_rr_get_interval, SYS_getpriority, SYS_setpriority, SYS_ioprio_get,
	SYS_ioprio_set, SYS_getcpu, SYS_getrusage, SYS_getrlimit, SYS_setrlimit, SYS_prlimit64, SYS_sysinfo, SYS_uname,
	SYS_getrandom, SYS_chroot,
	/* users and rights */
	SYS_getuid, SYS_geteuid, SYS_getresuid, SYS_setuid, SYS_setreuid, SYS_setresuid, SYS_setfsuid, SYS_getgid,
	SYS_getegid, SYS_getresgid, SYS_setgid, SYS_setregid, SYS_setresgid, SYS_setfsgid, SYS_getgroups, SYS_setgroups,
	SYS_capget, SYS_capset,
	/* what the headers may not know yet */
#ifdef SYS_epoll_pwait2
	SYS_epoll_pwait2,
#endif
#ifdef SYS_futex_waitv
	SYS_futex_waitv,
#endif
#ifdef SYS_landlock_create_ruleset
	SYS_landlock_create_ruleset, SYS_landlock_add_rule, SYS_landlock_restrict_self,
#endif
#ifdef SYS_memfd_secret
	SYS_memfd_secret,
#endif
#ifdef SYS_process_mrelease
	SYS_process_mrelease,
#endif
#ifdef SYS_cachestat
	SYS_cachestat,
#endif
#ifdef SYS_fchmodat2
	SYS_fchmodat2,
#endif
#ifdef SYS_map_shadow_stack
	SYS_map_shadow_stack,
#endif
#ifdef SYS_futex_wait
	SYS_futex_wait, SYS_futex_wake, SYS_futex_requeue,
#endif
#ifdef __x86_64__
	/* those that other architectures have never had */
	SYS_open, SYS_creat, SYS_access, SYS_stat, SYS_lstat, SYS_dup2, SYS_pipe, SYS_poll, SYS_select, SYS_epoll_create,
	SYS_epoll_wait, SYS_epoll_ctl_old, SYS_epoll_wait_old, SYS_eventfd, SYS_signalfd, SYS_inotify_init, SYS_getdents,
	SYS_mkdir, SYS_mknod, SYS_rmdir, SYS_unlink, SYS_rename, SYS_renameat, SYS_link, SYS_symlink, SYS_readlink,
	SYS_chmod, SYS_chown, SYS_lchown, SYS_utime, SYS_utimes, SYS_futimesat, SYS_fork, SYS_vfork, SYS_getpgrp, SYS_alarm,
	SYS_pause, SYS_time, SYS_arch_prctl, SYS_modify_ldt, SYS_get_thread_area, SYS_set_thread_area,
#endif
};

/* The bits of `clone` that make namespaces. */
#define NAMESPACES 0x7e020000u

/* What a container's root may do. */
static const uint64_t docker_rights =
	1ull << CAP_CHOWN | 1ull << CAP_DAC_OVERRIDE | 1ull << CAP_FSETID | 1ull << CAP_FOWNER | 1ull << CAP_MKNOD |
	1ull << CAP_NET_RAW | 1ull << CAP_SETGID | 1ull << CAP_SETUID | 1ull << CAP_SETFCAP | 1ull << CAP_SETPCAP |
	1ull << CAP_NET_BIND_SERVICE | 1ull << CAP_SYS_CHROOT | 1ull << CAP_KILL | 1ull << CAP_AUDIT_WRITE;

/* All by which a process looks into another one, or takes something from it. */
static const int looks[] = { SYS_ptrace, SYS_process_vm_readv, SYS_process_vm_writev, SYS_pidfd_getfd, SYS_kcmp,
			     SYS_process_madvise };

#endif
