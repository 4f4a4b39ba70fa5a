#!/usr/bin/env bash
# Whether an SPDK build may take an earlier one's place: first what fabscope can see of it, without running anything,
# then the same load on both builds in turn, recorded and compared stage by stage. Changes neither build.
set -euo pipefail

here=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")

usage() {
    cat <<'USAGE'
Usage: spdk-upgrade.sh --old BUILD --new BUILD [OPTIONS]

BUILD is a directory with bin/nvmf_tgt and bin/spdk_nvme_perf, such as spdk/build. Needs root, for recording.

  --baseline FILE   what `fabscope probe target --spdk OLD/bin/nvmf_tgt --format json` printed, kept with the sources
                    (default: made from the old build)
  --gate GATES      what has to hold (default: latency.mean<=1.10x,target_driver.mean<=1.25x)
  --repeats N       recordings of each build (default: 5)
  --seconds S       length of each (default: 2)
  --load ARGUMENTS  what spdk_nvme_perf is to do (default: "-q 4 -o 4096 -w randrw -M 50")
  --bdev SPEC       what the target serves, as start-target --bdev takes it (default: malloc:64M)
  --port PORT       where the target listens on 127.0.0.1 (default: 4420)
  --out DIR         where everything goes; must not be there (default: spdk-upgrade.out)
  -h, --help        this text

The environment: FABSCOPE is the command (default: fabscope), SETUP the folder of the scripts that start and stop a
target (default: scripts/spdk-setup of fabscope's sources), TARGET_CORES and PERF_CORES the core masks (0x1 and 0x2),
TARGET_ARGUMENTS what nvmf_tgt is given besides.

Exit status: 0 all holds; 1 an error; 2 wrong usage; 3 a boundary no longer resolves, or a gate does not hold;
4 too little was recorded to say.
USAGE
}

misuse() {
    printf 'spdk-upgrade: %s\n  see: spdk-upgrade.sh --help\n' "$1" >&2
    exit 2
}

fail() {
    printf 'spdk-upgrade: %s\n' "$1" >&2
    exit 1
}

say() {
    printf '\n== %s\n' "$1"
}

old=
new=
baseline=
gate='latency.mean<=1.10x,target_driver.mean<=1.25x'
repeats=5
seconds=2
load='-q 4 -o 4096 -w randrw -M 50'
bdev=malloc:64M
port=4420
out=spdk-upgrade.out

while [ $# -gt 0 ]; do
    case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --old | --new | --baseline | --gate | --repeats | --seconds | --load | --bdev | --port | --out)
            [ $# -ge 2 ] || misuse "$1 needs a value"
            printf -v "${1#--}" '%s' "$2"
            shift 2
            ;;
        *) misuse "unknown argument $1" ;;
    esac
done

[ -n "$old" ] || misuse "which build is the old one: --old BUILD"
[ -n "$new" ] || misuse "which build is the new one: --new BUILD"
[[ $repeats =~ ^[1-9][0-9]?$ ]] || misuse "--repeats $repeats is no number from 1 to 99"
[[ $seconds =~ ^[1-9][0-9]?$ ]] || misuse "--seconds $seconds is no number from 1 to 99"
[[ $port =~ ^[1-9][0-9]{0,4}$ ]] || misuse "--port $port is no port"
fabscope=${FABSCOPE:-fabscope}
setup=${SETUP:-$here/../../scripts/spdk-setup}
command -v "$fabscope" >/dev/null || fail "there is no $fabscope: give its path in FABSCOPE"
[ -x "$setup/start-target" ] || fail "there is no $setup/start-target: give the folder in SETUP"
for build in "$old" "$new"; do
    for program in nvmf_tgt spdk_nvme_perf; do
        [ -x "$build/bin/$program" ] || fail "there is no $build/bin/$program"
    done
done
[ "$(id -u)" -eq 0 ] || fail "recording needs root: sudo $0 ..."
mkdir -- "$out" || fail "choose another directory, or remove it: --out DIR"
out=$(readlink -f -- "$out")

# What runs is stopped however this ends.
perf=
recorder=
# shellcheck disable=SC2317 # the trap calls it
clean_up() {
    local status=$?
    trap - EXIT
    for pid in $perf $recorder; do
        kill "$pid" 2>/dev/null || true
    done
    "$setup/stop-target" --all --state "$out/state" >/dev/null 2>&1 || true
    exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# ---- what can be seen without running anything -----------------------------------------------------------

say 'what the new build offers'
if [ -z "$baseline" ]; then
    baseline=$out/target-hooks.json
    "$fabscope" probe target --spdk "$old/bin/nvmf_tgt" --format json >"$baseline"
fi
status=0
"$fabscope" probe target --spdk "$new/bin/nvmf_tgt" --baseline "$baseline" --format json \
    >"$out/hooks-comparison.json" || status=$?
if [ "$status" -eq 0 ] || [ "$status" -eq 3 ]; then
    "$fabscope" probe target --spdk "$new/bin/nvmf_tgt" --baseline "$baseline" | tee "$out/hooks-comparison.txt"
fi
# What is not seen can not be compared: there the check ends.
[ "$status" -eq 0 ] || exit "$status"

# ---- the same load on both builds, in turn --------------------------------------------------------------------

# record BUILD DIR: one recording of both sides.
record() {
    local build=$1 runs=$2 target trid
    # $TARGET_ARGUMENTS is several arguments, or none.
    # shellcheck disable=SC2086
    "$setup/start-target" --spdk-build "$build" --name upgrade --state "$out/state" --bdev "$bdev" \
        --listen "127.0.0.1:$port" --cores "${TARGET_CORES:-0x1}" -- ${TARGET_ARGUMENTS:-} >/dev/null
    target=$(sed -n 's/^pid=//p' "$out/state/target-upgrade/state")
    mkdir -p "$runs"
    "$fabscope" record target --quiet --spdk "$target" -o "$runs/target.run" &
    recorder=$!
    trid="trtype:TCP adrfam:IPv4 traddr:127.0.0.1 trsvcid:$port subnqn:nqn.2024-01.io.fabscope:upgrade"
    # $load is several arguments.
    # shellcheck disable=SC2086
    "$build/bin/spdk_nvme_perf" --no-huge -s 256 -c "${PERF_CORES:-0x2}" -r "$trid" -t 600 $load \
        >"$runs/perf.log" 2>&1 &
    perf=$!
    # The load is under way when the target's recording has commands.
    for ((tries = 300; tries > 0; tries--)); do
        compgen -G "$runs/target.run/commands/*.parquet" >/dev/null && break
        kill -0 "$recorder" 2>/dev/null || fail "the target's recording ended before there was a command"
        kill -0 "$perf" 2>/dev/null || fail "spdk_nvme_perf ended: $(tail -n 1 "$runs/perf.log")"
        sleep 0.1
    done
    [ "$tries" -gt 0 ] || fail "spdk_nvme_perf does nothing: see $runs/perf.log"
    "$fabscope" record host --quiet --spdk "$perf" -o "$runs/host.run" -d "${seconds}s"
    kill -INT "$recorder"
    wait "$recorder"
    recorder=
    kill -INT "$perf"
    wait "$perf" || true
    perf=
    "$setup/stop-target" --name upgrade --state "$out/state" >/dev/null
}

say "recording $load on both builds in turn, $repeats times"
for ((n = 1; n <= repeats; n++)); do
    # The one that goes first finds the machine as the other left it: they change places.
    if ((n % 2)); then order='old new'; else order='new old'; fi
    for build in $order; do
        record "${!build}" "$out/$build-$n"
        printf '%s ' "$build-$n"
    done
done
printf '\n'

say 'stage by stage'
status=0
"$fabscope" compare "$out"/old-* --against "$out"/new-* --gate "$gate" --format junit >"$out/compare.xml" || status=$?
"$fabscope" compare "$out"/old-* --against "$out"/new-* --gate "$gate" | tee "$out/compare.txt" || true
exit "$status"
