"""The system calls of a Docker sandbox (S2): an allow-list, as a profile for the engine.

Names are those of the Linux uapi headers. What is not on the list is answered as if the kernel did not have it (ENOSYS), so
that programs take their other way; what is known and refused gets EPERM, as the engine's own profile does. Stricter than that
profile: no AF_VSOCK (a way to the host of a virtual machine, facts/sandboxes.md) and no other odd socket family, no io_uring,
no keyrings, no userfaultfd, bpf or perf; new namespaces, mounts and TIOCSTI are refused whatever the capabilities.
"""

import errno
import json
from typing import Any

_ALLOWED = (
    "accept accept4 access alarm arch_prctl bind brk capget capset chdir chmod chown clock_getres clock_gettime "
    "clock_nanosleep close close_range connect copy_file_range creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl "
    "epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64 "
    "fallocate fanotify_mark fchdir fchmod fchmodat fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fork "
    "fremovexattr fsetxattr fstat fstatfs fsync ftruncate futex futex_waitv futimesat get_robust_list getcpu getcwd "
    "getdents getdents64 getegid geteuid getgid getgroups getitimer getpeername getpgid getpgrp getpid getppid getpriority "
    "getrandom getresgid getresuid getrlimit getrusage getsid getsockname getsockopt gettid gettimeofday getuid getxattr "
    "inotify_add_watch inotify_init inotify_init1 inotify_rm_watch io_cancel io_destroy io_getevents io_pgetevents io_setup "
    "io_submit ioprio_get ioprio_set kill landlock_add_rule landlock_create_ruleset landlock_restrict_self lchown lgetxattr "
    "link linkat listen listxattr llistxattr lremovexattr lseek lsetxattr lstat madvise membarrier memfd_create mincore "
    "mkdir mkdirat mknod mknodat mlock mlock2 mlockall mmap modify_ldt mprotect mq_getsetattr mq_notify mq_open "
    "mq_timedreceive mq_timedsend mq_unlink mremap msgctl msgget msgrcv msgsnd msync munlock munlockall munmap nanosleep "
    "newfstatat open openat openat2 pause pidfd_getfd pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc pkey_free "
    "pkey_mprotect poll ppoll prctl pread64 preadv preadv2 prlimit64 process_mrelease process_vm_readv process_vm_writev "
    "pselect6 ptrace pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv recvfrom recvmmsg recvmsg "
    "remap_file_pages removexattr rename renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending "
    "rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max "
    "sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval "
    "sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield seccomp select semctl semget semop "
    "semtimedop sendfile sendmmsg sendmsg sendto set_robust_list set_tid_address setfsgid setfsuid setgid setgroups "
    "setitimer setpgid setpriority setregid setresgid setresuid setreuid setrlimit setsid setsockopt setuid setxattr shmat "
    "shmctl shmdt shmget shutdown sigaltstack signalfd signalfd4 socketpair splice stat statfs statx symlink symlinkat sync "
    "sync_file_range syncfs sysinfo tee tgkill time timer_create timer_delete timer_getoverrun timer_gettime timer_settime "
    "timerfd_create timerfd_gettime timerfd_settime times tkill truncate umask uname unlink unlinkat utime utimensat utimes "
    "vfork vmsplice wait4 waitid write writev fadvise64_64 ftruncate64 truncate64 stat64 fstat64 lstat64 fstatat64 statfs64 "
    "fstatfs64 sendfile64 mmap2 _llseek fcntl64 getuid32 geteuid32 getgid32 getegid32 waitpid sync_file_range2 futex_time64 "
    "clock_gettime64 clock_nanosleep_time64 cachestat fchmodat2 map_shadow_stack futex_wake futex_wait futex_requeue "
    "statmount listmount lsm_get_self_attr lsm_list_modules mseal "
)

_REFUSED = (
    "_sysctl acct add_key adjtimex afs_syscall bpf chroot clock_adjtime clock_settime create_module delete_module "
    "epoll_ctl_old epoll_wait_old fanotify_init finit_module fsconfig fsmount fsopen fspick get_kernel_syms get_mempolicy "
    "get_thread_area getpmsg init_module io_uring_enter io_uring_register io_uring_setup ioperm iopl kcmp kexec_file_load "
    "kexec_load keyctl lookup_dcookie mbind memfd_secret migrate_pages mount mount_setattr move_mount move_pages "
    "name_to_handle_at nfsservctl open_by_handle_at open_tree perf_event_open pivot_root process_madvise putpmsg "
    "query_module quotactl quotactl_fd reboot request_key security set_mempolicy set_mempolicy_home_node set_thread_area "
    "setdomainname sethostname setns settimeofday swapoff swapon sysfs syslog tuxcall umount2 unshare uselib userfaultfd "
    "ustat vhangup vserver "
)

_FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10, "AF_NETLINK": 16}
_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET (include/uapi/linux/sched.h)."""

_TIOCSTI = 0x5412
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
"""PER_LINUX, PER_LINUX32, both with UNAME26, and the question which one it is."""


def profile() -> str:
    """Return the profile as JSON text, as ``--security-opt seccomp=`` takes it."""
    allow, refuse = "SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO"
    rules: list[dict[str, Any]] = [
        {"names": sorted(_ALLOWED.split()), "action": allow},
        {"names": sorted(_REFUSED.split()), "action": refuse, "errnoRet": errno.EPERM},
        {"names": ["clone3"], "action": refuse, "errnoRet": errno.ENOSYS},  # its flags lie in memory: clone is asked instead
        {"names": ["clone"], "action": allow, "args": [_masked(0, _NEW_NAMESPACES)]},
        {"names": ["ioctl"], "action": allow, "args": [_compared(1, _TIOCSTI, "SCMP_CMP_NE")]},
    ]
    rules += [{"names": ["socket"], "action": allow, "args": [_compared(0, family)]} for family in _FAMILIES.values()]
    rules += [{"names": ["personality"], "action": allow, "args": [_compared(0, kind)]} for kind in _PERSONALITIES]
    return json.dumps({
        "defaultAction": refuse,
        "defaultErrnoRet": errno.ENOSYS,
        "archMap": [
            {"architecture": "SCMP_ARCH_X86_64", "subArchitectures": []},
            {"architecture": "SCMP_ARCH_AARCH64", "subArchitectures": []},
        ],
        "syscalls": rules,
    })  # fmt: skip


def _compared(index: int, value: int, how: str = "SCMP_CMP_EQ") -> dict[str, Any]:
    return {"index": index, "value": value, "valueTwo": 0, "op": how}


def _masked(index: int, mask: int) -> dict[str, Any]:
    return {"index": index, "value": mask, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
