//! SPDK probes: ELF and DWARF resolution, probe placement, uprobes and USDT.
