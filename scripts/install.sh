# shellcheck shell=bash
# Sourced by scripts/demo and scripts/test: installs what is missing from Debian's packages. Does nothing,
# and needs no rights, where all is there already.

# install_missing PACKAGE...: installs those that are not installed.
install_missing() {
	local package missing=()
	for package in "$@"; do
		if [ "$(dpkg-query -W -f='${Status}' "$package" 2>/dev/null)" != "install ok installed" ]; then
			missing+=("$package")
		fi
	done
	[ ${#missing[@]} -gt 0 ] || return 0
	echo "installing: ${missing[*]}"
	local sudo=()
	if [ "$(id -u)" != 0 ]; then
		if ! command -v sudo >/dev/null; then
			echo "these packages are missing and installing them needs root: ${missing[*]}" >&2
			return 1
		fi
		sudo=(sudo)
	fi
	# A newer qemu-utils from elsewhere conflicts with Debian's qemu-system-x86: it gives way.
	local extra=()
	case " ${missing[*]} " in *" qemu-system-x86 "*) extra=(qemu-utils-) ;; esac
	"${sudo[@]}" apt-get -o DPkg::Lock::Timeout=300 update -qq
	DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get -o DPkg::Lock::Timeout=300 install -y -qq \
		--no-install-recommends "${missing[@]}" "${extra[@]}" >/dev/null
}

# What a build needs (used by whoever sources this): a C compiler and make (libbpf), clang (BPF programs, bindgen), libelf and zlib.
# shellcheck disable=SC2034
BUILD_PACKAGES=(gcc libc6-dev make pkg-config clang libclang-dev libelf-dev zlib1g-dev)
# What the tests need besides: fixtures in every kind of build (lld, llvm's dwp, dwz), the VM test bed, fio.
# shellcheck disable=SC2034
TEST_PACKAGES=(binutils gcc clang lld llvm dwz qemu-system-x86 busybox-static zstd xz-utils fio iproute2 dmsetup shellcheck python3-minimal util-linux)

# need_cargo: finds rustup's cargo, or says how to get it.
need_cargo() {
	if ! command -v cargo >/dev/null && [ -f "${CARGO_HOME:-$HOME/.cargo}/env" ]; then
		# shellcheck disable=SC1091
		. "${CARGO_HOME:-$HOME/.cargo}/env"
	fi
	if ! command -v cargo >/dev/null; then
		echo "no cargo: install Rust's stable toolchain with rustup first" >&2
		return 1
	fi
}
