//! Prints what the kernel knows of the BPF programs that are loaded now, one a line with tab-separated fields: name,
//! instructions after verification, bytes of machine code, runs, nanoseconds in them, hits that were skipped. The
//! kernel counts runs and their time while `kernel.bpf_stats_enabled` is 1.

use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions};

/// Bytes of one BPF instruction.
const INSTRUCTION: usize = 8;

fn main() {
    let options =
        ProgInfoQueryOptions::default().include_xlated_prog_insns(true).include_jited_prog_insns(true);
    for program in ProgInfoIter::with_query_opts(options) {
        println!(
            "program\t{}\t{}\t{}\t{}\t{}\t{}",
            program.name.to_string_lossy(),
            program.xlated_prog_insns.len() / INSTRUCTION,
            program.jited_prog_insns.len(),
            program.run_cnt,
            program.run_time_ns,
            program.recursion_misses,
        );
    }
}
