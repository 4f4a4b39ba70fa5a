//! Joining and reporting pairs of runs whose truth is known.

fn main() {
    divan::main();
}
