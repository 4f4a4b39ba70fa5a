# shellcheck shell=sh
# What connect-host and disconnect-host share: reading the kernel's NVMe controllers from sysfs, and
# the notes about those that connect-host made. Plain POSIX sh. Needs lib.sh.

FABRICS=/dev/nvme-fabrics
CLASS=/sys/class/nvme

need_root() {
    if [ "$(id -u)" != 0 ]; then
        fail "needs root, to use $FABRICS and sysfs" "run it as: sudo $0 ..."
    fi
}

# The controllers' names, one a line. Subsystems of other buses are among them.
controllers() {
    for path in "$CLASS"/nvme*; do
        [ ! -e "$path/transport" ] || printf '%s\n' "${path##*/}"
    done
}

# attribute CONTROLLER NAME: empty where the kernel does not have it.
attribute() {
    cat "$CLASS/$1/$2" 2>/dev/null || true
}

# serves CONTROLLER NQN ADDRESS PORT: whether a controller is an NVMe/TCP one of that subsystem there.
serves() {
    [ "$(attribute "$1" transport)" = tcp ] && [ "$(attribute "$1" subsysnqn)" = "$2" ] || return 1
    case ,$(attribute "$1" address), in
        *,traddr="$3",*) ;;
        *) return 1 ;;
    esac
    case ,$(attribute "$1" address), in
        *,trsvcid="$4",*) return 0 ;;
        *) return 1 ;;
    esac
}

# identity CONTROLLER: tells this controller from a later one of the same name: sysfs gives every
# directory that it makes an inode number of its own.
identity() {
    set -- "$(ls -di "$CLASS/$1/" 2>/dev/null)"
    # shellcheck disable=SC2086 # the first word is the inode
    set -- $1
    printf '%s\n' "${1:-}"
}

note_path() {
    printf '%s/host-%s\n' "$2" "$1"
}

# note_of CONTROLLER STATE: the path of connect-host's note about this very controller, if it made one.
note_of() {
    set -- "$1" "$(note_path "$1" "$2")"
    [ -f "$2" ] && [ -n "$(value_of identity "$2")" ] && [ "$(value_of identity "$2")" = "$(identity "$1")" ] || return 1
    printf '%s\n' "$2"
}

# devices CONTROLLER: its namespaces' block devices that are there to be used, one a line. With native
# multipath the controller has nvme0c1n1, and the device is nvme0n1.
devices() {
    for path in "$CLASS/$1"/nvme*n*; do
        [ -e "$path" ] || continue
        device=$(printf '%s\n' "${path##*/}" | sed 's/^\(nvme[0-9]*\)c[0-9]*\(n[0-9]*\)$/\1\2/')
        if [ -b "/dev/$device" ] && [ "$(cat "/sys/class/block/$device/size" 2>/dev/null || echo 0)" -gt 0 ]; then
            printf '/dev/%s\n' "$device"
        fi
    done
}

show_devices() {
    devices "$1" | while read -r device; do
        sectors=$(cat "/sys/class/block/${device#/dev/}/size")
        # Without native multipath the device's number need not be the namespace's.
        nsid=$(cat "/sys/class/block/${device#/dev/}/nsid" 2>/dev/null || echo '?')
        say "  $device  nsid $nsid, $((sectors / 2048)) MiB"
    done
}

# holders CONTROLLER: what uses its devices; empty if nothing does.
holders() {
    devices "$1" | while read -r device; do
        awk -v device="$device" '$1 == device || index($1, device "p") == 1 { print $1 " is mounted on " $2 }' /proc/mounts
        awk -v device="$device" '$1 == device || index($1, device "p") == 1 { print $1 " is swap" }' /proc/swaps
        for holder in "/sys/class/block/${device#/dev/}"/holders/* "/sys/class/block/${device#/dev/}"/*/holders/*; do
            [ ! -e "$holder" ] || printf '%s is part of %s\n' "$device" "${holder##*/}"
        done
    done
}

# end_controller CONTROLLER: disconnects it and waits until it has gone.
end_controller() {
    identity=$(identity "$1")
    (printf 1 >"$CLASS/$1/delete_controller") 2>/dev/null || [ ! -e "$CLASS/$1" ] || return 1
    tries=300
    while [ -e "$CLASS/$1" ] && [ "$(identity "$1")" = "$identity" ]; do
        [ "$tries" -gt 0 ] || return 1
        tries=$((tries - 1))
        sleep 0.1
    done
}
