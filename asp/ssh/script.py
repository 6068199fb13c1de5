"""The texts that travel: login command, boot line, command line, guard. Pure; no I/O (E1, E3, E6).

A session is one SSH session channel for one command. sshd hands :data:`LOGIN` to the login shell, which becomes
``/bin/sh``; that reads one *boot* line from stdin, says READY with its pid, and reads one *command* line, which ends in
``exec bash -c -- SCRIPT``. So the process that sshd started becomes the user's shell, and status, signal, stdin, stdout,
stderr and EOF are those of SSH itself: nothing of ours sits in the command's path (facts/exec-wrapper.md, measured).

Anything that would run the user's shell under ``&`` is wrong: a background child of a non-interactive sh has SIGINT and
SIGQUIT ignored for ever (POSIX 2.11).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from asp.errors import CommandRefused

LOGIN = "exec /bin/sh -c 'IFS= read -r __b && eval \"$__b\"'"
"""The only command line ever sent. It holds no newline, ``!``, backslash or inner single quote, so that it means the same
in bash, dash, busybox ash, mksh, zsh, fish and tcsh; ``exec`` so that no login shell stays in between."""

INLINE_LIMIT = 4096
"""Longest quoted script inside the command line: sh's ``read`` takes one system call a byte, 0.33 ms per KB."""

ARGUMENT_LIMIT = 120_000
"""Longest script that is given as one argument: Linux MAX_ARG_STRLEN is 131,072 with the final NUL."""

NOT_RUN = 255
"""Status of a session whose script did not arrive whole; the sentinel on stdout tells it from a script's own 255."""

SENTINEL_LENGTH = 2 * 16

SCRUBBED = (
    # What sshd and PAM tell a session about the transport. SSH_PUBKEYINFO is dropbear's and holds the key's comment.
    "SSH_CLIENT SSH2_CLIENT SSH_CONNECTION SSH_TTY SSH_ORIGINAL_COMMAND SSH_USER_AUTH SSH_PUBKEYINFO SSH_AUTH_SOCK "
    # What would differ from a shell that was started directly. SHLVL is unset so that bash makes it 1.
    "MOTD_SHOWN OLDPWD SHLVL MAIL"
)

NONCE_BYTES = 16
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def quote(text: bytes) -> bytes:
    """Quote bytes as *one line* of POSIX sh: a newline becomes ``"$__n"``, which the boot line defines."""
    return b'"$__n"'.join(b"'" + part.replace(b"'", b"'\\''") + b"'" for part in text.split(b"\n"))


_NEWLINE = "__n=$(printf '\\nx'); __n=${__n%x}"  # command substitution eats final newlines, so an x guards it
# We need a process group of our own, since kill reaches a group. OpenSSH made one (it calls setsid); for others setsid(1)
# does not fork, because we are no leader, so the pid stays and this very line is the script of the new sh.
_LEAD_A_GROUP = 'kill -0 -$$ 2>/dev/null || { command -v setsid >/dev/null 2>&1 && exec setsid /bin/sh -c "$__b"; }'


def boot_line(nonce: str, cwd: bytes) -> bytes:
    r"""Return the line that prepares a session: clean environment, umask 022, the working directory, then READY.

    It answers ``NONCE R PID`` on stdout and ``NONCE R`` on stderr (all before is login noise), or ``NONCE D`` if the
    working directory is missing. 128 bits of nonce cannot be guessed by an rc file, and the command never sees them.
    """
    statements = (
        _LEAD_A_GROUP,
        f"unset __b {SCRUBBED}",
        "umask 022",
        _NEWLINE,
        f"cd -- {quote(cwd).decode('latin-1')} 2>/dev/null || {{ echo {nonce} D; exit 0; }}",
        "unset OLDPWD",
        "__s=sh; command -v bash >/dev/null 2>&1 && __s=bash",
        f"echo {nonce} R >&2; echo {nonce} R $$",
        # A command line that was cut off has no newline: it is not run. Never 0, which would look like a success.
        f'IFS= read -r __b || exit {NOT_RUN}; eval "$__b"',
    )
    return "; ".join(statements).encode("latin-1") + b"\n"


@dataclass(frozen=True, slots=True)
class CommandText:
    """What is written to a READY session: one line, then raw bytes (a long script) that precede the caller's stdin.

    ``not_run`` is what such a session prints, and nothing else, when the script did not arrive whole.
    """

    line: bytes
    script: bytes = b""
    not_run: bytes | None = None


def command_text(
    script: bytes, sentinel: str, *, env: Mapping[str, str] | None = None, stdin: bool = False, merge_streams: bool = False,
) -> CommandText:
    """Return what turns a READY session into ``bash -c -- SCRIPT``.

    A long script follows the line, and ``sentinel`` (fresh, 32 characters) follows it: what a cut connection leaves of a
    script must never run, since a part of ``rm -rf ./build/x`` is another command. Nor may a missing or failing ``head``
    turn it into an empty script that ends with 0.

    ``stdin``: the caller's own bytes follow; without it stdin is empty. ``merge_streams``: ``2>&1``, merged where it is
    written, because merging two SSH streams here broke the order in 20 of 30 runs.

    Raises CommandRefused for a NUL byte (no shell can take it) and for a variable name that is not an identifier.
    """
    if b"\0" in script:
        msg = "the script holds a NUL byte, which no shell can take; nothing was run"
        raise CommandRefused(msg)
    exports = b""
    for name, value in (env or {}).items():
        if not _VARIABLE.match(name) or "\0" in value:
            msg = f"the environment variable {name!r} cannot be set: its name is not an identifier or its value holds a NUL"
            raise CommandRefused(msg)
        exports += b"export " + name.encode() + b"=" + quote(value.encode("utf-8", "surrogateescape")) + b"; "
    merge = b" 2>&1" if merge_streams else b""
    redirections = (b"" if stdin else b" </dev/null") + merge
    quoted = quote(script)
    # With stdin the script stays in the line as long as it can: busybox head reads ahead and would eat the caller's bytes.
    if len(quoted) <= INLINE_LIMIT or (stdin and len(quoted) <= ARGUMENT_LIMIT):
        return CommandText(exports + b"exec $__s -c -- " + quoted + redirections + b"\n")
    raw = script + sentinel.encode()
    end = sentinel.encode()
    not_run = end + b"\n"
    missing = b"echo %s; exit %d" % (end, NOT_RUN)
    if len(script) <= ARGUMENT_LIMIT:
        take = b'__b=$(head -c %d); case $__b in *%s) exec $__s -c -- "${__b%%%s}"%s;; esac; %s\n' % (
            len(raw), end, end, redirections, missing,
        )  # fmt: skip
        return CommandText(exports + take, raw, not_run)
    # Longer than one argument may be: a fresh shell reads it, then evals it. The only place where eval is used; a syntax
    # error says "eval: line 1" there, and xtrace shows ++. LC_ALL=C makes bash's read -N take big blocks.
    empty = b"" if stdin else b"exec </dev/null; "
    in_bash = (
        b'LC_ALL=C IFS= read -rN %d BASH_EXECUTION_STRING; IFS= read -rN %d; [ "$REPLY" = %s ] || { %s; }; unset REPLY; '
        b'%seval " $BASH_EXECUTION_STRING"'
    ) % (len(script), len(end), end, missing, empty)
    in_sh = b'__s=$(head -c %d); case $__s in *%s) ;; *) %s;; esac; %seval " ${__s%%%s}"' % (
        len(raw), end, missing, empty, end,
    )  # fmt: skip
    line = b"[ $__s = sh ] || exec bash -c '%s' bash%s; exec sh -c '%s' sh%s\n" % (in_bash, merge, in_sh, merge)
    return CommandText(exports + line, raw, not_run)


def guard_line(nonce: str, same_host_path: bytes) -> bytes:
    r"""Return the boot line of a guard: a sh loop that knows every process group before its command is sent (E6).

    It answers ``NONCE R PID here|there``: *here* if ``same_host_path``, a folder that we just made, exists where the
    commands would run (C4). Then one request a line:

    ``+ PID``      register a group and attach its drain; answers ``+ PID 1``, or ``+ PID 0`` if the pipes cannot be opened
    ``- PID``      the command ended and nobody holds its output: forget it
    ``d PID``      it ended, but a background child holds its output: go on draining, forget it
    ``k PID N``    TERM, CONT, at most N tenths of a second of grace, KILL
    ``p TOKEN``    answers ``p TOKEN``; the barrier of E5
    ``t TOKEN 'F'`` remove F if the connection ends before ``u``; answers ``t TOKEN``. ``u`` forgets all such files

    When its stdin ends (client killed, connection cut) it kills all that is registered.

    The drain of a session is one *stopped* process that holds the read ends of its pipes, opened through /proc. It costs
    nothing while stopped. When the command has ended and a background child goes on writing, the client closes the
    channel, which frees the session's slot, and the drain is continued: the child neither blocks nor dies of SIGPIPE.
    """
    kill = (
        "__k() { kill -TERM -$1; kill -CONT -$1; __i=0; "
        "while [ $__i -lt $2 ] && kill -0 -$1; do if sleep .1; then __i=$((__i+1)); else sleep 1; __i=$((__i+10)); fi; done; "
        "kill -KILL -$1; }"
    )
    forget = '__f() { __o=; for __x in $__g; do [ $__x = $1 ] || __o="$__o $__x"; done; __g=$__o; }'
    # The redirections open the pipes in the guard before it answers, so the session may be used from the answer on.
    drain = (
        "{ /bin/sh -c 'kill -STOP $$; cat <&4 3<&- & cat <&3 4<&-; wait' & } "
        "3</proc/$__p/fd/1 4</proc/$__p/fd/2 >/dev/null 2>&1"
    )
    can_drain = "[ -r /proc/$__p/fd/1 ] && [ -p /proc/$__p/fd/1 ] && [ -r /proc/$__p/fd/2 ]"
    requests = (
        f'+) __g="$__g $__p"; if {can_drain}; then {drain}; eval "__d$__p=$!"; echo "+ $__p 1"; else echo "+ $__p 0"; fi;;',
        '-) __f $__p; eval "__d=\\$__d$__p"; [ -z "$__d" ] || { kill -KILL $__d; wait $__d; unset __d$__p; } 2>/dev/null;;',
        "k) __k $__p ${__a:-20} >/dev/null 2>&1 & ;;",
        # CONT again after a second: the drain may not have come to its STOP yet.
        'd) __f $__p; eval "__d=\\$__d$__p"; { kill -CONT $__d; (sleep 1; kill -CONT $__d) & } >/dev/null 2>&1;;',
        'p) echo "p $__p";;',
        't) eval "set -- \\"\\$@\\" $__a"; echo "t $__p";;',
        "u) set --;;",
    )
    loop = f"while IFS=' ' read -r __c __p __a; do jobs >/dev/null 2>&1; case $__c in {' '.join(requests)} esac; done"
    at_the_end = (
        'rm -f -- "$@"; '
        'for __p in $__g; do kill -TERM -$__p; kill -CONT -$__p; eval "__d=\\$__d$__p"; kill -KILL $__d; done 2>/dev/null; '
        # Up to the grace of 2 s, but not longer than the last of them lives.
        "__i=0; while [ $__i -lt 20 ]; do __o=; for __p in $__g; do kill -0 -$__p 2>/dev/null && __o=1; done; "
        '[ -n "$__o" ] || break; if sleep .1; then __i=$((__i+1)); else sleep 1; __i=$((__i+10)); fi; done 2>/dev/null; '
        "for __p in $__g; do kill -KILL -$__p; done 2>/dev/null"
    )
    here = quote(same_host_path).decode("latin-1")
    statements = (
        f"unset __b {SCRUBBED}",
        _NEWLINE,
        "cd /; trap '' HUP TERM INT PIPE",
        f"__h=there; [ -e {here} ] && __h=here",
        f"echo {nonce} R $$ $__h",
        kill,
        forget,
        "__g=; set --",
        loop,
        at_the_end,
    )
    return "; ".join(statements).encode("latin-1") + b"\n"
