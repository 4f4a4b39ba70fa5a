# shellcheck shell=sh
# What the commands of this folder share: messages, the state directory, and telling one process
# from another. Plain POSIX sh, since connect-host and disconnect-host also run under busybox.
#
# A state file holds one `key=value` a line. It is read line by line, never sourced, so nothing in
# it is ever executed.

# The caller sets PROGRAM to its own name.
: "${PROGRAM:=spdk-setup}"

say() {
    printf '%s\n' "$*"
}

warn() {
    printf '%s: %s\n' "$PROGRAM" "$*" >&2
}

# fail WHAT [NEXT STEP]: an error that is not the caller's usage; exits 1.
fail() {
    warn "$1"
    if [ $# -gt 1 ]; then
        printf '  %s\n' "$2" >&2
    fi
    exit 1
}

# misuse WHAT: wrong usage; exits 2.
misuse() {
    warn "$1"
    printf '  see: %s --help\n' "$PROGRAM" >&2
    exit 2
}

# argument FLAG COUNT: makes sure that a flag that takes a value was given one.
argument() {
    if [ "$2" -lt 2 ]; then
        misuse "$1 needs a value"
    fi
}

is_number() {
    case $1 in
        '' | *[!0-9]*) return 1 ;;
        *) [ "${#1}" -le 18 ] ;;
    esac
}

# is_count VALUE LEAST MOST
is_count() {
    is_number "$1" && [ "$1" -ge "$2" ] && [ "$1" -le "$3" ]
}

is_port() {
    is_count "$1" 1 65535
}

# An NQN as the NVMe base specification has it: at most 223 bytes, beginning with "nqn.". Spaces,
# commas, quotes and backslashes are refused as well, as none of them survives the fabrics driver's
# option string.
is_nqn() {
    case $1 in
        *[!A-Za-z0-9._:/+@%-]*) return 1 ;;
        nqn.?*) [ "${#1}" -le 223 ] ;;
        *) return 1 ;;
    esac
}

# An address: digits, letters, dots, colons, and a zone behind %.
is_address() {
    case $1 in
        '' | *[!A-Za-z0-9.:%_-]*) return 1 ;;
        *) return 0 ;;
    esac
}

# A name that becomes part of a path.
is_name() {
    case $1 in
        '' | .* | -* | *[!A-Za-z0-9._-]*) return 1 ;;
        *) [ "${#1}" -le 32 ] ;;
    esac
}

# Where the commands note what they did, so that their counterparts undo exactly that.
default_state_directory() {
    if [ -n "${FABSCOPE_STATE:-}" ]; then
        printf '%s\n' "$FABSCOPE_STATE"
    elif [ "$(id -u)" = 0 ]; then
        printf '/run/fabscope\n'
    else
        printf '%s/fabscope\n' "${XDG_RUNTIME_DIR:-${HOME:?}/.cache}"
    fi
}

make_state_directory() {
    if ! (umask 077 && mkdir -p "$1") 2>/dev/null; then
        fail "cannot create the state directory $1" "name one that you can write: --state DIR"
    fi
    if [ ! -w "$1" ]; then
        fail "cannot write to the state directory $1" "name one that you can write: --state DIR"
    fi
}

# value_of KEY FILE: the last value of a key, empty if there is none.
value_of() {
    sed -n "s/^$1=//p" "$2" 2>/dev/null | tail -n 1
}

# start_time PID: when a process started, in clock ticks since boot (field 22 of /proc/PID/stat);
# with the PID it names a process for good, since PIDs are reused. Counted from behind the last
# parenthesis, as the process's name may hold spaces and parentheses. Fails if there is no such
# process, or only its zombie.
start_time() {
    sed -n 's/^.*) \([^Z] .*\)$/\1/p' "/proc/$1/stat" 2>/dev/null | cut -d ' ' -f 20 | grep .
}

# still_runs PID START_TIME
still_runs() {
    [ -n "$1" ] && [ -n "$2" ] && [ "$(start_time "$1")" = "$2" ]
}
