//! The VM test bed: Debian kernels under QEMU, as a library for tests.
