//! A small NVMe/TCP target and initiator with SPDK's probe points: a stand-in, never SPDK.
