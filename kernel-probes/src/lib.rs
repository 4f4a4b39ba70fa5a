//! Linux probes: the NVMe-oF host and the kernel target.
